from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet import plugin
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.plugin import Decider, Filter, Hint, Picker, Plugin, Producer, Scorer, Verdict
from fleet.request import Request
from gateway.cycle import Decision, Profile, Rejection, Scheduler
from gateway.profile_handlers import (
    DataParallelProfileHandler,
    DisaggProfileHandler,
    HeaderProfileHandler,
    SingleProfileHandler,
    StageDeciders,
    StagedHandler,
    StageNames,
)

NONE = plugin.Parameters()


class Fixed(Scorer):
    """Scores given by slot."""

    def __init__(self, name: str, by_slot: list[float]) -> None:
        super().__init__(name, NONE)
        self.by_slot = np.array(by_slot)

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        return self.by_slot[candidates]


class Broken(Scorer):
    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        raise RuntimeError("no")


class WrongShape(Scorer):
    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        return np.ones(1)


class Keep(Filter):
    def __init__(self, name: str, slots: set[int]) -> None:
        super().__init__(name, NONE)
        self.slots = slots
        self.seen: list[list[int]] = []

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        self.seen.append(candidates.tolist())
        return np.isin(candidates, list(self.slots))


class BrokenFilter(Filter):
    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        raise RuntimeError("no")


class Best(Picker):
    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        return candidates[[int(scores.argmax())]]


class BrokenPicker(Picker):
    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        return candidates[:0]


class Says(Decider):
    def __init__(self, name: str, answer: bool) -> None:
        super().__init__(name, NONE)
        self.answer = answer
        self.asked: list[int] = []

    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        self.asked.append(decode)
        return Verdict(self.answer, "told", {"n": 1.0})


class BrokenDecider(Decider):
    def decide(self, request: Request, decode: int, fleet: Fleet) -> Verdict:
        raise RuntimeError("no")


def make_fleet(count: int) -> Fleet:
    fleet = Fleet()
    for number in range(count):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    return fleet


def profile(name: str = "default", *parts: Filter | tuple[Scorer, float], picker: Picker | None = None) -> Profile:
    filters = tuple(part for part in parts if isinstance(part, Filter))
    scorers = tuple(part for part in parts if isinstance(part, tuple))
    return Profile(name, filters, scorers, picker or Best("best", NONE))


def single(fleet: Fleet, *parts: Any, **more: Any) -> Scheduler:
    handler = SingleProfileHandler("h", NONE)
    handler.use_profiles(["default"])
    return Scheduler(fleet, [profile("default", *parts, picker=more.pop("picker", None))], handler, **more)


def disagg(fleet: Fleet, profiles: list[Profile], deciders: Mapping[str, Decider], **parameters: Any) -> Scheduler:
    given = DisaggProfileHandler.Parameters(
        deciders=StageDeciders(**{k: v.name for k, v in deciders.items()}), **parameters
    )
    handler = DisaggProfileHandler("h", given)
    handler.bind(lambda name, kind: next(decider for decider in deciders.values() if decider.name == name))
    handler.use_profiles([it.name for it in profiles])
    return Scheduler(fleet, profiles, handler)


def request(**fields: Any) -> Request:
    return Request(id="r", model="m", target_model="m", path="/v1/completions", **fields)


def decided(outcome: Decision | Rejection) -> Decision:
    assert isinstance(outcome, Decision), outcome
    return outcome


def rejected(outcome: Decision | Rejection) -> Rejection:
    assert isinstance(outcome, Rejection), outcome
    return outcome


# What goes wrong


def test_no_candidates_is_503_no_endpoints() -> None:
    fleet = make_fleet(1)
    outcome = rejected(single(fleet).schedule(request(), fleet.slots()[:0]))
    assert (outcome.status, outcome.reason) == (503, "rejected-no-endpoints")


