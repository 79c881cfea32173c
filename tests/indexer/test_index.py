"""The index against a plain dict of sets, and its match against a walk over that dict."""

import sys
import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
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
@settings(max_examples=300)
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


# Bad input


@pytest.mark.parametrize(
    "arguments", [{"shards": 3}, {"shards": 0}, {"max_keys": 10, "shards": 64}, {"max_holders": 0}, {"shards": 1 << 17}]
)
def test_limits_that_cannot_work_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"shards must be|must be at least"):
        Index(**arguments)


@pytest.mark.parametrize(("slot", "where"), [(-1, 0), (1 << 16, 0), (0, 3), (0, -1)])
def test_a_slot_or_tier_out_of_range_is_refused(slot: int, where: int) -> None:
    index = Index()
    with pytest.raises(ValueError, match=r"slot must be|tier must be"):
        index.add(slot, where, [1])
    assert len(index) == 0


def test_removing_what_is_not_there_changes_nothing() -> None:
    index = Index()
    index.add(0, tier.GPU, [1, 2])
    assert index.remove(1, tier.GPU, [1]) == 0
    assert index.remove(0, tier.CPU, [1]) == 0
    assert index.remove(0, tier.GPU, [3]) == 0
    assert index.clear(5) == 0
    assert index.stats().entries == 2


def test_no_keys_no_match() -> None:
    assert Index().match([]).by_slot() == {}
    assert Index().match(CHAIN).by_slot() == {}


# Density


def test_a_slot_that_never_claimed_density_is_walked() -> None:
    index = Index()
    index.add(0, tier.GPU, [CHAIN[0], CHAIN[1], CHAIN[3]])
    assert index.match(CHAIN[:4]).by_slot() == {0: 2}


def test_density_speaks_for_all_tiers_together() -> None:
    index = Index()
    index.add(0, tier.GPU, CHAIN[:2])
    index.add(0, tier.CPU, CHAIN[1:5])
    index.add(0, tier.DISK, CHAIN[4:6])
    index.set_dense(0, True)
    assert index.match(CHAIN).by_tier(0) == (2, 3, 1, 0)
    assert [index.tier_of(0, key) for key in CHAIN[:7]] == [0, 0, 1, 1, 1, 2, None]


class Probe(list[int]):
    """A list of keys that counts how many of them are looked at."""

    looked = 0

    def __getitem__(self, position: object) -> int:  # type: ignore[override]
        self.looked += 1
        return super().__getitem__(position)  # type: ignore[index]


@pytest.mark.parametrize("held", [0, 1, 500, 1024])
def test_a_dense_chain_is_bisected_and_not_walked(held: int) -> None:
    keys = [position * 0x9E3779B97F4A7C15 % 2**64 for position in range(1, 1025)]
    index = Index()
    for slot in range(100):
        index.add(slot, tier.GPU, keys[:held])
        index.set_dense(slot, True)
    probe = Probe(keys)
    assert index.match(probe).by_slot() == (dict.fromkeys(range(100), held) if held else {})
    assert probe.looked <= 14


# Limits


def test_the_least_recently_used_key_is_forgotten_counted_and_leaves_a_hole_that_match_sees() -> None:
    index = Index(max_keys=4, shards=1)
    index.set_dense(0, True)
    index.add(0, tier.GPU, [1, 2, 3, 4])
    index.touch([1, 2])
    index.touch([4])
    index.add(1, tier.GPU, [9])
    assert index.holders(3) == 0
    assert index.stats().evicted_keys == 1
    assert (index.lost(0), index.lost(1)) == (1, 0)
    assert index.match([1, 2, 3, 4]).by_slot() == {0: 2}
    assert index.remove(0, tier.GPU, [3]) == 0
    assert index.clear(0) == 3
    assert index.lost(0) == 0
    assert index.stats().entries == 1


def test_within_a_batch_the_tail_is_forgotten_before_the_head() -> None:
    index = Index(max_keys=4, shards=1)
    index.add(0, tier.GPU, [1, 2, 3, 4])
    index.add(0, tier.GPU, [9])
    assert index.match([1, 2, 3, 4]).by_slot() == {0: 3}
    index.touch([1, 2, 3])
    index.add(0, tier.GPU, [10])
    assert index.match([1, 2, 3]).by_slot() == {0: 3}
    assert index.holders(9) == 0


