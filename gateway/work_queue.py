# The router queue: prompts wait here while the endpoint that suits them best has no room for them.
#
#   enter --> waiting --next: an endpoint has room, it is its turn--> sent
#               |  \--expired: waited for too long-------------------> turned away
#               |---full, and somebody else's claim is better--------> turned away
#               \---leave: the client went away
#
# Why: in an engine's own queue a prompt that is too large for the memory left blocks all behind it, and the router cannot
# change its mind about what it has sent. Here what does not fit lets the next one pass, and every prompt is placed
# by what is cached and owed at the moment it leaves, not when it came.
#
# Rules
# 1. An endpoint is OPEN for the next prompt while it owes less than `open_s` seconds of prefill, or no prompt of ours.
# 2. It has ROOM for a prompt if its new tokens and its expected reply fit into `kv_limit` of the KV cache beside everything
#    of ours in flight there. An endpoint with nothing of ours in flight has room for anything, one whose capacity is
#    unknown too.
# 3. A prompt is scored against all its candidates, and goes only to its own best one: open, with room, or not at all. But where
#    that one is not open, what waits for it before this prompt is owed there, too; if that makes an endpoint better that is
#    open, has room, and that nobody waits for, the prompt goes there. (Else a beginning that all prompts share is computed
#    once, and one endpoint serves them while the others idle.)
# 4. Of those that can go: the highest priority first, then the flow that has been served least (start-time fair queueing
#    over seconds of prefill), then by `order`: the oldest (backfill), or the least work less `alpha` seconds for every
#    second waited (shortest).
# 5. When the queue is full, the newest of the lowest priority's largest flow is turned away, which may be who just came.
# 6. What is remembered of a prompt (its `Place`) is an estimate to find out cheaply who can go. Before it is sent it is
#    looked at anew, index and all, and `admits` has the last word.
# 7. No clock, no socket, nothing is sent here: time is passed in, and the caller reserves what it was told to send before
#    it asks again.
"""The policy of the router queue, without waiting, clocks or sockets."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.request import Request
from fleet.work import cached_tokens
from scorers.expected_work_scorer import ExpectedWorkScorer, ties

Order = Literal["backfill", "shortest"]
Grid = NDArray[Any]
"""Requests by slots."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The constants of the policy."""

    open_s: float = 0.3
    kv_limit: float = 0.9
    order: Order = "backfill"
    alpha: float = 0.05
    max_requests: int = 1024
    max_wait_s: float = 30.0
    expected_output: float = 400.0
    """Tokens of a reply whose length nobody knows."""
    fairness: bool = True


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request would go, by one look at index, books and profiles."""

    request: Request
    candidates: Slots
    """Endpoints that may compute its prompt."""
    slot: int
    """The one of them that would."""
    decode: int
    """The one that would decode; mostly the same."""


class Waiting:
    """One request in the queue."""

    __slots__ = (
        *("arrived", "cached", "flow", "generation", "keys", "looked", "own", "place", "priority", "uncached"),
    )

    def __init__(self, place: Place, arrived: float) -> None:
        self.flow, self.priority = place.request.fairness_id, place.request.priority
        self.arrived = self.looked = arrived
        self.place = place
        self.generation = -1  # the fleet's at the last look
        self.keys: Sequence[int] = ()
        # Per slot; own work is infinite where the request cannot go.
        self.cached: Vector = np.empty(0)
        self.uncached: Vector = np.empty(0)
        self.own: Vector = np.empty(0)


class _Table:
    """What is remembered of all who wait, as arrays of requests by slots: a scan is then a few operations."""

    def __init__(self, waiting: Iterable[Waiting], reply: Callable[[Request], float]) -> None:
        self.waiting = list(waiting)
        self.models = [it.place.request.target_model for it in self.waiting]
        self.own = np.stack([it.own for it in self.waiting])
        self.barred = np.isinf(self.own)
        """Where a request cannot go."""
        replies = np.array([reply(it.place.request) for it in self.waiting])
        self.need = np.stack([it.uncached for it in self.waiting]) + replies[:, np.newaxis]
        """Tokens of KV cache."""
        self.kept: dict[Waiting, Mask] = {}
        """What is kept from those who do not go where they are best."""


class WorkQueue:
    """Who waits, and who goes next. The event loop's thread owns it."""

    def __init__(self, fleet: Fleet, scorer: ExpectedWorkScorer, limits: Limits) -> None:
        self.limits, self.scorer = limits, scorer
        self._fleet = fleet
        self._waiting: dict[Waiting, None] = {}  # in order of arrival
        self._table: _Table | None = None  # the same as arrays; None: somebody came, left or was looked at since
        self._generation = -1  # of the fleet, when everybody had been looked at
        self._served: dict[str, float] = {}  # flow -> the virtual time at which its next prompt starts
        self._virtual = 0.0  # the start of the prompt sent last

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, waiting: Waiting) -> bool:
        return waiting in self._waiting

    def all(self) -> list[Waiting]:
        """Everybody who waits, in order of arrival."""
        return list(self._waiting)

    # May it go?

    def admits(self, place: Place, now: float) -> bool:
        """Whether a request may be sent to where this look found its place (rules 1 and 2)."""
        request, slot, decode = place.request, place.slot, place.decode
        if self._fleet.awaiting[slot] > 0:
            owed = self.scorer.backlog(request.target_model, np.array([slot]), self._fleet, now)
            if owed[0] >= self.limits.open_s:
                return False
        return self._has_room(request, decode, self._reply(request)) and (
            slot == decode or self._has_room(request, slot, 0.0)  # a prefill leg writes no reply
        )

    def _has_room(self, request: Request, slot: int, reply: float) -> bool:
        if self._fleet.in_flight[slot] <= 0 or self._fleet.kv_capacity_tokens[slot] <= 0:
            return True
        here = np.array([slot])
        return bool(request.prompt_tokens - self._cached(request, here)[0] + reply <= self._room(here)[0])

    def _reply(self, request: Request) -> float:
        return request.reply_tokens(self.limits.expected_output)

    def _room(self, slots: Slots) -> Vector:
        """Tokens of KV cache that may still be promised on each slot; infinite where rule 2 says so."""
        fleet = self._fleet
        capacity = fleet.kv_capacity_tokens[slots]
        free = (fleet.in_flight[slots] <= 0) | (capacity <= 0)
        room: Vector = np.where(free, np.inf, self.limits.kv_limit * capacity - fleet.reserved_tokens[slots])
        return room

    # Coming and leaving

    def enter(self, place: Place, now: float, arrived: float | None = None) -> tuple[Waiting, Waiting | None]:
        """Queue a request. Returns its entry and who is turned away for it, maybe itself (rule 5). `arrived`: when it began to
        wait, before `now` where that was in another queue; nobody enters who came before the last one."""
        if not self._waiting:
            self._served, self._virtual = {}, 0.0
        waiting = Waiting(place, now if arrived is None else arrived)
        self._price(waiting, place, now)
        self._waiting[waiting] = None
        self._table = None
        if len(self._waiting) <= self.limits.max_requests:
            return waiting, None
        sizes: dict[tuple[int, str], int] = {}
        for other in self._waiting:
            sizes[other.priority, other.flow] = sizes.get((other.priority, other.flow), 0) + 1
        worst = min(
            reversed(self._waiting),
            key=lambda it: (it.priority, -sizes[it.priority, it.flow] if self.limits.fairness else 0),
        )
        self.leave(worst)
        return waiting, worst

    def leave(self, waiting: Waiting) -> None:
        """It waits no longer, for whatever reason. Nothing happens where it has left already."""
        self._waiting.pop(waiting, None)
        self._table = None

    def expired(self, now: float) -> list[Waiting]:
        """Take out who has waited for too long."""
        gone = []
        for waiting in self._waiting:
            if waiting.arrived + self.limits.max_wait_s > now:
                break
            gone.append(waiting)
        for waiting in gone:
            self.leave(waiting)
        return gone

    def looked(self, waiting: Waiting, place: Place, now: float) -> None:
        """Remember a newer look at a request that stays."""
        self._price(waiting, place, now)

    def longest_unseen(self, count: int) -> list[Waiting]:
        """Those whose last look is the longest ago; what is remembered of them ages."""
        return sorted(self._waiting, key=lambda it: it.looked)[:count]

    def retry_after_s(self, now: float) -> float:
        """Seconds until somebody who comes again may find room: what waits, spread over the fleet, and what is owed."""
        slots = self._fleet.slots()
        if not len(slots) or not self._waiting:
            return 1.0
        work = sum(float(waiting.own.min()) for waiting in self._waiting)
        owed = self.scorer.backlog("", slots, self._fleet, now).min()
        return float(min(max(1.0, work / len(slots) + owed), self.limits.max_wait_s))

    # Who goes next

    def next(self, now: float, passed: Collection[Waiting]) -> Waiting | None:
        """Who should be looked at and, if `admits` still says so, be reserved and reported as `sent`; None: nobody can go.

        `passed`: those that were looked at in this scan and could not go after all.
        """
        fleet = self._fleet
        if self._generation != fleet.generation:
            for it in self._waiting:
                if it.generation != fleet.generation and it not in passed:
                    return it  # endpoints have come or gone: what is remembered means nothing
            self._generation = fleet.generation
        if not self._waiting:
            return None
        table = self._table = self._table or _Table(self._waiting, self._reply)
        able = self._able(table, now).tolist()
        going = zip(table.waiting, able, strict=True)
        return self._first([(it, work) for it, work in going if work < np.inf and it not in passed], now)

    def _able(self, table: "_Table", now: float) -> Vector:
        """Per request its own work on its best endpoint in seconds, infinite where it cannot go there now (rules 1-3)."""
        fleet, settings = self._fleet, self.scorer.parameters
        slots = np.arange(fleet.capacity)
        owed = {model: self.scorer.backlog(model, slots, fleet, now) for model in set(table.models)}
        own, backlog = table.own, next(iter(owed.values()))[np.newaxis]
        if len(owed) > 1:
            backlog = np.stack([owed[model] for model in table.models])
        first = backlog
        if settings.decode_factor is not None:
            factor = settings.decode_factor(fleet, slots)
            first, own = backlog * factor, own * factor
        least = np.where(table.barred, np.inf, first).min(axis=1, keepdims=True)
        expected = first + (1.0 + settings.b0 + settings.b1 * least) * own  # K0, and infinite where it cannot go
        expected += ties(slots, fleet)
        closed = np.broadcast_to((backlog >= self.limits.open_s) & (fleet.awaiting > 0), own.shape)
        shut = closed | (table.need > self._room(slots))
        best = self._best(table, expected, own, closed, shut)
        rows = np.arange(len(own))
        work: Vector = np.where(shut[rows, best], np.inf, own[rows, best])
        return work

    @staticmethod
    def _best(table: "_Table", expected: Grid, own: Grid, closed: Grid, shut: Grid) -> Slots:
        """Rule 3: where each goes, or waits to go. Notes in the table what is kept from those who go elsewhere."""
        best: Slots = expected.argmin(axis=1)
        rows = np.arange(len(best))
        table.kept = {}
        waits = closed[rows, best]
        wanted = np.zeros(expected.shape[1], np.bool_)
        wanted[best] = True
        if not waits.any() or (shut | wanted).all():
            return best
        wait = expected[rows, best]
        for slot in np.unique(best[waits]):
            here = (best == slot).nonzero()[0]
            work = own[here, slot]
            wait[here] += work.cumsum() - work
        elsewhere = np.where(shut | wanted, np.inf, expected).min(axis=1)
        for row in (waits & (elsewhere < wait)).nonzero()[0].tolist():
            kept = shut[row] | wanted
            there = np.where(kept, np.inf, expected[row])
            slot = there.argmin()
            if there[slot] < wait[row]:
                best[row], wanted[slot] = slot, True
                table.kept[table.waiting[row]] = kept
        return best

    def kept_from(self, waiting: Waiting) -> Mask | None:
        """Per slot whether it is kept from this request, which `next` has just named: others wait for it, or it is closed. None
        for somebody who goes where it is best anyway."""
        return self._table.kept.get(waiting) if self._table is not None else None

    def _first(self, able: Sequence[tuple[Waiting, float]], now: float) -> Waiting | None:
        """Rule 4."""
        if not able:
            return None
        top = max(it.priority for it, _ in able)
        able = [(it, work) for it, work in able if it.priority == top]
        if self.limits.fairness:
            flow = min((it.flow for it, _ in able), key=self._starts)
            able = [(it, work) for it, work in able if it.flow == flow]
        if self.limits.order == "backfill":
            return able[0][0]
        return min(able, key=lambda pair: pair[1] - self.limits.alpha * (now - pair[0].arrived))[0]

    def _starts(self, flow: str) -> float:
        return max(self._served.get(flow, 0.0), self._virtual)

    def sent(self, waiting: Waiting, place: Place) -> None:
        """It was looked at, admitted and reserved at `place`."""
        self.leave(waiting)
        if self.limits.fairness:
            start = self._starts(waiting.flow)
            self._virtual = start
            self._served[waiting.flow] = start + float(waiting.own[place.slot] if place.slot < len(waiting.own) else 0)
            flows = {it.flow for it in self._waiting}
            self._served = {flow: at for flow, at in self._served.items() if flow in flows or at > start}
        self._on_its_way(place)

    # What is remembered of each

    def _cached(self, request: Request, slots: Slots) -> Vector:
        return cached_tokens(request, slots, self._fleet, self.scorer.parameters.prefix_match_info_producer_name)

    def _price(self, waiting: Waiting, place: Place, now: float) -> None:
        fleet, request = self._fleet, place.request
        slots = np.arange(fleet.capacity)
        waiting.place, waiting.looked, waiting.generation = place, now, fleet.generation
        self._table = None
        waiting.cached = self._cached(request, slots)
        waiting.uncached = request.prompt_tokens - waiting.cached
        waiting.own = np.full(fleet.capacity, np.inf)
        here = place.candidates
        waiting.own[here] = self.scorer.own(request, waiting.cached[here], here, fleet)
        match = request.match(self.scorer.parameters.prefix_match_info_producer_name)
        waiting.keys = match.keys if match else ()

    def _on_its_way(self, sent: Place) -> None:
        """What was just sent will be cached where it went: prompts with the same beginning cost less there."""
        match = sent.request.match(self.scorer.parameters.prefix_match_info_producer_name)
        if match is None or not match.keys:
            return
        here = np.array([sent.slot])
        for waiting in self._waiting:
            if waiting.keys and waiting.keys[0] == match.keys[0] and sent.slot < len(waiting.own):
                request = waiting.place.request
                cached = min(float(_agreed(waiting.keys, match.keys) * match.block_tokens), request.prompt_tokens - 1.0)
                if cached > waiting.cached[sent.slot] and waiting.own[sent.slot] < np.inf:
                    waiting.cached[sent.slot], waiting.uncached[sent.slot] = cached, request.prompt_tokens - cached
                    waiting.own[sent.slot] = self.scorer.own(request, waiting.cached[here], here, self._fleet)[0]


def _agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading keys that are equal. Keys are chained, so equality at a place means equality before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