def test_filters_that_leave_nothing_are_429_saturated_and_the_run_says_which() -> None:
    fleet = make_fleet(3)
    keep_two, keep_none = Keep("two", {0, 1}), Keep("none", set())
    outcome = rejected(single(fleet, keep_two, keep_none).schedule(request(), fleet.slots()))
    assert (outcome.status, outcome.reason) == (429, "rejected-saturated")
    assert [(name, given[~kept].tolist()) for name, given, kept in outcome.runs["default"].filtered] == [
        ("two", [2]),
        ("none", [0, 1]),
    ]


def test_a_scorer_that_raises_costs_its_own_score_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    fleet = make_fleet(2)
    scheduler = single(fleet, (Broken("bad", NONE), 5.0), (Fixed("good", [0.1, 0.9]), 1.0))
    assert decided(scheduler.schedule(request(), fleet.slots())).slots[0] == 1
    assert scheduler.failures == {("bad", "score"): 1}
    assert "plugin-failed plugin=bad" in caplog.text


def test_a_failure_is_logged_once_however_often_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    fleet = make_fleet(2)
    scheduler = single(fleet, (Broken("bad", NONE), 5.0))
    for _ in range(50):
        scheduler.schedule(request(), fleet.slots())
    assert scheduler.failures["bad", "score"] == 50
    assert caplog.text.count("plugin-failed") == 1


def test_scores_of_the_wrong_shape_count_as_a_failure_instead_of_being_spread_over_all() -> None:
    fleet = make_fleet(3)
    scheduler = single(fleet, (WrongShape("odd", NONE), 1.0))
    assert decided(scheduler.schedule(request(), fleet.slots())).runs["default"].totals.tolist() == [0, 0, 0]
    assert scheduler.failures["odd", "score"] == 1


def test_a_filter_that_raises_keeps_all() -> None:
    fleet = make_fleet(2)
    scheduler = single(fleet, BrokenFilter("bad", NONE), (Fixed("good", [0.1, 0.9]), 1.0))
    assert decided(scheduler.schedule(request(), fleet.slots())).slots[0] == 1


def test_a_picker_that_picks_nobody_is_replaced_by_the_highest_total() -> None:
    fleet = make_fleet(2)
    scheduler = single(fleet, (Fixed("good", [0.1, 0.9]), 1.0), picker=BrokenPicker("bad", NONE))
    assert decided(scheduler.schedule(request(), fleet.slots())).slots[0] == 1
    assert scheduler.failures["bad", "pick"] == 1


def test_a_decider_that_raises_means_no() -> None:
    fleet = make_fleet(2)
    scheduler = disagg(fleet, [profile("decode"), profile("prefill")], {"prefill": BrokenDecider("bad", NONE)})
    decision = decided(scheduler.schedule(request(), fleet.slots()))
    assert decision.verdicts["prefill"][1].reason == "decider-failed"
    assert decision.headers == {}


def test_a_handler_that_asks_twice_for_a_profile_is_stopped() -> None:
    class Loops(SingleProfileHandler):
        def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
            return "default"

    fleet = make_fleet(1)
    handler = Loops("h", NONE)
    handler.use_profiles(["default"])
    with pytest.raises(RuntimeError, match="twice"):
        Scheduler(fleet, [profile()], handler).schedule(request(), fleet.slots())


def test_an_unknown_profile_in_the_header_is_the_clients_error() -> None:
    fleet = make_fleet(1)
    handler = HeaderProfileHandler("h", HeaderProfileHandler.Parameters(default_profile="a"))
    handler.use_profiles(["a", "b"])
    scheduler = Scheduler(fleet, [profile("a"), profile("b")], handler)
    outcome = rejected(scheduler.schedule(request(headers={"epp-profile": "c"}), fleet.slots()))
    assert (outcome.status, outcome.reason) == (400, None)
    assert "'c'" in outcome.message


# What it is for


