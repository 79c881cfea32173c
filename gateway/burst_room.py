"""Where requests wait for their burst's window to end: futures and a timer around `gateway.burst_window`.

A request is held only if it can matter: it has a full block, at least two endpoints could compute it, and something in its
profile reads the producer. When the window ends its prompts are placed jointly over the endpoints that are still there, and
each goes on through the ordinary cycle with a full match on the endpoint it was given. Whatever fails here costs that match,
never the request.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from fleet.fleet import Fleet, Slots
from fleet.request import Match
from gateway.burst_window import BurstWindow, Closed
from gateway.cycle import Run
from gateway.joint_placement import Loads, Placed, Prompt, Rules, Why, place
from gateway.logs import RateLimit
from gateway.matching import Keys
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

FAILED = "failed"
CANCELLED = "cancelled"


class Assigned(msgspec.Struct, frozen=True, kw_only=True):
    """What a window made of one request."""

    slot: int | None
    """None: nothing is said about it."""
    address: str
    rank: int
    """Who the slot was; a slot may be given to another endpoint later."""
    why: str
    """A word of `joint_placement.Why`, or `failed`."""
    group: int
    together: int
    """See `joint_placement.Placed`."""
    window: int
    """Requests that were placed together with it, itself included."""
    waited_s: float


def _assigned(placed: Placed, who: tuple[str, int], window: int, waited_s: float) -> Assigned:
    return Assigned(
        slot=placed.slot,
        address=who[0],
        rank=who[1],
        why=placed.why,
        group=placed.group,
        together=placed.together,
        window=window,
        waited_s=waited_s,
    )


Who = Mapping[int, tuple[str, int]]
"""Slot -> address and rank, of one generation of the fleet."""


class _Guest:
    """One request that waits."""

    __slots__ = ("arrived", "candidates", "done", "keys", "tokens", "who")

    def __init__(self, keys: Sequence[int], tokens: int, candidates: Slots, who: Who, arrived: float) -> None:
        self.keys, self.tokens, self.candidates, self.who, self.arrived = keys, tokens, candidates, who, arrived
        self.done: asyncio.Future[Assigned] = asyncio.get_running_loop().create_future()


class BurstRoom:
    """The windows of one burst producer. The event loop's thread owns it; make a new one to reconfigure, and close this."""

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        metrics: Metrics,
        *,
        rules: Rules,
        window_s: float,
        most: int | None = None,
        max_blocks: int | None = None,
        readers: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most`: requests of one window. `max_blocks`: how much of a prompt is looked at. `readers`: names of the plugins
        that read this producer's match."""
        self.name, self.rules, self.readers = name, rules, readers
        self._max_blocks = max_blocks
        self._fleet, self._metrics, self._clock = fleet, metrics, clock
        self._window = BurstWindow[_Guest](window_s, most)
        self._timer: asyncio.TimerHandle | None = None
        self._who: Who = {}
        self._who_of = -1
        self._quiet = RateLimit()

    @property
    def block_tokens(self) -> int:
        return self.rules.block_tokens

    def holds(self, keys: Sequence[int], run: Run) -> bool:
        """Whether a request waits here. `run`: the profile's run that would choose who computes its prompt."""
        if self._window.shut_for_good or not keys or len(run.candidates) < 2:
            return False
        return any(scorer in self.readers for scorer, _, _ in run.scores) or any(
            filter_ in self.readers for filter_, _, _ in run.filtered
        )

    async def assigned(self, keys: Sequence[int], tokens: int, candidates: Slots) -> Assigned:
        """Wait for the window to end, at most as long as it is; not at all after `close`. Cancelling takes the request out."""
        if self._window.shut_for_good:  # since `holds` was asked
            return _assigned(Placed(None, Why.ALONE), ("", 0), 1, 0.0)
        guest = _Guest(keys[: self._max_blocks], tokens, np.sort(candidates), self._names(), self._clock())
        outcome = CANCELLED
        self._metrics.burst_waiting.inc()
        try:
            if (closed := self._window.join(guest, guest.arrived)) is not None:
                self._end(closed)
            elif self._timer is None:
                self._arm()
            assigned = await guest.done
            outcome = assigned.why
            return assigned
        finally:
            self._window.leave(guest)
            if not len(self._window):
                self._disarm()
            self._metrics.burst_waiting.dec()
            self._metrics.burst_wait.labels(outcome).observe(self._clock() - guest.arrived)

    def match(self, keys: Sequence[int], assigned: Assigned | None) -> Match:
        """A full match on the assigned endpoint, while it is still the same one, and none elsewhere."""
        keys = keys[: self._max_blocks]
        tokens, total = np.zeros(self._fleet.capacity), len(keys) * self.block_tokens
        if assigned is not None and assigned.slot is not None and assigned.slot in self._fleet:
            endpoint = self._fleet.endpoint(assigned.slot)
            if (endpoint.address, endpoint.rank) == (assigned.address, assigned.rank):
                tokens[assigned.slot] = total
        return Match(
            tokens=tokens, weighted_tokens=tokens, total_tokens=total, block_tokens=self.block_tokens, keys=keys
        )

    def close(self) -> None:
        """The gateway stops, or another configuration is in force: who waits is placed and goes on, and nobody waits again."""
        if (closed := self._window.shut()) is not None:
            self._end(closed)
        self._disarm()

    # The inside

    def _arm(self) -> None:
        if (ends_at := self._window.ends_at) is not None:
            nobodys = contextvars.Context()  # the timer belongs to all who wait, not to the request that came first
            after = max(0.0, ends_at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(after, self._tick, context=nobodys)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        if (closed := self._window.due(self._clock())) is not None:
            self._end(closed)
        else:
            self._arm()

    def _end(self, closed: Closed[_Guest]) -> None:
        self._disarm()
        # Cancelled in this very moment: its `assigned` has not run since, and it is nobody's company.
        guests = [guest for guest in closed.guests if not guest.done.done()]
        if not guests:
            return
        self._metrics.burst_window.labels(closed.why).observe(len(guests))
        now = self._clock()
        failed = False
        try:
            placed = self._place(guests)
        except Exception:  # nobody stays for an error of ours
            self._metrics.plugin_errors.labels(self.name).inc()
            if self._quiet.allows(FAILED, now):
                log.exception("burst_failed producer=%s waiting=%d action=send_all", self.name, len(guests))
            failed, placed = True, [Placed(None, Why.ALONE)] * len(guests)
        for guest, answer in zip(guests, placed, strict=True):
            if answer.slot is not None:
                self._metrics.burst_group.labels("alike").observe(answer.group)
                self._metrics.burst_group.labels("together").observe(answer.together)
            who = ("", 0) if answer.slot is None else guest.who[answer.slot]
            assigned = _assigned(answer, who, len(guests), now - guest.arrived)
            guest.done.set_result(msgspec.structs.replace(assigned, why=FAILED) if failed else assigned)

    def _place(self, guests: Sequence[_Guest]) -> list[Placed]:
        fleet = self._fleet
        left: dict[tuple[int, bytes], Slots] = {}
        prompts = []
        for guest in guests:
            same = (id(guest.who), guest.candidates.tobytes())
            if same not in left:
                left[same] = self._left(guest)
            prompts.append(Prompt(guest.keys, guest.tokens, left[same]))
        level = fleet.in_flight_tokens if self.rules.by_tokens else fleet.in_flight
        return place(prompts, Loads(level, fleet.chosen_at), self.rules)

    def _left(self, guest: _Guest) -> Slots:
        """Its candidates that are still there and take requests; those that do not, if there is no other."""
        fleet, candidates = self._fleet, guest.candidates
        if guest.who is not self._names():
            who = self._names()
            candidates = candidates[np.array([who.get(slot) == guest.who[slot] for slot in candidates.tolist()])]
        taking = fleet.healthy[candidates] & ~fleet.tripped[candidates] & ~fleet.draining[candidates]
        return candidates[taking] if taking.any() else candidates

    def _names(self) -> Who:
        fleet = self._fleet
        if self._who_of != fleet.generation:
            self._who_of = fleet.generation
            endpoints = {slot: fleet.endpoint(slot) for slot in fleet.slots().tolist()}
            self._who = {slot: (endpoint.address, endpoint.rank) for slot, endpoint in endpoints.items()}
        return self._who


async def hold(rooms: Mapping[str, BurstRoom], keys: Keys, run: Run) -> dict[str, Assigned]:
    """What the windows say that hold this request, by producer; at once where none does. `run`: see `BurstRoom.holds`.

    The windows of several producers run side by side: nobody waits for their sum.
    """
    chains = {name: keys.by_block.get(room.block_tokens, ()) for name, room in rooms.items()}
    names = [name for name, room in rooms.items() if room.holds(chains[name], run)]
    waits = [rooms[name].assigned(chains[name], keys.prompt_tokens, run.candidates) for name in names]
    if len(waits) == 1:  # no task for what is the rule
        return {names[0]: await waits[0]}
    return dict(zip(names, await asyncio.gather(*waits), strict=True))
