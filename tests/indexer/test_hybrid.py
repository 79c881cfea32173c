"""The hit rule of engines with several kinds of attention: constructed cases, a recorded engine, and the definition."""

import base64
import json
import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import tier
from indexer.block_key import block_keys, root_key
from indexer.engine_hash import block_hashes, none_hash, wire
from indexer.hybrid import Group, Rule, group_key, group_of, match_groups, usable_blocks
from indexer.index import Index
from indexer.predicted import Predicted

FULL = group_of(2, "full_attention")
WINDOW = group_of(0, "sliding_window", 64)
MAMBA = group_of(1, "mamba")


def usable(prefix: int, *groups: tuple[Group, set[int]]) -> int:
    return usable_blocks(prefix, [(group, held.__contains__) for group, held in groups], 16)


@pytest.mark.parametrize(
    ("number", "kind", "window"),
    [
        (1, "chunked_local_attention", None),
        (1, "cross_attention", None),
        (1, "encoder_only_attention", None),
        (1, "unknown", None),
        (1, "ring_attention", 64),
        (1, "sliding_window", None),
        (1, "sliding_window", 0),
        (1, None, None),
    ],
)
def test_a_group_without_a_known_rule_claims_nothing(number: int, kind: str | None, window: int | None) -> None:
    group = group_of(number, kind, window)
    assert group.rule is Rule.UNKNOWN
    assert usable(8, (group, set(range(8)))) == 0
    index = Index()
    keys = block_keys(root_key("m"), range(64), 16)
    index.add(0, tier.GPU, keys)
    assert match_groups(index, keys, [FULL, group], 16) == {}


def test_an_engine_without_a_full_group_gets_no_claim() -> None:
    index = Index()
    keys = block_keys(root_key("m"), range(64), 16)
    index.add(0, tier.GPU, keys)
    assert match_groups(index, keys, [WINDOW], 16) == {}


def test_a_full_group_has_no_tail_rule() -> None:
    with pytest.raises(ValueError, match="group 2"):
        FULL.tail_blocks(16)


@pytest.mark.parametrize(
    ("window", "block_tokens", "need"), [(64, 16, 4), (65, 16, 4), (66, 16, 5), (1, 16, 0), (2, 16, 1), (1024, 32, 32)]
)
def test_a_window_needs_the_blocks_its_first_new_token_can_see(window: int, block_tokens: int, need: int) -> None:
    assert group_of(0, "sliding_window", window).tail_blocks(block_tokens) == need


def test_a_shared_prefix_whose_window_blocks_were_never_kept_is_no_hit() -> None:
    """200 tokens were cached, the window groups kept the last 4 of 12 blocks; the next prompt shares 7 blocks."""
    assert usable(7, (WINDOW, {8, 9, 10, 11}), (WINDOW, {8, 9, 10, 11})) == 0


def test_the_same_prefix_hits_once_the_window_blocks_at_its_end_are_kept() -> None:
    kept = {3, 4, 5, 6, 7, 8, 9, 10}
    assert usable(7, (WINDOW, kept), (WINDOW, kept)) == 7
    assert usable(9, (WINDOW, kept), (WINDOW, kept)) == 9
    assert usable(7, (WINDOW, kept), (WINDOW, kept - {4})) == 0


def test_a_prefix_shorter_than_the_window_needs_all_of_its_blocks() -> None:
    assert usable(3, (WINDOW, {0, 1, 2})) == 3
    assert usable(3, (WINDOW, {1, 2})) == 0
    assert usable(3, (WINDOW, {0, 1})) == 2


def test_mamba_needs_only_the_state_at_the_boundary() -> None:
    assert usable(9, (MAMBA, {5})) == 6
    assert usable(9, (MAMBA, {8})) == 9
    assert usable(9, (MAMBA, set())) == 0
    assert usable(9, (MAMBA, {5}), (WINDOW, {2, 3, 4, 5})) == 6
    assert usable(9, (MAMBA, {5}), (WINDOW, {3, 4, 5})) == 0


def by_definition(prefix: int, groups: list[tuple[Group, set[int]]]) -> int:
    for length in range(prefix, 0, -1):
        for group, held in groups:
            need = 1 if group.rule is Rule.MAMBA else math.ceil(((group.window or 1) - 1) / 16)
            if not all(position in held for position in range(max(0, length - need), length)):
                break
        else:
            return length
    return 0


group_sets = st.lists(
    st.tuples(st.one_of(st.just(None), st.integers(1, 100)), st.sets(st.integers(0, 11), max_size=12)).map(
        lambda drawn: (drawn[0], drawn[1])
    ),
    max_size=3,
)