def test_filters_run_in_order_each_on_what_the_one_before_left() -> None:
    fleet = make_fleet(4)
    first, second = Keep("first", {1, 2, 3}), Keep("second", {0, 2, 3})
    decision = decided(single(fleet, first, second).schedule(request(), fleet.slots()))
    assert second.seen == [[1, 2, 3]]
    assert decision.runs["default"].candidates.tolist() == [2, 3]


def test_scores_are_clamped_and_weights_are_not_normalised() -> None:
    fleet = make_fleet(3)
    scheduler = single(fleet, (Fixed("a", [2.0, -1.0, 0.5]), 3.0), (Fixed("b", [0.0, 1.0, np.nan]), 2.0))
    run = decided(scheduler.schedule(request(), fleet.slots())).runs["default"]
    assert run.totals.tolist() == [3.0, 2.0, 1.5]
    assert [(name, weight) for name, weight, _ in run.scores] == [("a", 3.0), ("b", 2.0)]


@given(
    st.lists(st.lists(st.floats(allow_nan=True, width=32), min_size=12, max_size=12), min_size=1, max_size=4),
    st.sets(st.integers(0, 11), min_size=1),
)
def test_totals_are_the_sums_that_the_rule_says(columns: list[list[float]], kept: set[int]) -> None:
    fleet = make_fleet(12)
    scorers = [(Fixed(str(n), column), float(n + 1)) for n, column in enumerate(columns)]
    run = decided(single(fleet, Keep("k", kept), *scorers).schedule(request(), fleet.slots())).runs["default"]
    for slot, total in zip(run.candidates.tolist(), run.totals.tolist(), strict=True):
        clamped = [0.0 if column[slot] != column[slot] else min(max(column[slot], 0.0), 1.0) for column in columns]
        assert total == pytest.approx(sum((n + 1) * score for n, score in enumerate(clamped)))


@pytest.mark.parametrize("count", [3, 200])
def test_fallbacks_follow_by_score_and_never_repeat_the_pick(count: int) -> None:
    fleet = make_fleet(count)
    scores = [((number * 7) % count) / count for number in range(count)]
    decision = decided(single(fleet, (Fixed("s", scores), 1.0), fallbacks=2).schedule(request(), fleet.slots()))
    assert list(decision.slots) == sorted(range(count), key=lambda slot: -scores[slot])[:3]
    assert decision.destinations[0] == fleet.endpoint(decision.slots[0]).address


def test_fallbacks_come_only_from_what_the_filters_left() -> None:
    fleet = make_fleet(5)
    decision = decided(single(fleet, Keep("k", {1, 4}), fallbacks=3).schedule(request(), fleet.slots()))
    assert sorted(decision.slots) == [1, 4]


def test_no_fallbacks_where_none_are_wanted_or_a_header_names_the_pick() -> None:
    fleet = make_fleet(3)
    assert len(decided(single(fleet, fallbacks=0).schedule(request(), fleet.slots())).slots) == 1
    handler = DataParallelProfileHandler("h", DataParallelProfileHandler.Parameters(primary_port=9000))
    handler.use_profiles(["default"])
    decision = decided(Scheduler(fleet, [profile()], handler).schedule(request(), fleet.slots()))
    assert decision.destinations == ("10.0.0.0:9000",)
    assert decision.headers == {"x-data-parallel-host-port": "10.0.0.0:8000"}


def test_the_decider_is_asked_with_the_decode_pick_and_its_verdict_is_kept() -> None:
    fleet = make_fleet(3)
    yes = Says("yes", True)
    profiles = [profile("decode", (Fixed("d", [0, 0, 1]), 1.0)), profile("prefill", (Fixed("p", [0, 1, 0]), 1.0))]
    decision = decided(disagg(fleet, profiles, {"prefill": yes}).schedule(request(), fleet.slots()))
    assert yes.asked == [2]
    assert decision.primary == "decode"
    assert decision.slots[0] == 2
    assert decision.headers == {"x-prefiller-host-port": "10.0.0.1:8000"}
    assert decision.verdicts == {"prefill": ("yes", Verdict(True, "told", {"n": 1.0}))}


