# One window of a burst producer.
#
#   EMPTY --join--> OPEN --join--> OPEN --due: time is over-----------.
#                    | ^            \--join: it is full----------------+--> closed: its guests, once; EMPTY again
#                    | `-leave: who left is not in it                  |
#                    |--leave: nobody is left--> EMPTY                 |
#                    `--close: the gateway stops or is reconfigured---'
#
# Rules
# 1. A window begins with its first guest and ends `duration_s` later, whoever else comes or goes: nobody waits longer.
# 2. It ends at once when it has `most` guests; the next one opens a new window. Without `most` it is bounded by time only.
# 3. A guest is in one window, and gets out of it once: by its end or by leaving.
# 4. After `shut` there are no windows: whoever comes is not taken in.
# 5. No clock, no task, no placement here: time is passed in, and what ends is handed to the caller.
"""The state machine of a burst window, without clocks or sockets."""

from enum import StrEnum
from typing import Generic, TypeVar

import msgspec

G = TypeVar("G")


class Ended(StrEnum):
    """Why a window ended; values of a metric label."""

    TIME = "time"
    FULL = "full"
    CLOSED = "closed"


class Closed(msgspec.Struct, Generic[G], frozen=True):
    """A window that has ended."""

    guests: list[G]
    """In order of arrival; at least one."""
    why: Ended


class BurstWindow(Generic[G]):
    """The open window of one producer, if there is one. Guests must be hashable and different from each other."""

    def __init__(self, duration_s: float, most: int | None) -> None:
        """`most`: guests of one window; None: no limit."""
        self._duration_s, self._most = duration_s, most
        self._guests: dict[G, None] = {}
        self._ends_at = 0.0
        self._shut = False

    def __len__(self) -> int:
        return len(self._guests)

    @property
    def shut_for_good(self) -> bool:
        return self._shut

    @property
    def ends_at(self) -> float | None:
        """When `due` will have something; None while nobody waits."""
        return self._ends_at if self._guests else None

    def join(self, guest: G, now: float) -> Closed[G] | None:
        """A guest comes. Returns the window where that makes it full. Raises RuntimeError after `shut`."""
        if self._shut:
            raise RuntimeError("this window is shut: ask shut_for_good first")
        if not self._guests:
            self._ends_at = now + self._duration_s
        self._guests[guest] = None
        return self._end(Ended.FULL) if self._most is not None and len(self._guests) >= self._most else None

    def leave(self, guest: G) -> None:
        """A guest goes away. Nothing happens where its window has ended."""
        self._guests.pop(guest, None)

    def due(self, now: float) -> Closed[G] | None:
        """The window, if its time is over."""
        return self._end(Ended.TIME) if self._guests and now >= self._ends_at else None

    def shut(self) -> Closed[G] | None:
        """No more windows. Returns the open one."""
        self._shut = True
        return self._end(Ended.CLOSED) if self._guests else None

    def _end(self, why: Ended) -> Closed[G]:
        guests, self._guests = list(self._guests), {}
        return Closed(guests, why)
