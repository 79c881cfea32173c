"""SGLang's page hash as its source states it."""

import hashlib
import struct

from indexer.engine_hash import normalise
from indexer.sglang_hash import page_hash, page_hashes, wire

TOKENS = [1, 2, 3, 4, 70000, 6, 7, 8]


def test_an_unfinished_page_has_no_hash() -> None:
    assert page_hashes(TOKENS[:3], 4) == []


def test_a_page_hashes_the_digest_before_it_and_its_tokens() -> None:
    first = hashlib.sha256(struct.pack("<4I", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 70000, 6, 7, 8)).digest()
    assert page_hashes(TOKENS, 4) == [first, second]
    assert page_hash(None, TOKENS[:4]) == first
    assert page_hash(first, TOKENS[4:]) == second
    assert page_hashes(TOKENS[4:], 4, first) == [second]


def test_the_announced_signed_value_is_the_unsigned_one() -> None:
    for digest in page_hashes(list(range(400)), 4):
        announced = int.from_bytes(digest[:8], "big", signed=True)
        assert normalise(announced) == wire(digest)
