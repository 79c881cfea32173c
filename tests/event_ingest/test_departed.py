import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from event_ingest import departed
from event_ingest.departed import Departed

KEYS = st.sampled_from([0, 1, 2, 3, 2**63, 2**64 - 1])
STEPS = st.lists(st.tuples(st.lists(KEYS, max_size=4), st.integers(0, 3), st.booleans()), max_size=20)


@given(STEPS, KEYS, st.sampled_from([-math.inf, 0.0, 1.0, 5.0, 9.0, math.inf]))
def test_it_knows_when_a_key_left_last(steps: list[tuple[list[int], int, bool]], key: int, moment: float) -> None:
    gone, left, cleared, now = Departed(), dict[int, float](), -math.inf, 0.0
    for keys, passed, clear in steps:
        now += passed
        gone.left(keys, now)
        left |= dict.fromkeys(keys, now)
        if clear:
            gone.cleared(now)
            cleared = now
    assert gone.since(key, moment) == (max(left.get(key, -math.inf), cleared) >= moment)


def test_only_the_latest_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed, "REMEMBERED", 10)
    gone = Departed()
    for number in range(25):
        gone.left([number], float(number))
    assert [number for number in range(25) if gone.since(number, 0.0)] == list(range(15, 25))


def test_an_engine_that_evicts_for_days_takes_a_megabyte_or_two() -> None:
    tracemalloc.start()
    try:
        gone = Departed()
        for number in range(0, 200_000, 20):
            gone.left(range(number + 2**60, number + 2**60 + 20), number / 1000)
        assert tracemalloc.get_traced_memory()[0] < 2_000_000
    finally:
        tracemalloc.stop()