def test_a_stage_that_its_decider_refuses_does_not_run() -> None:
    fleet = make_fleet(2)
    prefill = Keep("never", set())
    scheduler = disagg(fleet, [profile("decode"), profile("prefill", prefill)], {"prefill": Says("no", False)})
    decision = decided(scheduler.schedule(request(), fleet.slots()))
    assert prefill.seen == []
    assert len(decision.picks["prefill"]) == 0
    assert list(decision.runs) == ["decode"]


def test_a_prefill_stage_that_finds_nobody_is_dropped_and_decode_does_its_work() -> None:
    fleet = make_fleet(2)
    profiles = [profile("decode"), profile("prefill", Keep("k", set()))]
    decision = decided(disagg(fleet, profiles, {"prefill": Says("yes", True)}).schedule(request(), fleet.slots()))
    assert decision.headers == {}
    assert decision.slots[0] == 0


@pytest.mark.parametrize(
    ("answer", "prefills", "came_of_it"),
    [
        (True, {1}, ("d", "disaggregate", "told")),
        (False, {1}, ("d", "local", "told")),
        (True, set(), ("d", "local", "nobody-found")),
        (True, {0}, ("d", "local", "same-endpoint")),
    ],
)
def test_a_stage_counts_as_what_came_of_it(answer: bool, prefills: set[int], came_of_it: tuple[str, str, str]) -> None:
    fleet = make_fleet(2)
    profiles = [profile("decode", Keep("decode", {0})), profile("prefill", Keep("prefill", prefills))]
    scheduler = disagg(fleet, profiles, {"prefill": Says("d", answer)})
    assert list(decided(scheduler.schedule(request(), fleet.slots())).stages()) == [came_of_it]


def test_no_decode_endpoint_ends_the_cycle_without_asking_anybody_else() -> None:
    fleet = make_fleet(2)
    yes = Says("yes", True)
    profiles = [profile("decode", Keep("k", set())), profile("prefill")]
    outcome = rejected(disagg(fleet, profiles, {"prefill": yes}).schedule(request(), fleet.slots()))
    assert outcome.status == 429
    assert yes.asked == []


def test_prefill_first_runs_prefill_before_decode_and_asks_nobody() -> None:
    fleet = make_fleet(2)
    peers: list[int | None] = []

    class Peer(Fixed):
        def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
            peers.append(request.peer)
            return super().score(request, candidates, fleet)

    profiles = [profile("decode", (Peer("d", [1, 0]), 1.0)), profile("prefill", (Peer("p", [0, 1]), 1.0))]
    decision = decided(disagg(fleet, profiles, {}, stage_order="prefill-first").schedule(request(), fleet.slots()))
    assert decision.headers == {"x-prefiller-host-port": "10.0.0.1:8000"}
    assert peers == [None, 1]


