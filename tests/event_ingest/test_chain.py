"""What the ledger's blocks must never do to the process: be looked at by the garbage collector, stay, or end it."""

import array
import gc
import random
import tracemalloc

import pytest

from event_ingest import chain
from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored
from event_ingest.reblock import Reblocker


def stored(rng: random.Random, blocks: int, parent: int | None = None) -> BlockStored:
    tokens = array.array("I", [rng.randrange(50_000) for _ in range(16 * blocks)]).tobytes()
    hashes = tuple(rng.getrandbits(63) for _ in range(blocks))
    return BlockStored(hashes=hashes, parent=parent, tokens=tokens, block_tokens=16)


def busy(rng: random.Random, block_tokens: int) -> Reblocker:
    """A stream with everything in it: continued sequences, removed ones, orphans that wait, orphans dropped, a clear."""
    ledger = Reblocker(model="m", block_tokens=block_tokens, max_waiting=50, max_absent=20)
    for part in range(3):
        known: list[int] = []
        for _ in range(60):
            parent = rng.choice([None, rng.getrandbits(63), *known[-5:]])
            event = stored(rng, rng.randrange(1, 6), parent)
            known += event.hashes
            ledger.apply(event)
            if rng.random() < 0.4:
                ledger.apply(BlockRemoved(hashes=tuple(rng.sample(known, min(4, len(known))))))
        if part == 1:
            ledger.apply(AllBlocksCleared())
    return ledger


@pytest.mark.parametrize("block_tokens", [16, 24, 8])
def test_the_collector_never_sees_a_block_or_a_key(block_tokens: int) -> None:
    ledger = busy(random.Random(1), block_tokens)
    assert ledger.blocks > 50
    seen = {type(thing) for thing in gc.get_objects()}
    assert not seen & {chain.Block, chain.Key, chain.Span}


@pytest.mark.parametrize("block_tokens", [16, 24, 8])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_of_a_stream_is_left_when_it_is_dropped(block_tokens: int, seed: int) -> None:
    def held() -> int:
        here = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, chain.__file__)])
        return sum(statistic.size for statistic in here.statistics("filename"))

    tracemalloc.start()
    try:
        ledger = busy(random.Random(seed), block_tokens)
        assert held() > 10_000
        del ledger
        gc.collect()  # the ledger itself knows its chain and is known by it
        assert held() < 1_000
    finally:
        tracemalloc.stop()


def test_a_very_long_sequence_can_be_given_up_and_dropped() -> None:
    rng = random.Random(1)
    ledger = Reblocker(model="m", block_tokens=16)
    parent = None
    for _ in range(200):
        event = stored(rng, 1_500, parent)
        parent = event.hashes[-1]
        ledger.apply(event)
    assert ledger.held_keys == 300_000
    del ledger
    gc.collect()


def test_thousands_that_wait_for_one_parent_can_be_removed_in_any_order() -> None:
    """A stream that is joined late: the sequence's beginning is unknown, so all of it waits. The last removal ends them all."""
    ledger = Reblocker(model="m", block_tokens=16)
    event = stored(random.Random(1), 5_000, parent=1)
    ledger.apply(event)
    assert ledger.waiting == 5_001
    ledger.apply(BlockRemoved(hashes=event.hashes))
    assert ledger.waiting == ledger.blocks == 0
