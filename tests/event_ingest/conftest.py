"""What the event tests share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def captures() -> Path:
    """The recordings that the repository carries."""
    return Path(__file__).resolve().parent.parent / "data" / "captures"
