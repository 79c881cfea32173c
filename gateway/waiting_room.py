"""Where requests wait for the router queue's word: futures and timers around `gateway.work_queue`.

A request is looked at once and goes at once, unless the queue says that it must wait. While something waits the queue is
asked again after every arrival, first token and finish, and every 50 ms; what may go is looked at anew, reserved, and its
`decide` returns. Between a look and its reservation nothing else runs.
"""

import asyncio
import contextvars
import logging
import math
import time
from collections.abc import Callable, Mapping

import msgspec

from fleet.fleet import Fleet
from fleet.request import Request
from gateway.burst_room import Assigned
from gateway.cycle import Decision, Rejection, Run
from gateway.extproc.decision import (
    ABORTED_UNSENT,
    SATURATED,
    SHUTTING_DOWN,
    TTL_EXPIRED,
    Decided,
    Rejected,
)
from gateway.logs import RateLimit
from gateway.matching import Found
from gateway.metrics import Metrics
from gateway.work_queue import Place, Waiting, WorkQueue

log = logging.getLogger(__name__)

PULSE_S = 0.05
REST = 4
"""After a scan the queue rests for so many times as long: a long queue before a large fleet takes a fifth of the loop."""
LOOKS_PER_PULSE = 16
"""Requests that are looked at anew per pulse, whether they can go or not: index and health change under them."""
EVICTED = "evicted-queue-pressure"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request would go now, before anything has been written."""

    request: Request
    outcome: Decision | Rejection
    refused: Rejected | None = None
    """The answer where it goes nowhere, now or later."""
    found: Found | None = None
    """What the index said."""
    assigned: Mapping[str, Assigned] = {}
    """Where a window of a burst producer wants it, by producer."""

    def turned_away(self, rejected: Rejected) -> Rejection:
        """The outcome of a request that is answered so, whatever it could have had."""
        return Rejection(
            status=rejected.status,
            reason=rejected.reason,
            message=rejected.message,
            runs=self.outcome.runs,
            verdicts=self.outcome.verdicts,
        )


Answer = Callable[[Look], Decided | Rejected]
Refuse = Callable[[Rejected], Decided | Rejected]
"""Told what the queue says to somebody it turns away; returns what the client gets. It must not raise."""


def _as_it_is(rejected: Rejected) -> Decided | Rejected:
    return rejected


def prompt_run(decision: Decision) -> Run:
    """The run that chose who computes the prompt."""
    if decision.prefill is None:
        return decision.runs[decision.primary]
    return next(it for it in decision.runs.values() if len(it.picked) and it.picked[0] == decision.prefill)


class _Guest:
    """One `decide` that waits."""

    __slots__ = ("_answer", "_context", "_look", "_refuse", "arrived", "done", "waiting")

    def __init__(self, look: Callable[[], Look], answer: Answer, refuse: Refuse) -> None:
        self._look, self._answer, self._refuse = look, answer, refuse
        self._context = contextvars.copy_context()  # spans belong to this request, whoever makes it leave
        self.done: asyncio.Future[Decided | Rejected] = asyncio.get_running_loop().create_future()
        self.waiting: Waiting | None = None
        self.arrived: float | None = None

    def look(self) -> Look:
        return self._context.run(self._look)

    def answer(self, look: Look) -> Decided | Rejected:
        return self._context.run(self._answer, look)

    def refuse(self, rejected: Rejected) -> Decided | Rejected:
        return self._context.run(self._refuse, rejected)


class WaitingRoom:
    """Between a look and its reservation. With `queue` None nobody waits; set another one to reconfigure."""

    def __init__(self, fleet: Fleet, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._fleet, self._metrics, self._clock = fleet, metrics, clock
        self._queue: WorkQueue | None = None
        self._guests: dict[Waiting, _Guest] = {}
        self._scan_due = False
        self._rested_at = 0.0  # loop time before which the next scan need not be
        self._pulse: asyncio.Task[None] | None = None
        self._closing = False
        self._quiet = RateLimit()
        metrics.queue_waiting.set_function(lambda: float(len(self._guests)))

    @property
    def queue(self) -> WorkQueue | None:
        return self._queue

    def use(self, queue: WorkQueue | None) -> None:
        """Reconfigure. Who waits goes on waiting under the new rules; without a queue everybody goes."""
        guests = list(self._guests.values())
        self._guests.clear()
        self._queue = queue
        for guest in guests:
            guest.waiting = None
            if guest.done.done():  # cancelled, and its decide has not run since
                continue
            try:
                self._enter(guest, guest.look())
            except Exception as error:  # noqa: BLE001 - it is this request's own, and its decide raises it
                self._leave(guest)
                guest.done.set_exception(error)
        if guests:
            self._scan()

    async def admit(self, look: Callable[[], Look], answer: Answer, refuse: Refuse = _as_it_is) -> Decided | Rejected:
        """The request's answer, as soon as it may go. Cancelling takes it out, and back what was reserved for it."""
        seen = look()
        place, queue = self._place(seen), self._queue
        if place is None or queue is None or (not self._guests and queue.admits(place, self._clock())):
            return answer(seen)
        guest = _Guest(look, answer, refuse)
        started = self._clock()
        outcome = "cancelled"
        try:
            self._enter(guest, seen)
            self.freed()  # it may be its turn at once
            decided = await guest.done
            outcome = "sent" if isinstance(decided, Decided) else decided.reason or str(decided.status)
            return decided
        except asyncio.CancelledError:
            if guest.done.done() and not guest.done.cancelled() and guest.done.exception() is None:
                _take_back(guest.done.result())
            raise
        finally:
            self._leave(guest)
            self._metrics.queue_wait.labels(outcome).observe(self._clock() - started)

    def freed(self) -> None:
        """A first token was seen, or a request has ended: somebody may have room now."""
        if self._guests and not self._scan_due:
            self._scan_due = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time(), self._rested_at), self._scan)

    def close(self) -> None:
        """The gateway shuts down: who waits is turned away, and so is from now on who would have to."""
        self._closing = True
        for waiting in list(self._guests):
            self._turn_away(waiting, self._shutting_down())

    # The inside

    @staticmethod
    def _place(look: Look) -> Place | None:
        """What the queue wants to know; None for a request that never waits: refused, or of unknown work."""
        outcome = look.outcome
        if look.refused is not None or isinstance(outcome, Rejection) or look.request.prompt_tokens <= 0:
            return None
        decode = slot = outcome.slots[0]
        if outcome.prefill is not None:
            slot = outcome.prefill
        return Place(request=look.request, candidates=prompt_run(outcome).candidates, slot=slot, decode=decode)

    def _enter(self, guest: _Guest, seen: Look) -> None:
        place, queue = self._place(seen), self._queue
        if place is None or queue is None:
            guest.done.set_result(guest.answer(seen))
            return
        if self._closing:
            guest.done.set_result(guest.refuse(self._shutting_down()))
            return
        now = self._clock()
        guest.arrived = now if guest.arrived is None else guest.arrived
        guest.waiting, worst = queue.enter(place, now, guest.arrived)
        self._guests[guest.waiting] = guest
        if worst is not None:
            reason = SATURATED if worst is guest.waiting else EVICTED
            self._turn_away(worst, self._rejected("the router queue is full", reason))
        if self._pulse is None or self._pulse.done():
            nobodys = contextvars.Context()  # the pulse outlives the request that started it
            self._pulse = asyncio.create_task(self._beat(), name="queue-pulse", context=nobodys)

    def _leave(self, guest: _Guest) -> None:
        if guest.waiting is not None:
            self._guests.pop(guest.waiting, None)
            if self._queue is not None:
                self._queue.leave(guest.waiting)

    def _scan(self) -> None:
        """Send everybody who can go now, each by a look of its own."""
        self._scan_due = False
        queue, passed = self._queue, set[Waiting]()
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            while queue is not None and (waiting := queue.next(self._clock(), passed)) is not None:
                if not self._try(queue, waiting):
                    passed.add(waiting)
        except Exception:
            # A queue that cannot say who may go must not keep anybody: from here on it is as if there were none.
            log.exception("queue_failed waiting=%d action=send_all", len(self._guests))
            self._metrics.plugin_errors.labels("expected-work-queue").inc()
            self.use(None)
        self._rested_at = loop.time() + REST * (loop.time() - started)

    def _try(self, queue: WorkQueue, waiting: Waiting) -> bool:
        """Look at one again; True where it has left."""
        guest = self._guests[waiting]
        if guest.done.done():  # cancelled, and its decide has not run since
            self._leave(guest)
            return True
        try:
            self._fleet.kept = queue.kept_from(waiting)
            try:
                seen = guest.look()
            finally:
                self._fleet.kept = None
            place, now = self._place(seen), self._clock()
            if place is not None and not queue.admits(place, now):
                queue.looked(waiting, place, now)
                return False
            answer = guest.answer(seen)
        except Exception as error:  # noqa: BLE001 - it is this request's own, and its decide raises it
            self._leave(guest)
            guest.done.set_exception(error)
            return True
        if place is not None and isinstance(answer, Decided):
            queue.sent(waiting, place)
        self._leave(guest)
        guest.done.set_result(answer)
        return True

    async def _beat(self) -> None:
        while self._guests:
            await asyncio.sleep(PULSE_S)
            if (queue := self._queue) is None:
                return
            for waiting in queue.expired(self._clock()):
                message = f"no endpoint had room within {queue.limits.max_wait_s:g} s"
                self._turn_away(waiting, self._rejected(message, TTL_EXPIRED))
            self._scan()
            for waiting in queue.longest_unseen(LOOKS_PER_PULSE):
                if waiting in self._guests:
                    self._try(queue, waiting)

    def _turn_away(self, waiting: Waiting, answer: Rejected) -> None:
        guest = self._guests[waiting]
        self._leave(guest)
        if not guest.done.done():
            guest.done.set_result(guest.refuse(answer))
        if self._quiet.allows(str(answer.reason), self._clock()):
            fields = (waiting.place.request.id, answer.reason, len(self._guests))
            log.warning("queue_rejected request_id=%s reason=%s waiting=%d", *fields)

    def _rejected(self, message: str, reason: str) -> Rejected:
        after = self._queue.retry_after_s(self._clock()) if self._queue else 1.0
        return Rejected(status=429, message=message, reason=reason, headers={"retry-after": str(math.ceil(after))})

    def _shutting_down(self) -> Rejected:
        return Rejected(
            status=503, message="the router is shutting down", reason=SHUTTING_DOWN, headers={"retry-after": "1"}
        )


def _take_back(answer: Decided | Rejected) -> None:
    """Nobody takes this answer: whatever it reserved is released."""
    if isinstance(answer, Decided) and answer.observer is not None:
        answer.observer.aborted(ABORTED_UNSENT)
