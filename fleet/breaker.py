"""Circuit breaker: keep requests away from an endpoint that answers 5xx or not at all.

    CLOSED --`failures` in a row--> OPEN --after `open_s`--> HALF_OPEN --one probe succeeds--> CLOSED
                                      ^                         |
                                      +-----probe fails---------+   (open_s doubles, up to `longest_open_s`)

Rules
1. A failure is a connection that failed, broke or timed out (status None), or a 5xx. A 4xx, 429 included, is an answer: the
   endpoint is alive and the request was at fault or the endpoint is busy, which load says better than a breaker.
2. Failures count in a row; any answer that is not one clears them. One bad request among many good ones trips nothing.
3. A draining endpoint refuses new work on purpose: nothing counts while `fleet.draining` is set.
4. In HALF_OPEN one request passes as the probe: `dispatched` closes the door behind it. A probe that was given up before it
   had a result (`abandoned`), or of which nothing is heard for `probe_timeout_s`, lets the next one pass.
5. The result is the column `fleet.tripped`, nothing else. If every endpoint is tripped the caller decides (fail open).
"""

import enum
import logging

import msgspec

from fleet.fleet import Fleet

log = logging.getLogger("fleet.breaker")


class State(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """When to trip and for how long."""

    failures: int = 5
    """Consecutive failures that trip it; 0 switches the breaker off."""
    open_s: float = 2.0
    longest_open_s: float = 60.0
    probe_timeout_s: float = 30.0


class _Circuit:
    __slots__ = ("failures", "open_s", "probe_since", "state", "until")

    def __init__(self, open_s: float) -> None:
        self.state = State.CLOSED
        self.failures = 0
        self.open_s = open_s
        self.until = 0.0
        self.probe_since: float | None = None


class Breaker:
    """One circuit per slot. Sans-IO: the caller reports results and the time."""

    def __init__(self, fleet: Fleet, settings: BreakerSettings | None = None) -> None:
        self._fleet = fleet
        self._settings = settings or BreakerSettings()
        self._circuits: dict[int, _Circuit] = {}
        self.trips = 0
        """Times that a circuit opened."""
        fleet.when_released.append(self._forget)

    def state(self, slot: int) -> State:
        circuit = self._circuits.get(slot)
        return circuit.state if circuit else State.CLOSED

    def report(self, slot: int, status: int | None, now: float) -> None:
        """The result of one request: an HTTP status, or None where the connection failed, broke or timed out."""
        failed = status is None or status >= 500
        circuit = self._circuits.get(slot)
        if not failed:
            if circuit is not None and circuit.state is not State.OPEN:
                if circuit.state is State.HALF_OPEN:
                    log.info("circuit_closed slot=%d endpoint=%s", slot, self._name(slot))
                del self._circuits[slot]
                self._fleet.tripped[slot] = False
            return  # a late answer from before it opened proves nothing: the probe decides
        if self._fleet.draining[slot] or self._settings.failures <= 0 or slot not in self._fleet:
            return
        if circuit is None:
            circuit = self._circuits[slot] = _Circuit(self._settings.open_s)
        if circuit.state is State.OPEN:
            return
        circuit.failures += 1
        if circuit.state is State.HALF_OPEN:
            circuit.open_s = min(circuit.open_s * 2, self._settings.longest_open_s)
            self._open(slot, circuit, status, now)
        elif circuit.failures >= self._settings.failures:
            self._open(slot, circuit, status, now)

    def dispatched(self, slot: int, now: float) -> None:
        """A request goes there. In HALF_OPEN it is the probe, and nobody follows until its result is known."""
        circuit = self._circuits.get(slot)
        if circuit is not None and circuit.state is State.HALF_OPEN:
            circuit.probe_since = now
            self._fleet.tripped[slot] = True

    def abandoned(self, slot: int, dispatched_at: float) -> None:
        """The request that went there at that time was given up by its client, and its result will never be known."""
        circuit = self._circuits.get(slot)
        if circuit is not None and circuit.probe_since == dispatched_at:
            circuit.probe_since = None
            self._fleet.tripped[slot] = False

    def tick(self, now: float) -> None:
        """Let probes pass where it is time. Call it before picking, or a few times a second."""
        for slot, circuit in self._circuits.items():
            if circuit.state is State.OPEN and now >= circuit.until:
                circuit.state, circuit.probe_since = State.HALF_OPEN, None
                self._fleet.tripped[slot] = False
            elif circuit.probe_since is not None and now - circuit.probe_since >= self._settings.probe_timeout_s:
                circuit.probe_since = None
                self._fleet.tripped[slot] = False

    def _open(self, slot: int, circuit: _Circuit, status: int | None, now: float) -> None:
        circuit.state, circuit.until, circuit.probe_since = State.OPEN, now + circuit.open_s, None
        self._fleet.tripped[slot] = True
        self.trips += 1
        log.warning(
            "circuit_opened slot=%d endpoint=%s failures=%d last_status=%s open_s=%g",
            slot,
            self._name(slot),
            circuit.failures,
            status or "connection",
            circuit.open_s,
        )

    def _name(self, slot: int) -> str:
        return self._fleet.endpoint(slot).name

    def _forget(self, slot: int) -> None:
        self._circuits.pop(slot, None)
