import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reply_budget import AGAIN_S, USUAL_RATE, ReplyBudget


def admitted(budget: ReplyBudget, now: float) -> bool:
    if not budget.has_room(now):
        return False
    budget.begin(now)
    return True


def test_nothing_is_admitted_by_a_budget_of_nothing_and_everything_without_one() -> None:
    assert not ReplyBudget(0, 0.0).has_room(0.0)
    unlimited = ReplyBudget(None, 0.0)
    assert all(admitted(unlimited, 0.0) for _ in range(10_000))


def test_a_burst_is_admitted_by_what_its_replies_will_take() -> None:
    budget = ReplyBudget(10 * USUAL_RATE, 0.0)
    assert sum(admitted(budget, 0.0) for _ in range(100)) == 10
    budget.end(0.1)
    assert sum(admitted(budget, 0.1) for _ in range(100)) == 1


@pytest.mark.parametrize("rate", [10.0, 200.0])
def test_the_rate_of_a_reply_is_learnt(rate: float) -> None:
    budget = ReplyBudget(1000.0, 0.0)
    for _ in range(5):
        assert admitted(budget, 0.0)
    now = 0.0
    for _ in range(30):
        for _ in range(int(5 * rate)):
            budget.piece()
        now += 1.0
        budget.end(now)  # one leaves, another one comes
        assert admitted(budget, now)
    assert budget.rate == pytest.approx(rate, rel=0.05)
    while admitted(budget, now):
        pass
    assert budget.reading == int(1000 / budget.rate)


def test_a_quiet_time_teaches_nothing() -> None:
    budget = ReplyBudget(1000.0, 0.0)
    for hour in range(10):
        assert admitted(budget, hour * 3600.0)
        budget.end(hour * 3600.0)
    assert budget.rate == USUAL_RATE


def test_an_estimate_above_the_budget_is_not_believed_for_ever() -> None:
    budget, now = ReplyBudget(2 * USUAL_RATE, 0.0), 0.0
    assert admitted(budget, now)
    for _ in range(1000):
        budget.piece()  # a reply of a moment
    now += 1.0
    budget.end(now)
    assert budget.rate > 2 * USUAL_RATE
    assert not any(admitted(budget, now + n) for n in range(int(AGAIN_S)))
    for _ in range(10):
        now += AGAIN_S
        assert admitted(budget, now)
        assert not admitted(budget, now)  # one, to measure
        for _ in range(20):
            budget.piece()
        now += 1.0
        budget.end(now)
        if budget.rate < USUAL_RATE:
            break
    assert admitted(budget, now)
    assert admitted(budget, now)


def test_a_budget_of_less_than_a_usual_reply_is_used_where_replies_are_slower() -> None:
    budget, now = ReplyBudget(0.8 * USUAL_RATE, 0.0), 0.0
    for _ in range(20):
        if admitted(budget, now):
            for _ in range(10):
                budget.piece()
            now += 1.0
            budget.end(now)
        now += AGAIN_S
    assert sum(admitted(budget, now) for _ in range(10)) >= 2


def test_a_budget_of_nothing_admits_nothing_ever() -> None:
    budget = ReplyBudget(0, 0.0)
    assert not any(budget.has_room(hour * 3600.0) for hour in range(100))


@given(st.lists(st.tuples(st.sampled_from(["admit", "done", "piece"]), st.floats(0, 5)), max_size=200))
def test_what_is_read_never_passes_the_budget_at_the_moment_of_admission(steps: list[tuple[str, float]]) -> None:
    budget, now = ReplyBudget(500.0, 0.0), 0.0
    for what, passed in steps:
        now += passed
        if what == "admit" and admitted(budget, now):
            assert budget.reading * budget.rate <= 500.0 or budget.reading == 1
        elif what == "done" and budget.reading:
            budget.end(now)
        elif what == "piece":
            budget.piece()
        assert budget.reading >= 0
        assert budget.rate >= 0
