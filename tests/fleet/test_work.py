import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.work import H100_8B, PrefillCost, Progress


@given(st.integers(1, 1_000_000), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_a_prompt_costs_what_its_missing_tokens_cost_after_the_cached_ones(tokens: int, shares: list[float]) -> None:
    cached = np.floor(np.array(shares) * tokens)
    expected = H100_8B.seconds(tokens - cached, cached)
    assert H100_8B.of_prompt(tokens, cached).tolist() == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)


def plain(cost: PrefillCost, fleet: Fleet, slot: int, now: float, progress: Progress) -> float:
    """Backlog of one slot, number by number."""
    owed = cost.a * fleet.in_flight_tokens[slot] + cost.q * fleet.in_flight_square[slot]
    oldest = cost.a * fleet.oldest_tokens[slot] + cost.q * fleet.oldest_square[slot]
    left = cost.a * fleet.oldest_left_tokens[slot] + cost.q * fleet.oldest_left_square[slot]
    if progress == "none":
        return float(owed)
    if progress == "events" and left < oldest:
        return float(owed - (oldest - left))
    return float(owed - min(0.95 * oldest, now - fleet.oldest_since[slot]))


REQUESTS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 200_000)), max_size=30
)


@given(REQUESTS, st.sampled_from(["clock", "events", "none"]), st.floats(0, 100))
def test_the_backlog_of_all_slots_is_that_of_each_one_and_never_negative(
    requests: list[tuple[int, int, int, int]], progress: Progress, passed: float
) -> None:
    fleet = Fleet(capacity=1)
    books = Books(fleet)
    for number, (slot, uncached, cached, stored) in enumerate(requests):
        while slot not in fleet:  # the columns grow between two requests
            added = len(fleet.slots())
            fleet.add(Endpoint(name=f"e{added}", address=f"10.0.0.1:{added + 1}"))
        books.reserve(f"r{number}", slot, uncached, 100, float(number), cached_tokens=cached)
        books.stored(f"r{number}", slot, stored)
    now = len(requests) + passed
    backlog = H100_8B.backlog(fleet, None, now, progress)
    assert len(backlog) == fleet.capacity
    assert (backlog >= 0).all()
    slots = fleet.slots()
    expected = [plain(H100_8B, fleet, slot, now, progress) for slot in slots.tolist()]
    assert backlog[slots].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert H100_8B.backlog(fleet, slots, now, progress).tolist() == backlog[slots].tolist()
