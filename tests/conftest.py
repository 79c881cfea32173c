"""Fixtures that every room uses."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with recordings, tokenizers and traces; tests that need it are skipped where it is missing."""
    path = Path(os.environ.get("WARMROUTE_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "captures").is_dir():
        pytest.skip(f"needs the shared recordings, looked in {path} (set WARMROUTE_SHARED)")
    return path


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port on 127.0.0.1 that was free a moment ago."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return pick
