"""Self-watching in the running gateway: feeds the rules of `self_watch`, and turns what they say into metrics and log lines."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from prometheus_client import Gauge

from fleet.fleet import Fleet
from gateway.event_streams import EventStreams
from gateway.logs import RateLimit
from gateway.picture_metrics import StreamState
from gateway.self_watch import Alarm, Change, Limits, SelfWatch, Stream

log = logging.getLogger(__name__)

UNLABELLED = "unlabelled"
"""The role of endpoints that carry no role label."""
SAY_AGAIN_S = 300.0
"""An alarm that stays on is logged again after so long; one that flickers no more often than this either."""


class Watching:
    """Stands between the truth path and the event streams (it is an `Accuracy`), and hears of every routed request.

    `precise`: whether events are used at all; without them silence is no alarm. The event loop's thread owns it.
    """

    def __init__(
        self,
        fleet: Fleet,
        streams: EventStreams,
        gauge: Gauge,
        block_tokens: Callable[[int], int],
        *,
        precise: bool,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = SelfWatch(limits)
        self._fleet, self._streams, self._gauge = fleet, streams, gauge
        self._block_tokens = block_tokens
        self._precise = precise
        self._clock = clock
        self._quiet = RateLimit(SAY_AGAIN_S)
        self._dead: dict[str, None] = {}
        self._shown: set[tuple[Alarm, str]] = set()

    # --- what happens

    def routed(self, slot: int, prompt_tokens: int, best: int, chosen: int) -> None:
        """A request whose prompt was matched goes to `slot`."""
        where, role = self._place(slot)
        self.rules.routed(where, role, prompt_tokens, best, chosen, self._block_tokens(slot), self._clock())

    def confirmed(
        self, slot: int, keys: Sequence[int], prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """See `gateway.response_path.Accuracy`."""
        where, role = self._place(slot)
        block = self._block_tokens(slot)
        self.rules.reported(where, role, prompt_tokens, predicted, cached, block, self._clock())
        self._streams.confirmed(slot, keys, prompt_tokens, predicted, cached, decided_at)

    def ended(self, task: "asyncio.Task[None]") -> None:
        """A background task is done. Being cancelled, or simply through, is no alarm."""
        if not task.cancelled() and task.exception() is not None:
            self._dead[task.get_name()] = None
            self.tick()  # the task that looks may be the one that died

    # --- once a second

    def tick(self) -> None:
        now = self._clock()
        seen = [] if not self._precise else [self._stream(state) for state in self._streams.states()]
        changes = self.rules.look(seen, [*self._dead, *self._streams.dead_threads()], now)
        for change in changes:
            self._say(change, now)
        for (alarm, where), detail in self.rules.alarms.items():
            if self._quiet.allows(f"{alarm} {where}", now):
                log.error("alarm alarm=%s where=%s detail=%r", alarm, where, detail)
        self._show()

    def alarms(self) -> list[dict[str, str]]:
        """What is on now, for the admin port."""
        return [
            {"alarm": alarm, "where": where, "detail": detail} for (alarm, where), detail in self.rules.alarms.items()
        ]

    def _say(self, change: Change, now: float) -> None:
        if not change.on:
            log.info("alarm_over alarm=%s where=%s", change.alarm, change.where)

    def _show(self) -> None:
        on = set(self.rules.alarms)
        for alarm, where in on - self._shown:
            self._gauge.labels(alarm, where).set(1)
        for alarm, where in self._shown - on:
            self._gauge.labels(alarm, where).set(0)
        self._shown = on

    def _place(self, slot: int) -> tuple[str, str]:
        endpoint = self._fleet.endpoint(slot)
        return f"{endpoint.address}/{endpoint.rank}", endpoint.role.value if endpoint.role else UNLABELLED

    def _stream(self, state: StreamState) -> Stream:
        slot = self._fleet.slot_of(state.endpoint, state.rank)
        where, role = self._place(slot) if slot is not None else (f"{state.endpoint}/{state.rank}", UNLABELLED)
        return Stream(where=where, role=role, events=sum(state.events.values()), keys=state.keys)
