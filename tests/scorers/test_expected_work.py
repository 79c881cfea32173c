from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from fleet.work import PrefillCost
from scorers.expected_work_scorer import DecodeFactor, ExpectedWorkScorer

Make = Callable[..., Any]
Ask = Callable[..., Request]
A, Q = 18.8e-6, 8.74e-10


def own(tokens: float, cached: float) -> float:
    uncached = tokens - cached
    return A * uncached + Q * uncached * (cached + uncached / 2)


def test_a_speed_factor_of_zero_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match=r"speedFactors\['e1'\]: expected a number above 0"):
        make("expected-work-scorer", speed_factors={"e1": 0.0})


def test_an_idle_fleet_is_ordered_by_own_work_alone(fleet: Fleet, make: Make, ask: Ask) -> None:
    work = make("expected-work-scorer").work(ask(2048, matched=[0, 1024, 2048, 512]), fleet.slots(), fleet)
    assert work.cached.tolist() == [0, 1024, 2047, 512], "the last token is always computed"
    assert work.own.tolist() == pytest.approx([own(2048, cached) for cached in (0, 1024, 2047, 512)])
    assert work.expected.tolist() == pytest.approx([1.5 * own(2048, cached) for cached in (0, 1024, 2047, 512)])


def test_own_work_weighs_more_as_the_whole_fleet_falls_behind(fleet: Fleet, make: Make, ask: Ask) -> None:
    books = Books(fleet)
    for slot, tokens in enumerate([40000, 50000, 60000, 70000]):
        books.reserve(f"r{slot}", slot, tokens, 400, 100.0)
    work = make("expected-work-scorer").work(ask(1024, matched=[0, 0, 0, 1024]), fleet.slots(), fleet)
    backlog = [own(tokens, 0) for tokens in (40000, 50000, 60000, 70000)]
    assert work.backlog.tolist() == pytest.approx(backlog)
    weight = 1 + 0.5 + 3 * backlog[0]
    expected = [backlog[slot] + weight * own(1024, [0, 0, 0, 1023][slot]) for slot in range(4)]
    assert work.expected.tolist() == pytest.approx(expected, abs=3e-6)


@pytest.mark.parametrize(
    ("progress", "seconds", "left"),
    [("none", 0.5, 1.0), ("clock", 0.5, None), ("clock", 1e6, 0.05), ("events", 1e6, 0.05)],
)
def test_the_oldest_prefill_progresses_by_clock_but_is_never_taken_for_done(
    make: Make, ask: Ask, progress: str, seconds: float, left: float | None
) -> None:
    now = 100.0
    fleet = Fleet(clock=lambda: now)
    fleet.add(Endpoint(name="e", address="10.0.0.1:1"))
    Books(fleet).reserve("r", 0, 50000, 400, 100.0)
    now += seconds
    whole = own(50000, 0)
    work = make("expected-work-scorer", progress=progress).work(ask(16), fleet.slots(), fleet)
    assert work.backlog[0] == pytest.approx(whole - seconds if left is None else whole * left)


def test_progress_by_events_is_what_the_engine_announced(fleet: Fleet, make: Make, ask: Ask) -> None:
    books = Books(fleet)
    books.reserve("r", 0, 50000, 400, 0.0)
    books.stored("r", 0, 20000)
    work = make("expected-work-scorer", progress="events").work(ask(16), fleet.slots(), fleet)
    assert work.backlog[0] == pytest.approx(own(50000, 20000))


def test_a_prompt_on_its_way_counts_as_cached_there(fleet: Fleet, make: Make) -> None:
    keys = list(range(64))
    match = Match(tokens=np.zeros(4), weighted_tokens=np.zeros(4), total_tokens=1024, block_tokens=16, keys=keys)
    request = Request(id="r", model="m", target_model="m", path="/", prompt_tokens=1030, matches={"": match})
    books = Books(fleet)
    books.reserve("before", 2, 1000, 400, 100.0, keys=[*keys[:32], 999])
    work = make("expected-work-scorer").work(request, fleet.slots(), fleet)
    assert work.cached.tolist() == [0, 0, 512, 0]
    books.first_token("before", 100.0)
    assert make("expected-work-scorer").work(request, fleet.slots(), fleet).cached.tolist() == [0, 0, 0, 0]


def test_a_slow_endpoint_needs_longer_for_everything(fleet: Fleet, make: Make, ask: Ask) -> None:
    books = Books(fleet)
    for slot in range(4):
        books.reserve(f"r{slot}", slot, 8000, 400, 100.0)
    work = make("expected-work-scorer", speed_factors={"e1": 0.5, "10.0.0.2:8000": 2.0}).work(
        ask(1024), fleet.slots(), fleet
    )
    assert (work.own / work.own[0]).tolist() == pytest.approx([1, 2, 0.5, 1])
    assert (work.backlog / work.backlog[0]).tolist() == pytest.approx([1, 2, 0.5, 1])


