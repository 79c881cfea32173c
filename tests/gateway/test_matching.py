"""From token ids to predicted cached tokens per endpoint."""

import msgspec
import numpy as np
import pytest

from event_ingest.pipeline import EventPath
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.matching import Matcher
from gateway.served_models import Served
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.tier import CPU, GPU
from indexer.trust import Reason, Trust, blind, degraded, exact
from tokenization.tokenized import Tokenized


class FixedStreams:
    def __init__(self, blocks: dict[int, int], trust: dict[int, Trust] | None = None) -> None:
        self.blocks, self.trusts = blocks, trust or {}

    def block_tokens(self, slot: int) -> int:
        return self.blocks.get(slot, 0)

    def trust(self, slot: int) -> Trust:
        return self.trusts.get(slot, exact(0.0))


SERVED = Served("m", "m")
TOKENS = np.arange(100, dtype=np.uint32)
PROMPT = Tokenized(token_ids=TOKENS)


def two_slots() -> Fleet:
    fleet = Fleet()
    for number in range(2):
        fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
    return fleet


def test_an_empty_index_matches_nothing() -> None:
    matcher = Matcher(two_slots(), Index(), FixedStreams({0: 16, 1: 16}))
    found = matcher.match(matcher.keys(PROMPT, SERVED))
    assert not found.match.tokens.any()
    assert found.match.total_tokens == 96


@pytest.mark.parametrize(
    ("trust", "weight"), [(degraded(Reason.LOST_BATCHES, 0.0), 0.5), (blind(Reason.SYNCING, 0.0), 0.0)]
)
def test_a_stream_that_is_not_exact_never_scores_in_full(trust: Trust, weight: float) -> None:
    index = Index()
    index.add(0, GPU, block_keys(root_key("m"), TOKENS, 16))
    matcher = Matcher(two_slots(), index, FixedStreams({0: 16, 1: 16}, {0: trust}))
    found = matcher.match(matcher.keys(PROMPT, SERVED))
    assert found.match.tokens[0] == 96 * weight
    assert found.match.announced_at(np.array([0])) == 0
    assert found.match.weighted_tokens[0] == 96 * weight
    assert found.raw_tokens[0] == 96


def test_endpoints_with_different_block_sizes_are_each_matched_at_their_own() -> None:
    index, root = Index(), root_key("m")
    index.add(0, GPU, block_keys(root, TOKENS, 16))
    index.add(1, GPU, block_keys(root, TOKENS, 32)[:2])
    matcher = Matcher(two_slots(), index, FixedStreams({0: 16, 1: 32}))
    keys = matcher.keys(PROMPT, SERVED)
    assert matcher.match(keys).match.tokens[:2].tolist() == [96, 64]
    assert keys.for_slot(1) == block_keys(root, TOKENS, 32)


def test_the_last_token_is_always_computed() -> None:
    index, root = Index(), root_key("m")
    index.add(0, GPU, block_keys(root, TOKENS[:96], 16))
    matcher = Matcher(two_slots(), index, FixedStreams({0: 16, 1: 16}))
    keys = matcher.keys(Tokenized(token_ids=TOKENS[:96]), SERVED)
    assert matcher.match(keys).predicted(0, keys) == 80


def test_slower_tiers_weigh_less_but_count_as_cached() -> None:
    index, chain = Index(), block_keys(root_key("m"), TOKENS, 16)
    index.add(0, GPU, chain[:2])
    index.add(0, CPU, chain[2:4])
    matcher = Matcher(two_slots(), index, FixedStreams({0: 16, 1: 16}), weights=(1.0, 0.5, 0.25))
    found = matcher.match(matcher.keys(PROMPT, SERVED))
    assert found.match.tokens[0] == 64
    assert found.match.weighted_tokens[0] == 48


def test_models_adapters_and_salts_never_share_keys() -> None:
    matcher = Matcher(two_slots(), Index(), FixedStreams({0: 16, 1: 16}))
    chains = [
        tuple(matcher.keys(prompt, served).by_block[16])
        for prompt, served in (
            (PROMPT, SERVED),
            (PROMPT, Served("n", "n")),
            (PROMPT, Served("ad", "m", "ad")),
            (Tokenized(token_ids=TOKENS, salt="s"), SERVED),
        )
    ]
    assert len({key for chain in chains for key in chain}) == 4 * 6


@pytest.mark.parametrize(
    ("router", "engine"), [(4, 16), (16, 64), (64, 16), (32, 16), (24, 16), (16, 24)], ids=lambda size: str(size)
)
@pytest.mark.parametrize(("same", "length"), [(128, 128), (100, 128), (20, 100), (4, 100), (96, 97), (96, 96)])
def test_where_keys_are_not_of_the_engines_size_no_more_is_predicted_than_whole_engine_blocks(
    router: int, engine: int, same: int, length: int
) -> None:
    index, fleet = Index(), Fleet()
    fleet.add(Endpoint(name="a", address="10.0.0.1:8000"))
    path = EventPath(index, 0, name="a", model="m", can_replay=False, block_tokens=router)
    path.connected(0.0)
    held = list(range(192))
    stored = {
        "type": "BlockStored",
        "block_hashes": list(range(1, 192 // engine + 1)),
        "parent_block_hash": None,
        "token_ids": held,
        "block_size": engine,
    }
    path.feed([b"t", bytes(8), msgspec.msgpack.encode([1.0, [stored], 0])], 0.0)
    matcher = Matcher(
        fleet, index, FixedStreams({0: router}), engine_block_of=lambda slot: path.engine_block_tokens or 0
    )
    prompt = np.array(held[:same] + [9999] * (length - same), np.uint32)
    keys = matcher.keys(Tokenized(token_ids=prompt), SERVED)
    found = matcher.match(keys)
    reported = min(same, length - 1) // engine * engine
    predicted = found.predicted(0, keys)
    assert predicted <= reported
    assert found.match.tokens[0] % engine == 0
    assert found.match.weighted_tokens[0] == pytest.approx(found.match.tokens[0])
    if engine % router == 0:
        assert predicted == reported
    else:
        assert reported - predicted < router + engine
