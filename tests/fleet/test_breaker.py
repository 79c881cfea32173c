import pytest

from fleet.breaker import Breaker, BreakerSettings, State
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    for number in range(2):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    return fleet


@pytest.fixture
def breaker(fleet: Fleet) -> Breaker:
    return Breaker(fleet, BreakerSettings(failures=3, open_s=2.0, longest_open_s=5.0, probe_timeout_s=10.0))


def fail(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.report(0, 502, now)


def test_client_errors_and_429_never_trip(fleet: Fleet, breaker: Breaker) -> None:
    for status in (400, 404, 413, 429) * 5:
        breaker.report(0, status, 0.0)
    assert breaker.state(0) is State.CLOSED
    assert not fleet.tripped[0]


@pytest.mark.parametrize("status", [500, 503, None])
def test_failures_in_a_row_trip_that_endpoint_only(fleet: Fleet, breaker: Breaker, status: int | None) -> None:
    for _ in range(3):
        assert not fleet.tripped[0]
        breaker.report(0, status, 0.0)
    assert breaker.state(0) is State.OPEN
    assert fleet.available().tolist() == [1]
    assert breaker.trips == 1


def test_an_answer_in_between_clears_the_count(fleet: Fleet, breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.report(0, 429, 0.0)
    fail(breaker, 2)
    assert not fleet.tripped[0]


def test_after_a_while_one_probe_passes_and_its_success_closes(fleet: Fleet, breaker: Breaker) -> None:
    fail(breaker, 3)
    breaker.tick(1.9)
    assert fleet.tripped[0]
    breaker.tick(2.0)
    assert breaker.state(0) is State.HALF_OPEN
    assert not fleet.tripped[0]
    breaker.dispatched(0, 2.1)
    assert fleet.tripped[0]
    breaker.report(0, 200, 2.5)
    assert breaker.state(0) is State.CLOSED
    assert not fleet.tripped[0]


def test_a_failed_probe_opens_again_for_twice_as_long_up_to_the_limit(fleet: Fleet, breaker: Breaker) -> None:
    fail(breaker, 3)
    now = 0.0
    for wait in (2.0, 4.0, 5.0, 5.0):
        breaker.tick(now + wait - 0.1)
        assert breaker.state(0) is State.OPEN
        now += wait
        breaker.tick(now)
        breaker.dispatched(0, now)
        breaker.report(0, None, now)
        assert fleet.tripped[0]


def test_a_probe_that_is_never_heard_of_again_lets_the_next_one_pass(fleet: Fleet, breaker: Breaker) -> None:
    fail(breaker, 3)
    breaker.tick(2.0)
    breaker.dispatched(0, 2.0)
    breaker.tick(11.0)
    assert fleet.tripped[0]
    breaker.tick(12.0)
    assert not fleet.tripped[0]


def test_a_probe_that_its_client_gave_up_lets_the_next_one_pass(fleet: Fleet, breaker: Breaker) -> None:
    fail(breaker, 3)
    breaker.tick(2.0)
    breaker.dispatched(0, 2.5)
    breaker.abandoned(0, 1.0)  # another request's, from before it opened
    assert fleet.tripped[0]
    breaker.abandoned(0, 2.5)
    assert (breaker.state(0), bool(fleet.tripped[0])) == (State.HALF_OPEN, False)
    breaker.dispatched(0, 2.6)
    assert fleet.tripped[0]
    breaker.report(0, 200, 2.7)
    breaker.abandoned(0, 2.6)
    assert breaker.state(0) is State.CLOSED


def test_a_failed_probe_keeps_the_door_shut_for_longer_than_probes_may_take(fleet: Fleet) -> None:
    breaker = Breaker(fleet, BreakerSettings(failures=1, open_s=40.0, longest_open_s=80.0, probe_timeout_s=10.0))
    fail(breaker, 1)
    breaker.tick(40.0)
    breaker.dispatched(0, 40.0)
    breaker.report(0, 502, 41.0)
    breaker.tick(60.0)
    assert (breaker.state(0), bool(fleet.tripped[0])) == (State.OPEN, True)


def test_a_late_success_from_before_it_opened_does_not_close_it(fleet: Fleet, breaker: Breaker) -> None:
    fail(breaker, 3)
    breaker.report(0, 200, 0.5)
    assert fleet.tripped[0]


def test_a_draining_endpoint_may_refuse_without_tripping(fleet: Fleet, breaker: Breaker) -> None:
    fleet.draining[0] = True
    fail(breaker, 10)
    assert not fleet.tripped[0]


def test_reports_about_an_endpoint_that_left_are_ignored(fleet: Fleet, breaker: Breaker) -> None:
    fleet.remove(0)
    fail(breaker, 5)
    fleet.release(0)
    fail(breaker, 5)
    assert fleet.add(Endpoint(name="next", address="10.0.0.9:8000")) == 0
    assert breaker.state(0) is State.CLOSED


def test_zero_failures_switches_it_off(fleet: Fleet) -> None:
    fail(Breaker(fleet, BreakerSettings(failures=0)), 10)
    assert not fleet.tripped[0]