def test_a_model_may_have_its_own_constants(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer = make("expected-work-scorer", models={"m": PrefillCost(a=1e-3, q=0.0)})
    assert scorer.work(ask(100), fleet.slots(), fleet).own[0] == pytest.approx(0.1)


def test_running_decodes_make_prefill_dearer_where_asked(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.decoding[1], fleet.decode_tokens[1] = 64, 64 * 4000
    plain = make("expected-work-scorer").work(ask(8192), fleet.slots(), fleet)
    slowed = make("expected-work-scorer", decode_factor=DecodeFactor()).work(ask(8192), fleet.slots(), fleet)
    x = (0.57 + 4.15e-5 * 64 * 4000 + 0.0041 * 64 + 1.16) / 154
    assert plain.expected[0] == pytest.approx(plain.expected[1])
    assert slowed.expected[1] == pytest.approx(1.5 * own(8192, 0) * (1 + 0.5 * x) * 8192 / (8192 - 64))
    assert slowed.own.tolist() == plain.own.tolist()


def test_ties_go_to_fewer_in_flight_and_then_to_the_one_chosen_longest_ago(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer = make("expected-work-scorer")
    fleet.in_flight[:4] = [1, 0, 0, 0]
    fleet.chosen_at[:4] = [1, 4, 2, 3]
    scores = scorer.score(ask(1000), fleet.slots(), fleet)
    assert np.argsort(-scores).tolist() == [2, 3, 1, 0]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 200000), st.integers(0, 30000), st.integers(0, 5), st.integers(0, 1000)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 30000),
)
def test_the_score_keeps_the_order_of_work_and_the_smallest_scores_one(
    state: list[tuple[int, int, int, int]], tokens: int
) -> None:
    fleet = Fleet(clock=lambda: 0.0)
    matched = np.zeros(len(state) + 16)
    for slot, (queued, held, in_flight, chosen) in enumerate(state):
        fleet.add(Endpoint(name=f"e{slot}", address=f"10.0.0.{slot}:1"))
        fleet.in_flight_tokens[slot], fleet.in_flight[slot], fleet.chosen_at[slot] = queued, in_flight, chosen
        matched[slot] = held
    match = Match(tokens=matched, weighted_tokens=matched, total_tokens=tokens, block_tokens=1)
    request = Request(id="r", model="m", target_model="m", path="/", prompt_tokens=tokens, matches={"": match})
    scorer = ExpectedWorkScorer("s", ExpectedWorkScorer.Parameters())
    expected = scorer.work(request, fleet.slots(), fleet).expected
    score = scorer.score(request, fleet.slots(), fleet)
    assert score[expected.argmin()] == 1
    assert ((score > 0) & (score <= 1)).all()
    order = np.argsort(expected, kind="stable")
    assert (np.diff(score[order]) <= 0).all()
    apart = np.diff(expected[order]) > 1e-9
    assert (np.diff(score[order])[apart] < 0).all()


@pytest.mark.parametrize(
    ("progress", "left"), [("none", [2.0, 0.5]), ("clock", [1.75, 0.25]), ("events", [0.5, 0.125])]
)
def test_a_slow_endpoint_gets_through_its_prefill_slowly(make: Make, progress: str, left: list[float]) -> None:
    now = 100.0
    fleet = Fleet(clock=lambda: now)
    books = Books(fleet)
    for number in range(2):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:1"))
        books.reserve(f"r{number}", number, 1000, 400, 100.0)
        books.stored(f"r{number}", number, 750)
    scorer = make("expected-work-scorer", a=1e-3, q=0.0, progress=progress, speed_factors={"e0": 0.5, "e1": 2.0})
    now = 100.25
    assert scorer.backlog("m", fleet.slots(), fleet, now).tolist() == pytest.approx(left)
    oldest = [books.oldest(slot) for slot in range(2)]
    assert [scorer.prefill_s(leg, fleet) for leg in oldest] == pytest.approx([2.0, 0.5])


def test_what_the_queue_keeps_from_a_request_is_the_worst_choice_unless_it_keeps_everything(
    fleet: Fleet, make: Make, ask: Ask
) -> None:
    scorer, request = make("expected-work-scorer"), ask(1000, matched=[900, 0, 0, 0])
    kept = np.zeros(fleet.capacity, np.bool_)
    kept[0] = True
    fleet.kept = kept
    score = scorer.score(request, fleet.slots(), fleet)
    assert score[0] == 0
    assert (score[1:] > 0.9).all()
    everything = scorer.score(request, fleet.slots()[:1], fleet)
    assert everything.tolist() == [1.0], "another profile's endpoints: the queue says nothing of them"
    fleet.kept = None
    assert scorer.score(request, fleet.slots(), fleet).argmax() == 0
