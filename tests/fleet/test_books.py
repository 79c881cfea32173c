import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fleet.books import Books, Sums
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.reservation import square

COLUMNS = Sums.__struct_fields__


def fleet_of(count: int) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    return fleet


def totals(fleet: Fleet) -> dict[str, float]:
    return {name: float(getattr(fleet, name).sum()) for name in COLUMNS}


@pytest.fixture
def fleet() -> Fleet:
    return fleet_of(3)


@pytest.fixture
def books(fleet: Fleet) -> Books:
    return Books(fleet, idle_timeout_s=60.0, reconcile_grace_s=5.0)


def test_unknown_ids_change_nothing_and_are_counted(fleet: Fleet, books: Books) -> None:
    assert not books.first_token("nobody", 1.0)
    assert not books.finish("nobody", 1.0)
    assert books.counts.unknown == 2
    assert set(totals(fleet).values()) == {0.0}


def test_releasing_twice_releases_once(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 0, 100, 400, 0.0)
    assert books.finish("r", 1.0)
    assert not books.finish("r", 2.0)
    assert set(totals(fleet).values()) == {0.0}
    assert len(books) == 0


def test_a_second_first_token_is_not_counted_again(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 0, 100, 400, 0.0)
    assert books.first_token("r", 1.0)
    assert not books.first_token("r", 2.0)
    assert fleet.decoding[0] == 1


def test_two_requests_decided_at_once_see_each_other(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 1, 100, 400, 0.0, cached_tokens=900)
    assert fleet.in_flight[1] == 1
    assert fleet.in_flight_tokens[1] == 100
    assert fleet.in_flight_square[1] == 100 * (900 + 50)
    books.reserve("b", 1, 50, 400, 0.0)
    assert fleet.in_flight[1] == 2
    assert fleet.reserved_tokens[1] == 100 + 50 + 800


def test_the_first_token_moves_a_request_from_prefill_to_decode(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 0, 100, 400, 0.0, cached_tokens=28)
    books.first_token("a", 1.0)
    assert (fleet.awaiting[0], fleet.in_flight_tokens[0], fleet.in_flight_square[0]) == (0, 0, 0)
    assert (fleet.decoding[0], fleet.decode_tokens[0], fleet.in_flight[0]) == (1, 128, 1)
    assert fleet.reserved_tokens[0] == 500


def test_a_prompt_that_is_fetched_needs_room_where_it_arrives_and_no_prefill(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 0, 0, 400, 1.0, cached_tokens=1000, fetched_tokens=900)
    books.reserve("a", 1, 1000, 1, 1.0, prefill_only=True)
    assert (fleet.in_flight_tokens[0], fleet.reserved_tokens[0]) == (0, 1300)
    books.first_token("a", 2.0)
    assert fleet.reserved_tokens[0] == 1300
    books.finish("a", 3.0)
    assert list(fleet.reserved_tokens[:2]) == [0, 0]


def test_who_waits_for_another_endpoints_prefill_does_not_hide_what_its_own_computes(
    fleet: Fleet, books: Books
) -> None:
    books.reserve("fetches", 0, 0, 400, 1.0, cached_tokens=1000, fetched_tokens=900)
    books.reserve("fetches", 1, 1000, 1, 1.0, prefill_only=True)
    books.reserve("encodes", 0, 0, 0, 1.0, prefill_only=True)
    books.reserve("own", 0, 300, 400, 2.0)
    assert (fleet.oldest_tokens[0], fleet.oldest_since[0]) == (300, 2.0)
    assert books.computing() == [1, 0]
    books.first_token("fetches", 3.0)  # says nothing of when the engine began with the other
    books.first_token("encodes", 3.0)
    assert (fleet.oldest_tokens[0], fleet.oldest_since[0]) == (300, 2.0)
    for name in ("own", "fetches", "encodes"):
        books.finish(name, 4.0)
    assert set(totals(fleet).values()) == {0.0}
    assert fleet.oldest_tokens[0] == fleet.oldest_left_tokens[0] == 0


def test_a_prompt_that_could_not_be_fetched_is_computed_and_needs_the_same_room(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 0, 0, 400, 1.0, cached_tokens=1000, fetched_tokens=900)
    books.reserve("a", 1, 1000, 1, 1.0, prefill_only=True)
    assert books.taken_back("a", 0, 2.0)
    assert (fleet.in_flight_tokens[0], fleet.reserved_tokens[0]) == (900, 1300)


def test_the_oldest_waiting_request_is_the_one_the_engine_works_on(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 0, 100, 400, 1.0)
    books.reserve("b", 0, 30, 400, 2.0)
    assert (fleet.oldest_tokens[0], fleet.oldest_since[0]) == (100, 1.0)
    books.first_token("a", 5.0)
    assert (fleet.oldest_tokens[0], fleet.oldest_since[0]) == (30, 5.0)
    books.finish("b", 6.0)
    assert fleet.oldest_tokens[0] == 0


