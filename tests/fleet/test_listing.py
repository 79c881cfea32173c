"""What an engine lists under /v1/models."""

import json

import msgspec
import pytest

from fleet.listing import Listing, parse


def test_a_page_that_is_no_listing_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        parse(b'{"object": "list"}')


def test_adapters_are_told_by_their_parent() -> None:
    page = {
        "data": [
            {"id": "base", "root": "/models/base", "parent": None},
            {"id": "base-alias", "root": "/models/base"},
            {"id": "ad1", "root": "lora-ad1", "parent": "base"},
        ]
    }
    found = parse(json.dumps(page).encode())
    assert found == Listing(("base", "base-alias"), {"ad1": "lora-ad1"}, "/models/base")
    assert found.names == {"base", "base-alias", "ad1"}
