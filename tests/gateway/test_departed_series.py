"""Series of endpoints that are gone: kept for a while, then taken out; those of endpoints that came back stay."""

from prometheus_client import CollectorRegistry

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.departed_series import KEPT_S, DepartedSeries
from gateway.metrics import Metrics


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.fleet = Fleet(clock=lambda: self.now)
        self.metrics = Metrics(CollectorRegistry())
        self.series = DepartedSeries(self.fleet, self.metrics)
        for number in range(2):
            slot = self.fleet.add(Endpoint(name=str(number), address=self.address(number)))
            assert slot == number
            self.metrics.responses.labels(self.address(number), "finished").inc()
            self.metrics.match_fraction.labels(self.address(number), "best").observe(0.5)
            self.metrics.alarm.labels("no_events", f"{self.address(number)}/0").set(0)

    @staticmethod
    def address(number: int) -> str:
        return f"10.0.0.{number}:8000"

    def gone(self, number: int) -> None:
        slot = self.fleet.slot_of(self.address(number))
        assert slot is not None
        self.fleet.remove(slot)
        self.fleet.release(slot)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.series.tick(self.now)

    def has(self, number: int) -> bool:
        value = self.metrics.registry.get_sample_value
        labels = {"endpoint": self.address(number)}
        found = {
            value("warmroute_responses_total", {**labels, "end": "finished"}) is not None,
            value("warmroute_match_fraction_count", {**labels, "which": "best"}) is not None,
            value("warmroute_alarm", {"alarm": "no_events", "where": f"{self.address(number)}/0"}) is not None,
        }
        assert len(found) == 1
        return found.pop()


def test_series_stay_for_a_while_and_then_go_with_no_other() -> None:
    world = World()
    world.gone(0)
    world.later(KEPT_S - 1)
    assert world.has(0)
    world.later(2)
    assert (world.has(0), world.has(1)) == (False, True)


def test_an_endpoint_that_came_back_goes_on_counting() -> None:
    world = World()
    world.gone(0)
    world.fleet.add(Endpoint(name="new", address=world.address(0)))
    world.later(KEPT_S + 1)
    assert world.has(0)
