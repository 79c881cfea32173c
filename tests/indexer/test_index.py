"""The index against a plain dict of sets, and its match against a walk over that dict."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import tier
from indexer.index import Index
from indexer.matched import PREDICTED, ROWS
from indexer.predicted import Predicted

SLOTS = 6
CHAIN = [0x9E3779B97F4A7C15 * (position + 1) % 2**64 for position in range(24)]

Held = dict[int, dict[int, set[int]]]  # key -> slot -> tiers


def linear_walk(held: Held, expected: dict[int, set[int]], keys: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Leading blocks per slot by row, one block and one slot at a time."""
    answer = {}
    for slot in range(SLOTS):
        counts = [0] * ROWS
        for key in keys:
            tiers = held.get(key, {}).get(slot)
            if tiers:
                counts[min(tiers)] += 1
            elif slot in expected.get(key, ()):
                counts[PREDICTED] += 1
            else:
                break
        if any(counts):
            answer[slot] = tuple(counts)
    return answer


def answer_of(index: Index, keys: Sequence[int], predicted: Predicted | None = None) -> dict[int, tuple[int, ...]]:
    matched = index.match(keys, predicted)
    assert matched.total_blocks == len(keys)
    return {slot: matched.by_tier(slot) for slot in matched.by_slot()}


def is_dense(held: Held, slot: int) -> bool:
    present = [slot in held.get(key, {}) for key in CHAIN]
    return all(earlier or not later for earlier, later in pairwise(present))


keys = st.lists(st.sampled_from(CHAIN), max_size=8)
runs = st.tuples(st.integers(0, len(CHAIN)), st.integers(0, len(CHAIN))).map(lambda ends: CHAIN[min(ends) : max(ends)])
operation = st.tuples(
    st.sampled_from(["add", "add", "remove", "clear", "clear_keys", "touch", "predict"]),
    st.integers(0, SLOTS - 1),
    st.sampled_from([tier.GPU, tier.GPU, tier.GPU, tier.CPU, tier.DISK]),
    st.one_of(keys, runs),
)


@given(st.lists(operation, max_size=30), st.sampled_from([1, 4, 64]), st.integers(0, len(CHAIN)))
@settings(max_examples=300, deadline=None)
def test_index_equals_a_dict_and_match_equals_a_walk_whatever_the_holes(
    operations: list[tuple[str, int, int, list[int]]], shards: int, length: int
) -> None:
    index, predicted = Index(max_keys=64 * 64, max_holders=SLOTS, shards=shards), Predicted()
    held: Held = {}
    expected: dict[int, set[int]] = {}
    for kind, slot, where, batch in operations:
        index.set_dense(slot, False)
        before = {key: set(held.get(key, {}).get(slot, ())) for key in batch}
        if kind == "add":
            new = sum(where not in before[key] for key in set(batch))
            assert index.add(slot, where, batch) == new
            for key in batch:
                held.setdefault(key, {}).setdefault(slot, set()).add(where)
        elif kind == "remove":
            assert index.remove(slot, where, batch) == sum(where in before[key] for key in set(batch))
            for key in batch:
                _discard(held, key, slot, {where})
        elif kind == "touch":
            index.touch(batch)
        elif kind == "predict":
            predicted.predict(slot, batch, now=0.0)
            for key in batch:
                expected.setdefault(key, set()).add(slot)
        else:
            mine = [key for key, slots in held.items() if slot in slots]
            entries = sum(len(held[key][slot]) for key in mine)
            assert index.clear(slot, mine if kind == "clear_keys" else None) == entries
            for key in mine:
                _discard(held, key, slot, {tier.GPU, tier.CPU, tier.DISK})
        for each in range(SLOTS):
            index.set_dense(each, is_dense(held, each))
        for chain in (CHAIN[:length], CHAIN, CHAIN[3:]):
            assert answer_of(index, chain) == linear_walk(held, {}, chain)
            assert answer_of(index, chain, predicted) == linear_walk(held, expected, chain)
    stats = index.stats()
    assert stats.keys == len(index) == len(held)
    assert stats.entries == sum(len(tiers) for slots in held.values() for tiers in slots.values())


def _discard(held: Held, key: int, slot: int, tiers: set[int]) -> None:
    if slot in held.get(key, {}):
        held[key][slot] -= tiers
        if not held[key][slot]:
            del held[key][slot]
        if not held[key]:
            del held[key]