def test_plugins_hear_of_the_picks_and_may_answer_the_client() -> None:
    told: list[Mapping[str, Slots]] = []

    class Hears(Fixed):
        def picked(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> None:
            told.append(picks)

        def response_headers(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
            return {"x-session-token": "t"}

    fleet = make_fleet(2)
    hears = Hears("s", [0, 1])
    decision = decided(single(fleet, (hears, 1.0), plugins=[hears]).schedule(request(), fleet.slots()))
    assert told[0]["default"].tolist() == [1]
    assert decision.response_headers == {"x-session-token": "t"}


def test_plugins_hear_of_the_destinations_pick_first_whatever_the_order_and_names_of_the_stages() -> None:
    told: list[list[str]] = []

    class Hears(Fixed):
        def picked(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> None:
            told.append(list(picks))

        def response_headers(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
            return {"x-first": next(iter(picks))}

    fleet = make_fleet(2)
    hears = Hears("s", [0, 1])
    handler = DisaggProfileHandler(
        "h",
        DisaggProfileHandler.Parameters(stage_order="prefill-first", profiles=StageNames(prefill="p", decode="d")),
    )
    handler.use_profiles(["p", "d"])
    scheduler = Scheduler(fleet, [profile("p", (hears, 1.0)), profile("d")], handler, plugins=[hears])
    decision = decided(scheduler.schedule(request(), fleet.slots()))
    assert list(decision.picks) == ["p", "d"]
    assert told == [["d", "p"]]
    assert decision.response_headers == {"x-first": "d"}


def test_producers_that_know_something_run_first_and_may_fail() -> None:
    class Session(Producer):
        def produce(self, request: Request, fleet: Fleet) -> None:
            request.session_id = "s"

    class Fails(Producer):
        def produce(self, request: Request, fleet: Fleet) -> None:
            raise RuntimeError("no")

    fleet = make_fleet(1)
    seen = request()
    scheduler = single(fleet, plugins=[Fails("f", NONE), Producer("settings-only", NONE), Session("s", NONE)])
    decided(scheduler.schedule(seen, fleet.slots()))
    assert seen.session_id == "s"
    assert scheduler.failures == {("f", "produce"): 1}


def test_a_foreign_handler_without_our_additions_works() -> None:
    class Foreign(plugin.ProfileHandler):
        def next_profile(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> str | None:
            return None if picks else "default"

        def primary(self, picks: Mapping[str, Slots]) -> str:
            return "default"

    fleet = make_fleet(2)
    decision = decided(Scheduler(fleet, [profile()], Foreign("f", NONE)).schedule(request(), fleet.slots()))
    assert decision.destinations[0] == "10.0.0.0:8000"
    assert not issubclass(Foreign, StagedHandler)
    assert issubclass(Foreign, Plugin)


class Tells(Plugin):
    """Tells the engine fixed headers, or fails where it has none."""

    def __init__(self, name: str, headers: dict[str, str] | None) -> None:
        super().__init__(name, NONE)
        self.headers = headers

    def request_headers(
        self, request: Request, picks: Mapping[str, Slots], primary: str, candidates: Slots, fleet: Fleet
    ) -> Hint:
        if self.headers is None:
            raise RuntimeError("no")
        self.seen = (primary, picks[primary].tolist(), candidates.tolist())
        return Hint(outcome="told", headers=self.headers)


def test_a_plugin_that_cannot_tell_the_engine_anything_costs_its_own_headers_only() -> None:
    fleet = make_fleet(2)
    scheduler = single(fleet, plugins=[Tells("broken", None), Tells("fine", {"x-a": "1"}), Plugin("quiet", NONE)])
    outcome = decided(scheduler.schedule(request(), fleet.slots()))
    assert outcome.headers == {"x-a": "1"}
    assert list(outcome.hints) == ["fine"]
    assert scheduler.failures == {("broken", "request-headers"): 1}


def test_plugins_are_told_all_candidates_whatever_the_filters_kept() -> None:
    fleet = make_fleet(3)
    plugin_ = Tells("t", {})
    decided(single(fleet, Keep("k", {2}), plugins=[plugin_]).schedule(request(), fleet.slots()))
    assert plugin_.seen == ("default", [2], [0, 1, 2])


def test_the_handlers_own_headers_win_over_a_plugins() -> None:
    fleet = make_fleet(1)
    handler = DataParallelProfileHandler("h", DataParallelProfileHandler.Parameters())
    handler.use_profiles(["default"])
    tells = Tells("t", {"x-data-parallel-host-port": "6.6.6.6:1", "x-a": "1"})
    outcome = decided(Scheduler(fleet, [profile()], handler, [tells]).schedule(request(), fleet.slots()))
    assert outcome.headers == {"x-data-parallel-host-port": "10.0.0.0:8000", "x-a": "1"}
