import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.reply_budget import USUAL_RATE, ReplyBudget


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


@given(st.lists(st.tuples(st.sampled_from(["admit", "done", "piece"]), st.floats(0, 5)), max_size=200))
def test_what_is_read_never_passes_the_budget_at_the_moment_of_admission(steps: list[tuple[str, float]]) -> None:
    budget, now = ReplyBudget(500.0, 0.0), 0.0
    for what, passed in steps:
        now += passed
        if what == "admit" and admitted(budget, now):
            assert budget.reading * budget.rate <= 500.0
        elif what == "done" and budget.reading:
            budget.end(now)
        elif what == "piece":
            budget.piece()
        assert budget.reading >= 0
        assert budget.rate >= 0
