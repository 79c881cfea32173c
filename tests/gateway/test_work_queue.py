"""The queue's rules one by one; what they do together is in test_work_queue_overload.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from gateway.work_queue import Limits, Place, Waiting, WorkQueue
from scorers.expected_work_scorer import ExpectedWorkScorer

SECOND = 43_000
"""Tokens of a prompt whose prefill takes about 1.6 s."""


class World:
    """Two endpoints, their books, a queue and a clock that the test moves."""

    def __init__(self, scorer: dict[str, Any] | None = None, **limits: Any) -> None:
        self.now = 0.0
        self.fleet = Fleet(clock=lambda: self.now)
        for number in range(2):
            self.fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
        self.books = Books(self.fleet)
        parameters = ExpectedWorkScorer.Parameters(**(scorer or {}))
        self.queue = WorkQueue(self.fleet, ExpectedWorkScorer("w", parameters), Limits(**limits))
        self.sent = 0

    def place(self, name: str, tokens: int = 1000, *, slot: int = 0, only: bool = True, **fields: Any) -> Place:
        """A request whose best endpoint is `slot`: the only candidate, or the one with its prefix."""
        held: Sequence[float] = [0.0] * self.fleet.capacity
        request = Request(id=name, model="m", target_model="m", path="/", prompt_tokens=tokens, **fields)
        if not only:
            vector = np.array(held)
            vector[slot] = tokens // 2
            request.matches = {"p": Match(tokens=vector, weighted_tokens=vector, total_tokens=tokens, block_tokens=16)}
            request.default_match = "p"
        candidates = np.array([slot]) if only else self.fleet.slots()
        return Place(request=request, candidates=candidates, slot=slot, decode=slot)

    def busy(self, slot: int = 0, tokens: int = SECOND, output: int = 400) -> str:
        """Something of ours runs there without a first token."""
        self.sent += 1
        name = f"busy-{self.sent}"
        self.books.reserve(name, slot, tokens, output, self.now)
        return name

    def enter(self, name: str, tokens: int = 1000, **fields: Any) -> Waiting:
        waiting, worst = self.queue.enter(self.place(name, tokens, **fields), self.now)
        assert worst is None
        return waiting

    def again(self, waiting: Waiting) -> Place:
        """Another look at it: its best endpoint as the scorer has it now."""
        place = waiting.place
        work = self.queue.scorer.work(place.request, place.candidates, self.fleet)
        slot = int(place.candidates[work.expected.argmin()])
        return Place(request=place.request, candidates=place.candidates, slot=slot, decode=slot)

    def drain(self) -> list[str]:
        """Who goes, in order, when every endpoint is free again after each."""
        order = []
        while (waiting := self.queue.next(self.now, ())) is not None:
            order.append(waiting.place.request.id)
            self.queue.sent(waiting, waiting.place)
        return order


def test_an_endpoint_that_owes_too_much_prefill_is_closed_and_opens_with_time() -> None:
    world = World()
    world.busy()
    place = world.place("r")
    assert not world.queue.admits(place, world.now)
    assert not world.queue.admits(place, 1.2)
    assert world.queue.admits(place, 1.5)  # 0.3 s before the running prefill should be over


def test_an_endpoint_without_anything_of_ours_awaiting_a_first_token_is_open() -> None:
    world = World(open_s=1e-9)
    name = world.busy()
    world.books.first_token(name, 0.0)
    assert world.queue.admits(world.place("r"), world.now)


def test_memory_is_promised_up_to_the_limit_and_decoding_requests_count() -> None:
    world = World()
    world.fleet.kv_capacity_tokens[:2] = 10_000
    world.books.first_token(world.busy(tokens=6_000, output=400), 0.0)
    assert world.queue.admits(world.place("fits", 2_200), 0.0)
    assert not world.queue.admits(world.place("does not", 2_201), 0.0)
    assert world.queue.admits(world.place("short reply", 2_201, expected_output_tokens=399), 0.0)


def test_a_prompt_larger_than_the_memory_goes_to_an_endpoint_with_nothing_else() -> None:
    world = World()
    world.fleet.kv_capacity_tokens[:2] = 10_000
    assert world.queue.admits(world.place("huge", 50_000), 0.0)


def test_unknown_capacity_limits_nothing() -> None:
    world = World()
    world.books.first_token(world.busy(), 0.0)
    assert world.queue.admits(world.place("r", 1_000_000), 0.0)


def test_a_prefill_leg_and_its_decode_leg_must_both_fit() -> None:
    world = World()
    world.fleet.kv_capacity_tokens[:2] = 10_000
    world.books.first_token(world.busy(slot=1, tokens=8_000), 0.0)
    place = world.place("r", 2_000, slot=0)
    split = Place(request=place.request, candidates=place.candidates, slot=0, decode=1)
    assert world.queue.admits(place, 0.0)
    assert not world.queue.admits(split, 0.0)


def test_a_prompt_waits_for_its_own_best_endpoint_although_another_is_free() -> None:
    world = World()
    world.books.first_token(world.busy(slot=0, tokens=9_500), 0.0)
    world.fleet.kv_capacity_tokens[:2] = 10_000
    world.enter("affine", 4_000, only=False)  # half of it is cached on the full endpoint
    assert world.queue.next(0.0, ()) is None
    world.enter("free", 4_000, slot=1)
    assert world.drain() == ["free"]


def test_when_enough_wait_for_an_endpoint_the_next_one_goes_to_a_free_one_where_it_costs_more() -> None:
    world = World()
    world.busy(tokens=13_000)
    waiting = [world.enter(f"r{number}", 40_000, only=False) for number in range(3)]
    gone = world.queue.next(world.now, ())
    assert gone is waiting[1], "the first one has nobody before it"
    kept = world.queue.kept_from(gone)
    assert kept is not None
    assert kept[:2].tolist() == [True, False]
    world.fleet.kept = kept
    place = world.again(gone)
    world.fleet.kept = None
    assert place.slot == 1
    assert world.queue.admits(place, world.now)
    world.books.reserve("gone", 1, 40_000, 400, world.now)
    world.queue.sent(gone, place)
    assert world.queue.next(world.now, ()) is None, "the other one is closed now, too"


def test_nobody_goes_elsewhere_where_others_wait_or_there_is_no_room() -> None:
    world = World()
    world.busy(tokens=13_000)
    world.fleet.kv_capacity_tokens[1] = 10_000
    world.books.reserve("decodes", 1, 0, 400, world.now, cached_tokens=5000)
    world.books.first_token("decodes", world.now)
    for number in range(4):
        world.enter(f"r{number}", 40_000, only=False)
    assert world.queue.next(world.now, ()) is None


def test_who_goes_where_it_is_best_is_kept_from_nothing() -> None:
    world = World()
    waiting = world.enter("r", only=False)
    assert world.queue.next(world.now, ()) is waiting
    assert world.queue.kept_from(waiting) is None


def test_what_does_not_fit_lets_the_next_one_pass() -> None:
    world = World()
    world.fleet.kv_capacity_tokens[:2] = 10_000
    world.books.first_token(world.busy(tokens=5_000), 0.0)
    world.enter("large", 8_000)
    world.enter("small", 1_000)
    assert world.drain() == ["small"]
    assert len(world.queue) == 1


def test_backfill_takes_the_oldest_and_shortest_the_least_work_less_its_age() -> None:
    for order, expected in (("backfill", ["long", "short"]), ("shortest", ["short", "long"])):
        world = World(order=order)
        world.enter("long", SECOND)
        world.enter("short", 1_000)
        assert world.drain() == expected
    world = World(order="shortest", alpha=0.05)
    world.enter("long", SECOND)
    world.now = 40.0  # 1.6 s of work are outweighed after 32 s
    world.enter("short", 1_000)
    assert world.drain() == ["long", "short"]


def test_higher_priorities_go_first() -> None:
    world = World()
    for name, priority in (("shed", -1), ("normal", 0), ("urgent", 10)):
        world.enter(name, priority=priority)
    assert world.drain() == ["urgent", "normal", "shed"]


def test_flows_share_by_work_not_by_number() -> None:
    world = World()
    for number in range(4):
        world.enter(f"a{number}", 8_000, fairness_id="a")
    for number in range(6):
        world.enter(f"b{number}", 2_000, fairness_id="b")
    assert world.drain() == ["a0", "b0", "b1", "b2", "b3", "b4", "a1", "b5", "a2", "a3"]


def test_without_fairness_arrival_alone_counts() -> None:
    world = World(fairness=False)
    for name, flow in (("a0", "a"), ("a1", "a"), ("b0", "b")):
        world.enter(name, fairness_id=flow)
    assert world.drain() == ["a0", "a1", "b0"]


def test_a_full_queue_turns_away_who_came_last() -> None:
    world = World(max_requests=2)
    world.enter("first")
    world.enter("second")
    waiting, worst = world.queue.enter(world.place("third"), 0.0)
    assert worst is waiting
    assert len(world.queue) == 2


def test_a_full_queue_turns_away_the_lowest_priority_first_and_then_the_largest_flow() -> None:
    world = World(max_requests=3)
    shed = world.enter("shed", priority=-1)
    world.enter("a0", fairness_id="a")
    newest = world.enter("a1", fairness_id="a")
    assert world.queue.enter(world.place("b0", fairness_id="b"), 0.0)[1] is shed
    assert world.queue.enter(world.place("c0", fairness_id="c"), 0.0)[1] is newest


def test_the_time_limit_takes_out_only_who_has_waited_for_too_long() -> None:
    world = World(max_wait_s=10.0)
    old = world.enter("old")
    world.now = 5.0
    young = world.enter("young")
    assert world.queue.expired(9.9) == []
    assert world.queue.expired(10.0) == [old]
    assert world.queue.all() == [young]


def test_retry_after_grows_with_what_waits_and_stays_within_bounds() -> None:
    world = World(max_wait_s=20.0)
    assert world.queue.retry_after_s(0.0) == 1.0
    for number in range(5):
        world.enter(f"r{number}", SECOND)
    assert 3.5 < world.queue.retry_after_s(0.0) < 4.5  # 8 s of work on two endpoints
    for number in range(50):
        world.enter(f"s{number}", SECOND)
    assert world.queue.retry_after_s(0.0) == 20.0


def test_what_was_just_sent_counts_as_cached_for_those_with_the_same_beginning() -> None:
    world = World()
    keys = list(range(100))

    def alike(name: str) -> Place:
        place = world.place(name, 1_600 + 10, slot=0)
        nothing = np.zeros(world.fleet.capacity)
        match = Match(tokens=nothing, weighted_tokens=nothing, total_tokens=1_600, block_tokens=16, keys=keys)
        place.request.matches, place.request.default_match = {"p": match}, "p"
        return place

    first, _ = world.queue.enter(alike("first"), 0.0)
    second, _ = world.queue.enter(alike("second"), 0.0)
    before = second.own[0]
    world.queue.sent(first, first.place)
    assert second.uncached[0] == 10
    assert second.own[0] < before / 50


def test_who_waits_is_looked_at_again_when_an_endpoint_comes() -> None:
    world = World()
    world.busy()
    waiting = world.enter("r")
    assert world.queue.next(0.0, ()) is None
    for number in range(2, 40):  # past the fleet's capacity: every column is longer now
        world.fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
    assert world.queue.next(0.0, ()) is waiting
    world.queue.looked(waiting, world.place("r"), 0.0)
    assert world.queue.next(0.0, ()) is None


def test_the_decode_factor_makes_work_dearer_but_does_not_close_endpoints() -> None:
    from scorers.expected_work_scorer import DecodeFactor

    plain, slowed = World(order="shortest"), World({"decode_factor": DecodeFactor()}, order="shortest")
    for world in (plain, slowed):
        world.fleet.decoding[0], world.fleet.decode_tokens[0] = 200, 1e6
        world.busy(tokens=10_000)
        world.enter("r")
        assert world.queue.next(0.0, ()) is not None  # 0.23 s are owed


@pytest.mark.parametrize("order", ["backfill", "shortest"])
@settings(deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(1, 60_000), st.integers(-1, 1), st.sampled_from("abc"), st.floats(0, 2)), max_size=30
    )
)
def test_nobody_who_may_go_is_overlooked_and_everybody_leaves_in_the_end(order: str, arrivals: list[Any]) -> None:
    world = World(order=order, max_requests=100)
    world.fleet.kv_capacity_tokens[:2] = 50_000
    running: list[str] = []
    for number, (tokens, priority, flow, gap) in enumerate(arrivals):
        world.now += gap
        world.enter(f"r{number}", tokens, only=False, priority=priority, fairness_id=flow)
    for _ in range(10 * len(arrivals) + 1):
        passed: list[Waiting] = []
        while (waiting := world.queue.next(world.now, passed)) is not None:
            place = world.again(waiting)
            if not world.queue.admits(place, world.now):
                world.queue.looked(waiting, place, world.now)
                passed.append(waiting)
                continue
            name, slot = place.request.id, place.slot
            cached = float(waiting.cached[slot])
            world.books.reserve(name, slot, place.request.prompt_tokens - cached, 400, world.now)
            world.queue.sent(waiting, place)
            running.append(name)
        for waiting in world.queue.all():  # nobody was overlooked
            assert not world.queue.admits(world.again(waiting), world.now)
        if not running:
            break
        world.now += 1.0
        world.books.first_token(running[0], world.now)
        world.books.finish(running.pop(0), world.now)
    assert len(world.queue) == 0
