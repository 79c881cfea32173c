"""The window of a burst producer: who is in it when it ends, and when that is."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.burst_window import BurstWindow, Closed, Ended


def test_a_window_that_is_shut_takes_nobody() -> None:
    window = BurstWindow[str](0.1, None)
    window.join("a", 0.0)
    assert window.shut() == Closed(["a"], Ended.CLOSED)
    assert window.shut() is None
    assert window.shut_for_good
    with pytest.raises(RuntimeError, match="shut_for_good"):
        window.join("b", 0.0)


def test_who_left_is_not_in_it_and_the_last_to_leave_ends_it() -> None:
    window = BurstWindow[str](0.1, None)
    window.join("a", 0.0)
    window.join("b", 0.01)
    window.leave("a")
    assert window.ends_at == 0.1, "whoever stays waits no longer for it"
    window.leave("b")
    assert window.ends_at is None
    assert window.due(1.0) is None
    window.join("c", 5.0)
    assert window.ends_at == 5.1
    window.leave("a")  # of an earlier window
    assert window.due(5.1) == Closed(["c"], Ended.TIME)


def test_a_window_ends_by_its_first_guests_time() -> None:
    window = BurstWindow[str](0.1, None)
    window.join("a", 0.0)
    window.join("b", 0.09)
    assert window.due(0.099) is None
    assert window.due(0.1) == Closed(["a", "b"], Ended.TIME)
    assert window.due(0.1) is None


def test_a_full_window_ends_at_once_and_the_next_guest_opens_another() -> None:
    window = BurstWindow[str](0.1, 2)
    assert window.join("a", 0.0) is None
    assert window.join("b", 0.05) == Closed(["a", "b"], Ended.FULL)
    assert window.join("c", 0.06) is None
    assert window.ends_at == pytest.approx(0.16)


class Windows(RuleBasedStateMachine):
    """Against a list of (guest, arrival): every guest gets out once, in order, never later than its time."""

    def __init__(self) -> None:
        super().__init__()
        self.window = BurstWindow[int](10, 4)
        self.now, self.next = 0, 0
        self.inside: list[int] = []
        self.since = 0

    def ended(self, closed: Closed[int] | None, why: Ended) -> None:
        assert closed == Closed(self.inside, why)
        self.inside = []

    @rule()
    def join(self) -> None:
        if not self.inside:
            self.since = self.now
        self.inside.append(self.next)
        closed = self.window.join(self.next, self.now)
        self.next += 1
        if len(self.inside) == 4:
            self.ended(closed, Ended.FULL)
        else:
            assert closed is None

    @rule(which=st.integers(0, 20))
    def leave(self, which: int) -> None:
        self.window.leave(which)
        if which in self.inside:
            self.inside.remove(which)

    @rule(passed=st.integers(1, 12))
    def wait(self, passed: int) -> None:
        self.now += passed
        closed = self.window.due(self.now)
        if self.inside and self.now >= self.since + 10:
            self.ended(closed, Ended.TIME)
        else:
            assert closed is None

    @invariant()
    def nobody_is_lost(self) -> None:
        assert len(self.window) == len(self.inside)
        assert self.window.ends_at == (self.since + 10 if self.inside else None)


TestWindows = Windows.TestCase
TestWindows.settings = settings(max_examples=60, deadline=None)
