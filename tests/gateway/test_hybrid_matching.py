"""Matches of hybrid engines: constructed caches, a recorded engine through the ingest path, and kinds nobody knows."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from event_ingest.events import Batch, BlockStored, Decoded
from event_ingest.pipeline import EventPath
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.hybrid_matching import Layout, tail_keys
from gateway.matching import Keys, Matcher
from gateway.served_models import Served
from indexer.block_key import block_keys, pack_tokens, root_key
from indexer.hybrid import group_key, group_of
from indexer.index import Index
from indexer.predicted import Predicted
from indexer.tier import CPU, GPU
from indexer.trust import Trust, exact
from tokenization.tokenized import Tokenized

CAPTURE = Path(__file__).resolve().parent.parent / "data" / "captures" / "p_hybrid_sliding_window_b16"
WINDOW = group_of(0, "sliding_window", 64)
FULL = group_of(1, "full_attention")
MAMBA = group_of(2, "mamba")
UNKNOWN = group_of(3, "chunked_local_attention")
SERVED = Served("m", "m")
TOKENS = np.arange(200, dtype=np.uint32)
CHAIN = block_keys(root_key("m"), TOKENS, 16)


class AllExact:
    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return exact(0.0)


class World:
    """Slot 0 is an ordinary engine; slot n has the n-th layout."""

    def __init__(self, *layouts: Layout) -> None:
        self.fleet = Fleet()
        for number in range(len(layouts) + 1):
            self.fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
        self.index = Index()
        known = {number + 1: layout for number, layout in enumerate(layouts)}
        self.matcher = Matcher(
            self.fleet, self.index, AllExact(), (1.0, 0.5, 0.25), layout_of=lambda slot: known.get(slot, ())
        )

    def hold(self, slot: int, group: int, blocks: "range | list[int]", tier: int = GPU) -> None:
        self.index.add(slot, tier, [group_key(CHAIN[block], group) for block in blocks])

    def keys(self, tokens: int = 200) -> Keys:
        return self.matcher.keys(Tokenized(token_ids=TOKENS[:tokens]), SERVED)

    def tokens(self, slot: int, tokens: int = 200) -> float:
        return float(self.matcher.match(self.keys(tokens)).match.tokens[slot])


def test_a_full_groups_prefix_without_its_window_blocks_is_no_match() -> None:
    world = World((WINDOW, FULL))
    for slot in (0, 1):
        world.index.add(slot, GPU, CHAIN)
    assert (world.tokens(0), world.tokens(1)) == (192, 0)


def test_the_longest_length_at_which_every_group_can_start_counts() -> None:
    world = World((WINDOW, FULL))
    world.index.add(1, GPU, CHAIN)
    world.hold(1, 0, [3, 4, 5, 6, 10, 11])  # the window of 64 tokens needs four blocks: 7 works, 12 does not
    assert world.tokens(1) == 7 * 16
    world.hold(1, 0, [8, 9])
    assert world.tokens(1) == 12 * 16


def test_a_hit_must_end_before_the_last_token_so_a_window_at_the_prompts_very_end_does_not_help() -> None:
    world = World((WINDOW, FULL))
    world.index.add(1, GPU, CHAIN)
    world.hold(1, 0, [8, 9, 10, 11])
    assert world.tokens(1, tokens=193) == 192
    assert world.tokens(1, tokens=192) == 0, "11 blocks at most, and block 7 is not in the window group"


def test_a_mamba_group_needs_the_state_at_the_boundary_only() -> None:
    world = World((FULL, MAMBA))
    world.index.add(1, GPU, CHAIN)
    world.hold(1, MAMBA.number, [4])
    assert world.tokens(1) == 5 * 16


def test_a_group_of_an_unknown_kind_leaves_no_claim() -> None:
    world = World((FULL, UNKNOWN))
    world.index.add(1, GPU, CHAIN)
    keys = world.keys()
    found = world.matcher.match(keys)
    assert found.match.tokens[1] == 0
    assert found.predicted(1, keys) == 0


def test_engines_of_different_layouts_share_a_fleet() -> None:
    world = World((WINDOW, FULL), (FULL, MAMBA), (WINDOW, FULL))
    for slot in range(4):
        world.index.add(slot, GPU, CHAIN)
    world.hold(1, 0, range(4))
    world.hold(2, MAMBA.number, [9])
    world.hold(3, 0, range(12))
    found = world.matcher.match(world.keys()).match.tokens
    assert found[:4].tolist() == [192, 64, 160, 192]


def test_what_is_left_of_a_match_keeps_its_tiers() -> None:
    world = World((WINDOW, FULL))
    world.index.add(1, GPU, CHAIN[:2])
    world.index.add(1, CPU, CHAIN[2:])
    world.hold(1, 0, range(4))
    found = world.matcher.match(world.keys()).match
    assert (found.tokens[1], found.weighted_tokens[1]) == (64, 32 + 16)


def test_predicted_blocks_are_expected_in_every_group() -> None:
    world = World((WINDOW, FULL))
    world.matcher.predicted = Predicted()
    keys = world.keys()
    world.matcher.expect(1, keys, 0.0)
    found = world.matcher.match(keys)
    assert found.match.tokens[1] == 192
    assert found.raw_tokens[1] == 0, "nothing is announced yet"


def test_a_chosen_prompt_is_recent_in_all_groups() -> None:
    index = Index(max_keys=64, shards=1)
    world = World((WINDOW, FULL))
    world.index = index
    world.matcher = Matcher(world.fleet, index, AllExact(), layout_of=lambda slot: (WINDOW, FULL) if slot else ())
    index.add(1, GPU, CHAIN)
    world.hold(1, 0, range(12))
    world.tokens(1)
    index.add(0, GPU, range(1, 30))
    world.matcher.touch(CHAIN)
    index.add(0, GPU, range(100, 135))
    assert set(tail_keys(CHAIN, (WINDOW, FULL))) == {group_key(key, 0) for key in CHAIN}
    assert world.tokens(1) == 192


# Through the ingest path


def stored(group: int, kind: str, hashes: list[int], tokens: int, window: int | None = None) -> BlockStored:
    return BlockStored(
        hashes=tuple(hashes),
        tokens=pack_tokens(TOKENS[:tokens]),
        block_tokens=16,
        group=group,
        kind=kind,
        window=window,
    )


def feed(path: EventPath, *events: BlockStored) -> None:
    path.feed_batch(0, 1.0, Decoded(Batch(1.0, events, 0)), 1.0)


@pytest.mark.parametrize("kind", ["chunked_local_attention", "ring_attention", "cross_attention"])
def test_a_stream_with_an_unknown_kind_is_blind_and_matches_nothing(kind: str) -> None:
    world, path = World(()), None
    path = EventPath(world.index, 1, name="e", model="m", can_replay=False)
    path.connected(0.0)
    feed(path, stored(0, "full_attention", [1, 2, 3], 48), stored(1, kind, [1, 2, 3], 48))
    assert str(path.trust) == "blind(unknown_kind)"
    matcher = Matcher(
        world.fleet, world.index, AllExact(), layout_of=lambda slot: path.groups if path.is_hybrid else ()
    )
    assert matcher.match(world.keys()).raw_tokens[1] == 0


def test_a_recorded_hybrid_engine_is_predicted_as_its_documentation_says() -> None:
    """The same prompt again hits 12 of its 12 whole blocks; one that shares 7 blocks hits nothing: their window is gone."""
    meta = json.loads(CAPTURE.with_suffix(".meta.json").read_text())
    world = World(())
    path = EventPath(world.index, 1, name="e", model="m", can_replay=False)
    path.connected(0.0)
    matcher = Matcher(
        world.fleet, world.index, AllExact(), layout_of=lambda slot: path.groups if path.is_hybrid else ()
    )
    messages = [json.loads(line) for line in CAPTURE.with_suffix(".jsonl").read_text().splitlines()]
    predicted, ordinary = [], []
    for request in meta["requests"]:
        while messages and messages[0]["t"] < request["t0"]:
            path.feed([base64.b64decode(frame) for frame in messages.pop(0)["frames"]], 1.0)
        keys = matcher.keys(Tokenized(token_ids=np.array(request["prompt_token_ids"], np.uint32)), SERVED)
        predicted.append(matcher.match(keys).predicted(1, keys))
        plain = Matcher(world.fleet, world.index, AllExact())
        ordinary.append(plain.match(keys).predicted(1, keys))
    assert predicted == [0, 192, 0]
    assert ordinary == [0, 192, 112], "what the full group alone would claim"
    assert path.trust.state == "exact"