def test_an_abort_behind_the_oldest_does_not_restart_its_clock(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 0, 100, 400, 1.0)
    books.reserve("b", 0, 30, 400, 2.0)
    books.finish("b", 4.0)
    assert fleet.oldest_since[0] == 1.0


def test_progress_by_events_shrinks_what_is_left_of_the_oldest_only(fleet: Fleet, books: Books) -> None:
    books.reserve("a", 0, 100, 400, 1.0, cached_tokens=10)
    books.reserve("b", 0, 30, 400, 2.0)
    books.stored("a", 0, 60)
    books.stored("b", 0, 16)
    assert fleet.oldest_left_tokens[0] == 50
    assert fleet.oldest_left_square[0] == square(50, 60)
    assert fleet.oldest_tokens[0] == 100
    books.reserve("c", 0, 30, 400, 2.0)
    books.finish("c", 3.0)
    assert fleet.oldest_left_tokens[0] == 50, "what others do behind it changes nothing"
    books.first_token("a", 4.0)
    assert (fleet.oldest_tokens[0], fleet.oldest_left_tokens[0]) == (30, 14)


def test_a_prompt_counts_as_cached_until_its_first_token(fleet: Fleet, books: Books) -> None:
    keys = [1, 2, 3]
    books.reserve("a", 2, 48, 400, 0.0, keys=keys)
    assert fleet.pending.leading([1, 2, 9], 3).tolist() == [0, 0, 2]
    books.first_token("a", 1.0)
    assert fleet.pending.leading([1, 2, 9], 3).tolist() == [0, 0, 0]


def test_a_prefill_leg_ends_with_its_answer_and_the_decode_leg_goes_on(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 0, 100, 1, 0.0, prefill_only=True)
    books.reserve("r", 1, 0, 400, 0.0, cached_tokens=100)
    assert books.prefilled("r", 1.0)
    assert not books.prefilled("r", 1.0)
    assert fleet.in_flight[:2].tolist() == [0, 1]
    books.first_token("r", 2.0)
    books.finish("r", 3.0)
    assert set(totals(fleet).values()) == {0.0}


def test_a_failed_prefill_leg_leaves_its_work_to_the_decode_endpoint(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 1, 0, 400, 0.0, cached_tokens=100, fetched_tokens=70, keys=[1, 2])
    books.reserve("r", 0, 100, 1, 0.0, prefill_only=True)
    assert books.taken_back("r", 1, 1.0)
    assert fleet.in_flight[:2].tolist() == [0, 1]
    assert fleet.in_flight_tokens[:2].tolist() == [0, 70]
    assert fleet.pending.leading([1, 2], 2).tolist() == [0, 2]
    assert not books.taken_back("nobody", 1, 1.0)
    books.finish("r", 2.0)
    assert set(totals(fleet).values()) == {0.0}


def test_a_retry_on_the_same_endpoint_replaces_the_old_entry(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 0, 100, 400, 0.0)
    books.reserve("r", 0, 80, 400, 1.0)
    assert (fleet.in_flight[0], fleet.in_flight_tokens[0]) == (1, 80)


def test_a_request_served_by_a_fallback_moves_with_its_whole_prompt_uncached(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 0, 20, 400, 0.0, cached_tokens=80, keys=[7])
    assert books.moved("r", 0, 1, 1.0)
    assert not books.moved("r", 0, 2, 1.0)
    assert fleet.in_flight[:2].tolist() == [0, 1]
    assert fleet.in_flight_tokens[1] == 100
    assert fleet.pending.leading([7], 3).tolist() == [0, 1, 0]


def test_silence_expires_a_request_and_signs_of_life_postpone_it(fleet: Fleet, books: Books) -> None:
    books.reserve("quiet", 0, 100, 400, 0.0)
    books.reserve("talks", 0, 100, 400, 0.0)
    books.first_token("talks", 30.0)
    books.alive("talks", 50.0)
    assert books.expire(59.0) == []
    assert books.expire(60.0) == ["quiet"]
    assert books.expire(109.0) == []
    assert books.expire(110.0) == ["talks"]
    assert books.counts.expired == 2
    assert set(totals(fleet).values()) == {0.0}


def test_a_retry_does_not_keep_older_requests_from_expiring(books: Books) -> None:
    books.reserve("retried", 0, 100, 400, 0.0)
    books.reserve("quiet", 0, 100, 400, 0.0)
    books.reserve("retried", 0, 100, 400, 50.0)
    assert books.expire(70.0) == ["quiet"]


def test_an_idle_engine_clears_old_entries_and_a_busy_one_none(fleet: Fleet, books: Books) -> None:
    books.reserve("old", 0, 100, 400, 0.0)
    books.reserve("elsewhere", 1, 100, 400, 0.0)
    books.reserve("new", 0, 100, 400, 9.0)
    assert books.reconcile(0, engine_requests=1, scraped_at=10.0) == []
    assert books.reconcile(0, engine_requests=0, scraped_at=10.0) == ["old"]
    assert fleet.in_flight[:2].tolist() == [1, 1]