@given(st.integers(0, 12), group_sets)
def test_the_rule_equals_its_definition(prefix: int, drawn: list[tuple[int | None, set[int]]]) -> None:
    groups = [
        (Group(number, Rule.MAMBA) if window is None else Group(number, Rule.SLIDING_WINDOW, window), held)
        for number, (window, held) in enumerate(drawn)
    ]
    assert usable(prefix, *groups) == by_definition(prefix, groups)


@given(
    st.lists(st.one_of(st.just(None), st.integers(1, 100)), max_size=2),
    st.lists(st.tuples(st.integers(0, 12), st.lists(st.sets(st.integers(0, 11)), min_size=2, max_size=2)), max_size=5),
    st.integers(0, 12),
)
def test_matching_a_fleet_equals_the_rule_for_each_endpoint(
    windows: list[int | None], fleet: list[tuple[int, list[set[int]]]], cap: int
) -> None:
    keys = block_keys(root_key("m"), range(12 * 16), 16)
    others = [
        Group(number, Rule.MAMBA) if window is None else Group(number, Rule.SLIDING_WINDOW, window)
        for number, window in enumerate(windows)
    ]
    index = Index()
    expected = {}
    for slot, (prefix, presence) in enumerate(fleet):
        index.add(slot, tier.GPU, keys[:prefix])
        for group, held in zip(others, presence, strict=False):
            index.add(slot, tier.GPU, [group_key(keys[position], group.number) for position in sorted(held)])
        blocks = by_definition(min(prefix, cap), list(zip(others, presence, strict=False)))
        if blocks:
            expected[slot] = blocks
    assert match_groups(index, keys, [FULL, *others], 16, cap) == expected


def test_predicted_blocks_count_for_all_groups() -> None:
    keys = block_keys(root_key("m"), range(12 * 16), 16)
    predicted = Predicted()
    predicted.predict(3, keys[:7], now=0.0)
    assert match_groups(Index(), keys, [FULL, WINDOW], 16, predicted=predicted) == {3: 7}


def test_groups_never_share_keys() -> None:
    keys = block_keys(root_key("m"), range(1600), 16)
    salted = [group_key(key, group) for group in range(4) for key in keys]
    assert len({*keys, *salted}) == len(keys) + len(salted)


def test_predictions_agree_with_what_a_recorded_hybrid_engine_computed_and_stored(shared: Path) -> None:
    """Three groups, masked events: hashes are placed by recomputing the chain over the event's tokens.

    The engine computed the first prompt, reused all of the second (the same: no event), and computed the third in
    full although its first 7 blocks were in the full group. Had it been asked after that, those 7 would have hit.
    """
    meta = json.loads((shared / "captures" / "p_hybrid_sliding_window_b16.meta.json").read_text())
    lines = (shared / "captures" / "p_hybrid_sliding_window_b16.jsonl").read_text().splitlines()
    batches = [msgspec.msgpack.decode(base64.b64decode(json.loads(line)["frames"][-1])) for line in lines]
    none = none_hash("sha256", "42")
    index, groups = Index(), {}
    digest_of: dict[int, bytes] = {}
    key_of: dict[int, int] = {}
    root = root_key("gemma")
    found = []

    def match(prompt: list[int]) -> int:
        cap = (len(prompt) - 1) // 16
        return match_groups(index, block_keys(root, prompt, 16), list(groups.values()), 16, cap).get(0, 0)

    asked = [(request["t0"], request["prompt_token_ids"]) for request in meta["requests"]]
    for at, prompt in [*asked, (math.inf, asked[2][1][: 7 * 16 + 1])]:
        while batches and batches[0][0] < at:
            for event in sorted(batches.pop(0)[1], key=lambda event: event["kv_cache_spec_kind"]):
                group = group_of(
                    event["group_idx"], event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
                )
                groups[group.number] = group
                parent = event["parent_block_hash"]
                chain = block_hashes("sha256", none if parent is None else digest_of[parent], event["token_ids"], 16)
                keys = block_keys(root if parent is None else key_of[parent], event["token_ids"], 16)
                for digest, key in zip(chain, keys, strict=True):
                    digest_of[wire(digest)], key_of[wire(digest)] = digest, key
                held = [key_of[value] for value in event["block_hashes"]]
                if group.rule is not Rule.FULL:
                    held = [group_key(key, group.number) for key in held]
                index.add(0, tier.GPU, held)
        found.append(match(prompt))
    assert found == [0, 12, 0, 7]
