"""When to stop asking a tokenization server, and when to ask again. Sans-IO: it is given the time and the outcomes.

    CLOSED --`failures` in a row--> OPEN --`open_s` later--> HALF_OPEN --success--> CLOSED
                                      ^                          |
                                      +---------failure----------+

Rules
1. A failure is a time-out, a broken connection or a 5xx. Any other answer, a 400 included, is a success: the server works.
2. OPEN refuses everything. HALF_OPEN lets one request through at a time and decides by it.
3. A request over the limit of concurrent ones is refused in every state: a queue here would be latency for the client.
"""

import enum


class State(enum.Enum):
    """The numbers are the value of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """One server's breaker. Not thread-safe: it lives on one event loop. Times are monotonic seconds."""

    def __init__(self, *, failures: int = 5, open_s: float = 5.0, max_in_flight: int = 64) -> None:
        self._limit = failures
        self._open_s = open_s
        self._max_in_flight = max_in_flight
        self._failed = 0
        self._opened_at: float | None = None
        self._probing = False
        self.in_flight = 0
        self.opened = 0
        """How often it opened, since start."""

    def state(self, now: float) -> State:
        """The state at `now`."""
        if self._opened_at is None:
            return State.CLOSED
        return State.HALF_OPEN if now - self._opened_at >= self._open_s else State.OPEN

    def refuses(self, now: float) -> str | None:
        """Why a request must not be sent now ("open", "busy"), or None: it is admitted, and `settle` must follow."""
        state = self.state(now)
        if state is State.OPEN or (state is State.HALF_OPEN and self._probing):
            return "open"
        if self.in_flight >= self._max_in_flight:
            return "busy"
        self.in_flight += 1
        self._probing = state is State.HALF_OPEN
        return None

    def settle(self, *, ok: bool | None, now: float) -> None:
        """The end of an admitted request: it worked, it failed, or (None) it was cancelled and says nothing."""
        self.in_flight -= 1
        was_open = self._opened_at is not None
        if was_open:
            self._probing = False
        if ok is None:
            return
        if ok:
            self._failed, self._opened_at = 0, None
            return
        self._failed += 1
        if was_open or self._failed >= self._limit:
            self._opened_at = now
            self.opened += 1
