"""One process of an engine, known by the numbers and times of its batches: what was applied, what waits, who is speaking.

    applied: the last `remembered` of them, with their times          waiting: came early, leave in order
    ... 37 38 39 40 | 41 is next |                                    43 44 47

An engine has no epoch, and a new process numbers from 0 again. What tells it from the one before is the time in every batch:

    the number is known, with another time        another process (the same time: it comes twice)
    later than the newest live batch, by its time, and earlier by its number                        another process
    before the next one, and its number is not remembered (or too old to be)                        another process
    the number joins, and nothing before it was heard                             cannot be told: only an answer can

A batch whose time could not be read tells nothing; the next readable one will. Where no batch ever had a time and nobody
repeats any (wires without a replay) the number alone decides.

This file decides nothing: the stream asks it, and throws it away when another process is speaking.
"""

from collections import OrderedDict
from typing import Any, Literal

from event_ingest.limits import Limits


class Incarnation:
    """Numbers count from 0; times are the engine's wall clock in seconds, None where they could not be read."""

    __slots__ = (
        "_can_replay",
        "_max_remembered",
        "_max_waiting",
        "_newest_live",
        "_times",
        "next",
        "verified",
        "waiting",
    )

    def __init__(self, limits: Limits, *, can_replay: bool) -> None:
        self.next: int | None = None
        """The number that would be applied next; None while nothing was applied or is known to be complete."""
        self.waiting: dict[int, tuple[float | None, Any]] = {}
        """Batches that wait for earlier ones: number to time and item."""
        self.verified = True
        """False after a reconnect, until an answer has shown that it is still this process."""
        self._can_replay = can_replay
        self._max_waiting = limits.waiting
        self._max_remembered = limits.remembered
        self._times: OrderedDict[int, float | None] = OrderedDict()  # of the last batches applied
        self._newest_live: tuple[int, float] | None = None

    # ------------------------------------------------------------------------------------------------ who is speaking

    def is_another(self, seq: int, ts: float | None) -> bool:
        """Whether a live batch shows that another process is speaking: see the head of this file."""
        if ts is None:
            timeless = self._newest_live is None and not self._can_replay
            return timeless and self.next is not None and seq < self.next
        if self._known_time(seq) is not None:
            return self.differs(seq, ts)
        newest = self._newest_live
        if newest is not None and seq <= newest[0] and ts > newest[1]:
            return True
        if seq in self._times or seq in self.waiting:
            return False  # that one was unreadable
        return self.next is not None and seq < self.next

    def differs(self, seq: int, ts: float | None) -> bool:
        """Whether a number is known with another time."""
        known = self._known_time(seq)
        return ts is not None and known is not None and ts != known

    def was_applied(self, seq: int, ts: float | None) -> bool:
        """Whether this very batch was applied, as happens where the subscription is faster than a long answer."""
        return self.next is not None and seq < self.next and ts is not None and self._times.get(seq) == ts

    def heard(self, seq: int, ts: float | None) -> None:
        """The subscription brought this batch, whatever becomes of it."""
        if ts is not None and (self._newest_live is None or seq > self._newest_live[0]):
            self._newest_live = (seq, ts)

    def _known_time(self, seq: int) -> float | None:
        waiting = self.waiting.get(seq)
        return waiting[0] if waiting is not None else self._times.get(seq)

    # ------------------------------------------------------------------------------------------------ what is in order

    def apply(self, seq: int, ts: float | None) -> None:
        """This batch is the next one, and leaves."""
        self.waiting.pop(seq, None)
        self._times[seq] = ts
        if len(self._times) > self._max_remembered:
            self._times.popitem(last=False)
        self.next = seq + 1

    def take_ready(self) -> tuple[int, Any] | None:
        """The next batch in order, number and item, if it has waited for its turn: it leaves."""
        seq = self.next
        if seq is None or seq not in self.waiting:
            return None
        ts, item = self.waiting[seq]
        self.apply(seq, ts)
        return seq, item

    def wait(self, seq: int, ts: float | None, item: Any) -> Literal["waits", "duplicate", "dropped"]:
        """An early batch waits. `dropped`: too many do, so the newest of them (perhaps this one) is to be asked for again."""
        if seq in self.waiting:
            return "duplicate"
        full = len(self.waiting) >= self._max_waiting
        if full:
            newest = max(self.waiting)
            if seq > newest:
                return "dropped"
            del self.waiting[newest]
        self.waiting[seq] = (ts, item)
        return "dropped" if full else "waits"

    def begin_at(self, seq: int) -> int:
        """Nothing from before `seq` will be applied any more; returns how many of those that wait were dropped for that."""
        before = [number for number in self.waiting if number < seq]
        for number in before:
            del self.waiting[number]
        self.next = seq
        return len(before)
