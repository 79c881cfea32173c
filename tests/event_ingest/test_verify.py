"""Recomputing what engines put on the wire."""

from pathlib import Path

from event_ingest.events import BlockStored
from event_ingest.recording import read
from event_ingest.verify import Verifier
from event_ingest.vllm_wire import decode
from indexer.block_key import pack_tokens
from indexer.engine_hash import block_hash, none_hash, wire


def root(algorithm: str, seed: str | None, tokens: list[int]) -> BlockStored:
    digest = block_hash(algorithm, none_hash(algorithm, seed), tokens)
    return BlockStored(hashes=(wire(digest),), tokens=pack_tokens(tokens), block_tokens=len(tokens))


def recorded(file: Path) -> list[BlockStored]:
    events = []
    for message in read(file):
        batch = decode(message.frames[-1]).batch
        assert batch is not None
        events += [event for event in batch.events if isinstance(event, BlockStored)]
    return events


def test_another_seed_is_found_and_named() -> None:
    verifier = Verifier("sha256", None)
    verifier.check(root("sha256", "0", list(range(16))))
    assert verifier.counts.wrong == 1
    assert verifier.mismatch == "hashes are sha256, PYTHONHASHSEED 0; configured: sha256, PYTHONHASHSEED unset"


def test_another_algorithm_is_found_and_named() -> None:
    verifier = Verifier("sha256", "42")
    verifier.check(root("xxhash_cbor", "42", list(range(16))))
    assert verifier.mismatch.startswith("hashes are xxhash_cbor, PYTHONHASHSEED 42")


def test_hashes_that_fit_nothing_are_a_mismatch_too() -> None:
    verifier = Verifier("sha256", "42")
    verifier.check(BlockStored(hashes=(5,), tokens=pack_tokens(list(range(16))), block_tokens=16))
    assert (verifier.counts.checked, verifier.counts.wrong) == (1, 1)
    assert "nor any other known pair" in verifier.mismatch


def test_a_random_seed_is_unverifiable_not_wrong() -> None:
    verifier = Verifier("xxhash", None)
    verifier.check(root("xxhash", "5", list(range(16))))
    assert (verifier.counts.checked, verifier.counts.wrong, verifier.counts.unverifiable) == (0, 0, 1)
    assert verifier.mismatch == ""


def test_a_parent_from_before_we_listened_is_unverifiable() -> None:
    verifier = Verifier("sha256", "42")
    verifier.check(BlockStored(hashes=(5,), parent=4, tokens=pack_tokens(list(range(16))), block_tokens=16))
    assert (verifier.counts.checked, verifier.counts.unverifiable) == (0, 1)


def test_adapters_need_their_path(captures: Path) -> None:
    events = recorded(captures / "e2_lora_b16.jsonl")
    without = Verifier("sha256", "42")
    given = Verifier("sha256", "42", lora_paths={"ad1": "lora-ad1", "ad2": "lora-ad2"})
    for event in events:
        without.check(event)
        given.check(event)
    assert (without.counts.checked, without.counts.wrong, without.counts.unverifiable) == (3, 0, 10)
    assert (given.counts.checked, given.counts.wrong, given.counts.unverifiable) == (13, 0, 0)


def test_with_nothing_configured_the_first_block_decides(captures: Path) -> None:
    verifier = Verifier(None, None)
    for event in recorded(captures / "f_sha256_cbor_b16_bytes.jsonl"):
        verifier.check(event)
    assert (verifier.counts.checked, verifier.counts.wrong) == (55, 0)


def test_only_the_first_blocks_are_checked_and_again_after_a_restart() -> None:
    verifier = Verifier("sha256", "42", limit=3)
    for number in range(10):
        verifier.check(root("sha256", "42", [number] * 16))
    assert (verifier.counts.checked, verifier.done) == (3, True)
    verifier.restart()
    verifier.check(root("sha256", "42", [77] * 16))
    assert verifier.counts.checked == 4
