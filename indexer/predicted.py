"""Blocks that an engine will soon announce because a request was just sent to it.

Between the decision and the engine's event lie a prefill and a step; a burst of siblings of one prompt would be spread
over the fleet, each seeing nothing cached. So the decision enters the blocks that the chosen slot lacks here, and a
match can count them (Index.match(keys, predicted)).

    predict(slot, keys, now) --> ticket      one reference from this request to each of its keys
    release(ticket)                          the request is over, or never came to run
    expire(now)                              requests older than ttl_s, whatever became of them
    confirm(slot, keys)                      the engine announced them: from now on the index alone speaks for them
    clear(slot)                              the engine's cache is gone, and what it was computing with it

A key is predicted for a slot while at least one request refers to it. Nothing here touches the index, so an expiry can
never remove a block that an engine really holds. Time is passed in, in seconds of any one monotonic clock.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from threading import Lock

import msgspec


class Prediction(msgspec.Struct, frozen=True):
    slot: int
    keys: tuple[int, ...]
    until: float


class PredictedStats(msgspec.Struct, frozen=True):
    """`entries` are references of requests to keys; the others count references since the start, by how they ended."""

    requests: int
    entries: int
    confirmed: int
    released: int
    expired: int
    evicted: int  # dropped because max_entries was reached: raise it, or lower ttl_s


class Predicted:
    """At most `max_entries` references; beyond that the oldest requests are forgotten, and counted.

    Every request is remembered for `ttl_s` at most. Reads (`holders`) take no lock.
    """

    def __init__(self, ttl_s: float = 10.0, max_entries: int = 1_000_000) -> None:
        if ttl_s <= 0 or max_entries < 1:
            raise ValueError(f"ttl_s must be above 0 and max_entries at least 1, got {ttl_s} and {max_entries}")
        self.ttl_s = ttl_s
        self.max_entries = max_entries
        self._lock = Lock()
        self._holders: dict[int, int] = {}  # key -> bitset of slots
        self.peek: Callable[[int], int | None] = self._holders.get  # `holders` without a call of ours; None for 0
        self._referrers: dict[tuple[int, int], set[int]] = {}  # (slot, key) -> tickets
        self._predictions: dict[int, Prediction] = {}  # oldest first; one ttl for all, so in order of expiry too
        self._entries = 0
        self._next_ticket = 0
        self._ended = {"confirmed": 0, "released": 0, "expired": 0, "evicted": 0}

    def predict(self, slot: int, keys: Iterable[int], now: float) -> int:
        """Expect `keys` (chain order) on `slot`; returns the ticket to release them with.

        More keys than `max_entries` are cut to the leading ones, the rest counts as evicted.
        """
        wanted = tuple(dict.fromkeys(keys))
        kept = wanted[: self.max_entries]
        with self._lock:
            self._ended["evicted"] += len(wanted) - len(kept)
            while self._entries + len(kept) > self.max_entries:
                self._drop(next(iter(self._predictions)), "evicted")
            ticket = self._next_ticket
            self._next_ticket += 1
            self._predictions[ticket] = Prediction(slot, kept, now + self.ttl_s)
            for key in kept:
                self._referrers.setdefault((slot, key), set()).add(ticket)
                self._holders[key] = self._holders.get(key, 0) | 1 << slot
            self._entries += len(kept)
        return ticket

    def release(self, ticket: int) -> None:
        """End one request's references; nothing happens if they have ended already."""
        with self._lock:
            self._drop(ticket, "released")

    def expire(self, now: float) -> int:
        """End the references of all requests older than ttl_s; returns how many requests that were."""
        with self._lock:
            due = 0
            for prediction in self._predictions.values():
                if prediction.until > now:
                    break
                due += 1
            for ticket in list(islice(self._predictions, due)):
                self._drop(ticket, "expired")
        return due

    def confirm(self, slot: int, keys: Iterable[int]) -> int:
        """End all references to `keys` on `slot`, which the index now holds; returns how many keys had some."""
        found = 0
        if not self._holders:
            return 0
        with self._lock:
            for key in keys:
                tickets = self._referrers.pop((slot, key), None)
                if tickets:
                    found += 1
                    self._ended["confirmed"] += len(tickets)
                    self._forget(slot, key, len(tickets))
        return found

    def clear(self, slot: int) -> None:
        """End all references on `slot`."""
        with self._lock:
            for ticket in [ticket for ticket, known in self._predictions.items() if known.slot == slot]:
                self._drop(ticket, "released")

    def holders(self, key: int) -> int:
        """The bitset of slots on which `key` is expected."""
        return self._holders.get(key, 0)

    def stats(self) -> PredictedStats:
        with self._lock:
            return PredictedStats(requests=len(self._predictions), entries=self._entries, **self._ended)

    def __bool__(self) -> bool:
        return bool(self._holders)

    def _drop(self, ticket: int, reason: str) -> None:
        prediction = self._predictions.pop(ticket, None)
        if prediction is None:
            return
        for key in prediction.keys:
            tickets = self._referrers.get((prediction.slot, key))
            if tickets is None or ticket not in tickets:
                continue  # confirmed in the meantime
            self._ended[reason] += 1
            tickets.remove(ticket)
            if tickets:
                self._entries -= 1
            else:
                del self._referrers[prediction.slot, key]
                self._forget(prediction.slot, key, 1)

    def _forget(self, slot: int, key: int, references: int) -> None:
        self._entries -= references
        left = self._holders[key] & ~(1 << slot)
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
