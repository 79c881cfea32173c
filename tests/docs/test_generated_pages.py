"""The pages that are generated from the code are what the code says now."""

from pathlib import Path

import pytest

from gateway.commands.docs import PAGES

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: make docs"
