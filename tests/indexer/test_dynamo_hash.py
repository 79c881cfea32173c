"""Dynamo's hashes against recorded values."""

from indexer.dynamo_hash import local_hash, local_hashes, seed_of, sequence_hashes

TOKENS = list(range(1, 49))
LOCAL = [16863443419780771464, 2287610619914608821, 12129935312930971799]


def test_an_unfinished_block_has_no_hash() -> None:
    assert local_hashes(TOKENS[:15], 16) == []
    assert local_hashes(TOKENS[:47], 16) == LOCAL[:2]


def test_local_hashes_are_those_of_dynamo() -> None:
    assert local_hashes(TOKENS, 16) == LOCAL
    assert local_hash(TOKENS[16:32]) == LOCAL[1]


def test_sequence_hashes_chain_the_local_ones() -> None:
    chained = sequence_hashes(LOCAL)
    assert chained == [LOCAL[0], 12466389667045779788, 960926348267535642]
    assert sequence_hashes(LOCAL[1:], chained[0]) == chained[1:]


def test_an_adapter_changes_the_seed() -> None:
    assert seed_of("ad1") == 14486755751257209859
    assert local_hash(TOKENS[32:], seed_of("ad1")) == 18298774202889145221


def test_media_enter_sorted() -> None:
    assert local_hash(TOKENS[:16], media=[5, 3]) == local_hash(TOKENS[:16], media=[3, 5]) != LOCAL[0]
