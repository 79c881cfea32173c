"""llm-d's keys against the values its own program gave (tests/data/llmd_hash_vectors.json names the source)."""

import json
from pathlib import Path
from typing import Any

import pytest

from indexer.llmd_hash import block_keys, fnv1a64, root_key

RECORDED = json.loads((Path(__file__).parent.parent / "data" / "llmd_hash_vectors.json").read_text())


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="sha1"):
        root_key("sha1", "m")


@pytest.mark.parametrize("vector", RECORDED["vectors"])
def test_keys_are_those_of_llm_d(vector: dict[str, Any]) -> None:
    root = root_key(vector["algorithm"], vector["model"], vector["hash_seed"])
    keys = block_keys(vector["algorithm"], root, vector["tokens"], vector["block_size"], vector["mm_hashes_per_block"])
    assert [str(key) for key in keys] == vector["keys"]


@pytest.mark.parametrize("vector", RECORDED["vectors"])
def test_a_chain_continues_from_a_given_key(vector: dict[str, Any]) -> None:
    size, extras = vector["block_size"], vector["mm_hashes_per_block"]
    known = [int(key) for key in vector["keys"]]
    rest = block_keys(vector["algorithm"], known[0], vector["tokens"][size:], size, extras and extras[1:])
    assert rest == known[1:]


def test_intermediate_values_are_those_of_llm_d() -> None:
    steps = RECORDED["intermediate"]
    assert fnv1a64(b"") == int(steps["fnv64a_empty"])
    assert fnv1a64(bytes.fromhex(steps["cbor_seed_hex_model_m"])) == root_key("cbor-fnv", "m")
    assert root_key("cbor-fnv", "ibm-granite/granite-3.1-8b-instruct") == int(steps["init_granite"])
    assert fnv1a64(bytes.fromhex(steps["cbor_block0_golden_hex"])) == int(RECORDED["vectors"][0]["keys"][0])
    assert (
        fnv1a64(bytes.fromhex(steps["cbor_mm_example_hex"])) == block_keys("cbor-fnv", 1, [1, 2], 2, [["img-abc"]])[0]
    )