def test_a_released_slot_leaves_nothing_behind_for_its_next_endpoint(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 1, 100, 400, 0.0, keys=[7])
    fleet.remove(1)
    fleet.release(1)
    assert fleet.add(Endpoint(name="next", address="10.0.0.9:8000")) == 1
    assert fleet.in_flight[1] == 0
    assert fleet.pending.leading([7], 3).tolist() == [0, 0, 0]
    assert not books.finish("r", 1.0)
    assert books.counts.forgotten == 1
    assert fleet.in_flight[1] == 0


def test_an_endpoint_without_requests_has_nothing_in_its_columns_whatever_was_rounded(
    fleet: Fleet, books: Books
) -> None:
    """Tokens that a slower tier or a degraded stream holds count in part: sums of such numbers do not come out even."""
    for number in range(50):
        books.reserve(f"r{number}", 0, 16.1 * number + 0.7, 400, now=0.0, cached_tokens=0.8 * 16 * number)
    for number in range(0, 50, 3):
        books.first_token(f"r{number}", now=1.0)
    for number in reversed(range(50)):
        books.finish(f"r{number}", now=2.0)
    names = (
        "in_flight",
        "awaiting",
        "in_flight_tokens",
        "in_flight_square",
        "decoding",
        "decode_tokens",
        "reserved_tokens",
    )
    assert {name: float(getattr(fleet, name)[0]) for name in names} == dict.fromkeys(names, 0.0)


def test_what_another_router_sent_is_added_and_replaced(fleet: Fleet, books: Books) -> None:
    books.reserve("r", 0, 100, 400, 0.0)
    books.feed("peer", {0: Sums(in_flight=2, in_flight_tokens=500)})
    books.feed("peer", {0: Sums(in_flight=3, in_flight_tokens=700)})
    assert (fleet.in_flight[0], fleet.in_flight_tokens[0]) == (4, 800)
    assert books.own(0).in_flight_tokens == 100
    books.feed("peer", {})
    assert (fleet.in_flight[0], fleet.in_flight_tokens[0]) == (1, 100)


class BooksAgree(RuleBasedStateMachine):
    """Whatever happens in whatever order, the columns are the sums over a plain list of what is in flight."""

    ids = st.sampled_from("abcde")

    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet_of(3)
        self.books = Books(self.fleet, idle_timeout_s=20.0)
        self.now = 0.0
        self.model: dict[str, dict[int, tuple[int, int, bool]]] = {}

    @rule(request=ids, slot=st.integers(0, 2), uncached=st.integers(0, 50), cached=st.integers(0, 50))
    def reserve(self, request: str, slot: int, uncached: int, cached: int) -> None:
        self.books.reserve(request, slot, uncached, 10, self.now, cached_tokens=cached, keys=list(range(uncached)))
        self.model.setdefault(request, {})[slot] = (uncached, cached, True)

    @rule(request=ids)
    def first_token(self, request: str) -> None:
        self.books.first_token(request, self.now)
        legs = self.model.get(request, {})
        self.model.update({request: {slot: (n, h, False) for slot, (n, h, _) in legs.items()}} if legs else {})

    @rule(request=ids)
    def finish(self, request: str) -> None:
        assert self.books.finish(request, self.now) == (request in self.model)
        self.model.pop(request, None)

    @rule(seconds=st.sampled_from([1.0, 7.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for request in self.books.expire(self.now):
            del self.model[request]

    @rule(slot=st.integers(0, 2))
    def replace_endpoint(self, slot: int) -> None:
        endpoint = self.fleet.endpoint(slot)
        self.fleet.remove(slot)
        self.fleet.release(slot)
        assert self.fleet.add(endpoint) == slot
        for request in list(self.model):
            self.model[request].pop(slot, None)
            if not self.model[request]:
                del self.model[request]

    @invariant()
    def columns_are_the_sums(self) -> None:
        legs = [(slot, *leg) for request in self.model.values() for slot, leg in request.items()]
        for slot in range(3):
            waiting = [(n, h) for where, n, h, first in legs if where == slot and first]
            decoding = [(n, h) for where, n, h, first in legs if where == slot and not first]
            assert self.fleet.in_flight[slot] == len(waiting) + len(decoding)
            assert self.fleet.awaiting[slot] == len(waiting)
            assert self.fleet.in_flight_tokens[slot] == sum(n for n, _ in waiting)
            assert self.fleet.in_flight_square[slot] == sum(square(n, h) for n, h in waiting)
            assert self.fleet.decode_tokens[slot] == sum(n + h for n, h in decoding)
            assert self.fleet.reserved_tokens[slot] == sum(n + 10 for n, _ in waiting + decoding)
            longest = self.fleet.pending.leading(range(50), 3)[slot]
            assert longest == max((n for n, _ in waiting), default=0)
            assert np.isfinite(self.fleet.oldest_since[slot])


BooksAgree.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBooksAgree = BooksAgree.TestCase
