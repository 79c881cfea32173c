"""The breaker before the tokenization server, as a machine without sockets or clocks."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenization.breaker import Breaker, State


def fail(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        assert breaker.refuses(now) is None
        breaker.settle(ok=False, now=now)


def test_it_opens_after_failures_in_a_row_and_refuses_everything() -> None:
    breaker = Breaker(failures=3, open_s=5.0)
    fail(breaker, 2)
    assert breaker.state(0.0) is State.CLOSED
    fail(breaker, 1)
    assert breaker.state(0.0) is State.OPEN
    assert breaker.refuses(4.9) == "open"


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = Breaker(failures=3)
    fail(breaker, 2)
    assert breaker.refuses(0.0) is None
    breaker.settle(ok=True, now=0.0)
    fail(breaker, 2)
    assert breaker.state(0.0) is State.CLOSED


def test_after_a_while_one_request_decides() -> None:
    breaker = Breaker(failures=1, open_s=5.0)
    fail(breaker, 1)
    assert breaker.refuses(5.0) is None
    assert breaker.refuses(5.0) == "open"
    breaker.settle(ok=False, now=5.0)
    assert breaker.state(9.9) is State.OPEN
    assert breaker.refuses(10.0) is None
    breaker.settle(ok=True, now=10.0)
    assert breaker.state(10.0) is State.CLOSED
    assert breaker.opened == 2


def test_a_cancelled_probe_lets_the_next_one_through() -> None:
    breaker = Breaker(failures=1, open_s=5.0)
    fail(breaker, 1)
    assert breaker.refuses(5.0) is None
    breaker.settle(ok=None, now=5.0)
    assert breaker.state(5.0) is State.HALF_OPEN
    assert breaker.refuses(5.0) is None


def test_more_than_the_limit_at_once_is_refused_not_queued() -> None:
    breaker = Breaker(max_in_flight=2)
    assert [breaker.refuses(0.0) for _ in range(3)] == [None, None, "busy"]
    breaker.settle(ok=True, now=0.0)
    assert breaker.refuses(0.0) is None


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, it never wedges and never lets two probes through."""

    def __init__(self) -> None:
        super().__init__()
        self.breaker = Breaker(failures=2, open_s=3.0, max_in_flight=3)
        self.now = 0.0
        self.out = 0

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def ask(self) -> None:
        half_open = self.breaker.state(self.now) is State.HALF_OPEN
        if self.breaker.refuses(self.now) is None:
            self.out += 1
            if half_open:
                assert self.breaker.refuses(self.now) is not None

    @precondition(lambda self: self.out > 0)
    @rule(ok=st.sampled_from([True, False, None]))
    def end(self, ok: bool | None) -> None:
        self.out -= 1
        self.breaker.settle(ok=ok, now=self.now)

    @invariant()
    def counts_agree(self) -> None:
        assert self.breaker.in_flight == self.out <= 3

    def teardown(self) -> None:
        for _ in range(self.out):
            self.breaker.settle(ok=True, now=self.now)
        assert self.breaker.refuses(self.now + 10) is None


TestBreakerMachine = BreakerMachine.TestCase