def test_a_cleared_slot_is_bisected_again() -> None:
    index = Index(max_keys=2, shards=1)
    index.set_dense(0, True)
    index.add(0, tier.GPU, [1, 2, 3])
    index.clear(0)
    index.add(0, tier.GPU, [1, 2])
    probe = Probe([1, 2])
    assert index.match(probe).by_slot() == {0: 2}
    assert probe.looked == 2


def test_the_least_recently_confirmed_holder_of_a_key_goes_and_is_told() -> None:
    index = Index(max_holders=3)
    for slot in (5, 1, 2):
        index.set_dense(slot, True)
        index.add(slot, tier.GPU, [1, 2])
    index.add(5, tier.GPU, [1])
    index.add(7, tier.GPU, [1])
    assert index.match([1, 2]).by_slot() == {5: 2, 2: 2, 7: 1}
    assert index.stats().evicted_holders == 1
    assert [index.lost(slot) for slot in (1, 2, 5, 7)] == [1, 0, 0, 0]
    assert index.stats().entries == 6
    assert index.remove(1, tier.GPU, [1, 2]) == 1


def test_an_evicted_holder_leaves_all_tiers() -> None:
    index = Index(max_holders=1)
    index.add(0, tier.CPU, [1])
    index.add(0, tier.GPU, [1])
    index.add(1, tier.GPU, [1])
    assert index.match([1]).by_slot() == {1: 1}
    assert index.stats().entries == 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40), st.integers(1, 5))
def test_holders_of_a_full_key_leave_in_order_of_confirmation(steps: list[tuple[bool, int]], limit: int) -> None:
    index = Index(max_holders=limit)
    unordered: set[int] = set()
    ordered: list[int] = []
    evicted = 0
    for adding, slot in steps:
        if adding:
            index.add(slot, tier.GPU, [1])
            if len({*unordered, *ordered, slot}) > limit // 2 and (unordered or ordered):
                unordered.discard(slot)
                ordered = [other for other in ordered if other != slot] + [slot]
            elif slot not in ordered:
                unordered.add(slot)
            if len(unordered) + len(ordered) > limit:
                evicted += 1
                if unordered:
                    unordered.remove(min(unordered))
                else:
                    ordered.pop(0)
        else:
            index.remove(slot, tier.GPU, [1])
            unordered.discard(slot)
            ordered = [other for other in ordered if other != slot]
            if len(unordered) + len(ordered) <= limit // 2:
                unordered, ordered = {*unordered, *ordered}, []
        assert index.holders(1) == sum(1 << slot for slot in {*unordered, *ordered})
        assert index.stats().evicted_holders == evicted == sum(index.lost(slot) for slot in range(8))


@given(st.lists(st.tuples(st.integers(0, 3), runs), max_size=25), st.integers(4, 12))
def test_match_stays_a_walk_while_keys_are_evicted(steps: list[tuple[int, list[int]]], limit: int) -> None:
    index = Index(max_keys=limit, shards=1)
    for slot in range(4):
        index.set_dense(slot, True)
    claimed: Held = {}
    for slot, batch in steps:
        head = CHAIN[: CHAIN.index(batch[-1]) + 1] if batch else []  # whole prefixes: the feeder's claim is true
        index.add(slot, tier.GPU, head)
        for key in head:
            claimed.setdefault(key, {})[slot] = {tier.GPU}
        held: Held = {}
        for key in CHAIN:
            for each in range(4):
                if index.holders(key) >> each & 1:
                    held.setdefault(key, {})[each] = {tier.GPU}
        assert len(index) <= limit
        assert all(each in claimed[key] for key, slots in held.items() for each in slots)
        assert answer_of(index, CHAIN) == linear_walk(held, {}, CHAIN)
        assert index.stats().entries == sum(map(len, held.values()))


