"""BLAKE3 against the reference implementation's digests."""

import json
from pathlib import Path

import pytest

from tokenization.blake3 import blake3_hex

VECTORS = json.loads((Path(__file__).parent.parent / "data" / "image_vectors.json").read_text())["blake3"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["bytes"]))
def test_digests_of_every_length_are_those_of_the_reference(vector: dict[str, object]) -> None:
    length = int(str(vector["bytes"]))
    assert blake3_hex(bytes(at % 251 for at in range(length))) == vector["digest"]


def test_one_bit_anywhere_changes_the_digest() -> None:
    data = bytes(5000)
    flipped = [data[:at] + b"\x01" + data[at + 1 :] for at in (0, 1023, 1024, 4095, 4999)]
    assert len({blake3_hex(one) for one in (data, data + b"\x00", *flipped)}) == 7
