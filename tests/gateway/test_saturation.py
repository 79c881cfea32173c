from typing import Any

import pytest

from fleet import plugin
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet, Slots
from fleet.plugin import Picker
from fleet.request import Request, Vector
from gateway.cycle import Decision, Profile, Rejection, Scheduler
from gateway.profile_handlers import SingleProfileHandler
from gateway.saturation import ConcurrencyDetector, SaturationDetector, UtilizationDetector

NOW = 100.0


class First(Picker):
    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        return candidates[:1]


def make_fleet(waiting: list[float], usage: list[float]) -> Fleet:
    fleet = Fleet(clock=lambda: NOW)
    for number in range(len(waiting)):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    fleet.waiting[: len(waiting)] = waiting
    fleet.kv_usage[: len(usage)] = usage
    fleet.scraped_at[:] = NOW
    return fleet


def request(priority: int = 0) -> Request:
    return Request(id="r", model="m", target_model="m", path="/", priority=priority)


def utilization(**parameters: Any) -> UtilizationDetector:
    return UtilizationDetector("u", UtilizationDetector.Parameters(**parameters))


def concurrency(**parameters: Any) -> ConcurrencyDetector:
    return ConcurrencyDetector("c", ConcurrencyDetector.Parameters(**parameters))


def scheduler(fleet: Fleet, detector: SaturationDetector) -> Scheduler:
    handler = SingleProfileHandler("h", plugin.Parameters())
    handler.use_profiles(["default"])
    return Scheduler(fleet, [Profile("default", (), (), First("p", plugin.Parameters()))], handler, detector=detector)


def test_an_empty_fleet_is_full() -> None:
    fleet = make_fleet([], [])
    assert utilization().saturation(fleet.slots(), fleet, NOW) == 1.0
    assert concurrency().saturation(fleet.slots(), fleet, NOW) == 1.0


def test_stale_metrics_count_as_full() -> None:
    fleet = make_fleet([0, 0], [0, 0])
    fleet.scraped_at[0] = NOW - 0.3
    assert utilization().saturation(fleet.slots(), fleet, NOW) == 0.5
    assert utilization(metrics_staleness_threshold=1.0).saturation(fleet.slots(), fleet, NOW) == 0.0


def test_metrics_are_not_stale_where_they_are_not_due_yet() -> None:
    fleet = make_fleet([0, 0], [0, 0])
    fleet.scraped_at[:2] = NOW - 4.0
    fleet.scrape_interval_s = 1.0
    assert utilization().saturation(fleet.slots(), fleet, NOW) == 1.0
    fleet.scrape_interval_s = 2.0  # as in a fleet of 400
    assert utilization().saturation(fleet.slots(), fleet, NOW) == 0.0


def test_saturation_is_the_mean_of_the_fuller_of_queue_and_cache() -> None:
    fleet = make_fleet([5, 0], [0.0, 0.4])
    assert utilization().saturation(fleet.slots(), fleet, NOW) == pytest.approx((1.0 + 0.5) / 2)


def test_the_utilization_filter_keeps_all_where_all_are_full() -> None:
    fleet = make_fleet([5, 4], [0.0, 0.0])
    assert utilization().keep(request(), fleet.slots(), fleet).tolist() == [False, True]
    assert utilization(headroom=0.5).keep(request(), fleet.slots(), fleet).tolist() == [True, True]
    assert utilization(queue_depth_threshold=1).keep(request(), fleet.slots(), fleet).tolist() == [True, True]


def test_the_concurrency_filter_can_keep_nobody() -> None:
    fleet = make_fleet([0, 0], [0, 0])
    fleet.in_flight[:2] = [100, 99]
    assert concurrency().keep(request(), fleet.slots(), fleet).tolist() == [False, True]
    assert concurrency(max_concurrency=10).keep(request(), fleet.slots(), fleet).tolist() == [False, False]


@pytest.mark.parametrize(("mode", "saturation"), [("requests", 0.25), ("tokens", 0.45), ("hybrid", 0.65)])
def test_concurrency_counts_what_it_is_told_to(mode: str, saturation: float) -> None:
    fleet = make_fleet([0, 0], [0, 0])
    fleet.in_flight[:2] = [50, 0]
    fleet.in_flight_tokens[:2] = [100_000, 800_000]
    assert concurrency(concurrency_mode=mode).saturation(fleet.slots(), fleet, NOW) == pytest.approx(saturation)


def test_only_negative_priorities_are_turned_away_from_a_saturated_fleet() -> None:
    fleet = make_fleet([9, 9], [0, 0])
    full = scheduler(fleet, utilization())
    refused = full.schedule(request(-1), fleet.slots())
    assert isinstance(refused, Rejection)
    assert (refused.status, refused.reason) == (429, "rejected-saturated")
    assert isinstance(full.schedule(request(0), fleet.slots()), Decision)
    fleet.waiting[:] = 0
    assert isinstance(full.schedule(request(-1), fleet.slots()), Decision)


def test_a_detector_that_fails_turns_nobody_away() -> None:
    class Fails(SaturationDetector):
        def saturation(self, candidates: Slots, fleet: Fleet, now: float) -> float:
            raise RuntimeError("no")

    fleet = make_fleet([9], [0])
    failing = scheduler(fleet, Fails("f", plugin.Parameters()))
    assert isinstance(failing.schedule(request(-1), fleet.slots()), Decision)
    assert failing.failures == {("f", "saturation"): 1}