# Vectors


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 24)), max_size=40), st.integers(1, 48))
def test_vectors_say_what_the_slots_say(depths: list[tuple[int, int]], capacity: int) -> None:
    index = Index()
    for slot, depth in depths:
        index.add(slot, slot % 3, CHAIN[:depth])
    matched = index.match(CHAIN)
    tokens = matched.tokens(capacity, 16)
    weighted = matched.weighted_tokens(capacity, 16, (1.0, 0.5, 0.25))
    assert tokens.shape == weighted.shape == (capacity,)
    assert tokens.dtype == weighted.dtype == np.float64
    for slot in range(capacity):
        gpu, cpu, disk, _ = matched.by_tier(slot)
        assert tokens[slot] == 16 * (gpu + cpu + disk)
        assert weighted[slot] == 16 * (gpu + 0.5 * cpu + 0.25 * disk)


def test_weights_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values, expected 3"):
        Index().match(CHAIN).weighted_tokens(4, 16, (1.0, 0.5))


def test_predicted_blocks_have_a_weight_of_their_own() -> None:
    predicted = Predicted()
    predicted.predict(1, CHAIN[:2], now=0.0)
    matched = Index().match(CHAIN, predicted)
    assert matched.weighted_tokens(2, 16, (1.0, 0.5, 0.25)).tolist() == [0.0, 32.0]
    assert matched.weighted_tokens(2, 16, (1.0, 0.5, 0.25, 0.5)).tolist() == [0.0, 16.0]


# Threads


def test_threads_that_feed_touch_and_match_at_once_leave_what_each_meant() -> None:
    index = Index(max_keys=1 << 16, shards=4)
    chains = [[(slot << 32 | number) * 0x9E3779B97F4A7C15 % 2**64 for number in range(300)] for slot in range(2)]
    shared_chain = CHAIN
    failures: list[object] = []
    stop = threading.Event()
    switch = sys.getswitchinterval()

    def feed(slot: int) -> None:
        for _ in range(15):
            index.add(slot, tier.GPU, shared_chain)
            index.add(slot, tier.GPU, chains[slot])
            index.add(slot, tier.CPU, chains[slot][:50])
            index.remove(slot, tier.GPU, reversed(chains[slot][100:]))
            index.clear(slot, [*shared_chain, *chains[slot]])
        index.add(slot, tier.GPU, shared_chain[: 10 + slot])
        index.set_dense(slot, True)

    def read() -> None:
        index.add(5, tier.GPU, shared_chain)
        index.set_dense(5, True)
        while not stop.is_set():
            # Slot 5 is never removed: a reader that saw it missing would have seen a key in mid-move.
            if index.match(shared_chain).by_slot().get(5) != len(shared_chain):
                failures.append(index.match(shared_chain))
            index.touch(shared_chain)

    sys.setswitchinterval(1e-5)
    try:
        readers = [threading.Thread(target=read) for _ in range(2)]
        feeders = [threading.Thread(target=feed, args=(slot,)) for slot in range(2)]
        for thread in [*readers, *feeders]:
            thread.start()
        for thread in feeders:
            thread.join()
        stop.set()
        for thread in readers:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert not failures
    assert index.match(shared_chain).by_slot() == {0: 10, 1: 11, 5: len(shared_chain)}
    assert index.stats().entries == 10 + 11 + len(shared_chain)
    assert len(index) == len(shared_chain)


def test_a_reader_that_meets_a_key_in_mid_move_waits_for_it() -> None:
    index = Index(shards=1)
    index.add(0, tier.GPU, [1, 2])
    shard = index._shards[0]
    answers: list[dict[int, int]] = []
    reader = threading.Thread(target=lambda: answers.append(index.match([1, 2]).by_slot()))
    with shard.lock:
        held = shard.holders.pop(2)
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        shard.holders[2] = held
    reader.join()
    assert answers == [{0: 2}]


def test_a_chain_that_is_complete_is_matched_without_any_lock() -> None:
    index = Index(shards=1)
    index.add(0, tier.GPU, [1, 2])
    with index._shards[0].lock:
        assert index.match([1, 2]).by_slot() == {0: 2}
