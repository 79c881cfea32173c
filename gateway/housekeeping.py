"""What the gateway does again and again, whoever asks or not.

    every 50 ms   breakers let probes pass, prefills progress, predictions and parity samples end
    every second  requests of which nothing is heard leave the books, streams follow the models, series of departed endpoints
                  go, the self-watch judges, the configuration file is looked at

A chore that fails is logged and done again the next time; the others are done all the same.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fleet.books import Books
from gateway.logs import RateLimit

log = logging.getLogger(__name__)

PULSE_S = 0.05
ROUND_S = 1.0

Chore = Callable[[float], object]
"""Something to do at a monotonic time."""


async def pulse(chores: Sequence[Chore]) -> None:
    """The quick round, for ever: without it endpoints would seem busy, or stay away, for ever."""
    await _again_and_again(chores, PULSE_S)


async def upkeep(chores: Sequence[Chore]) -> None:
    """The slow round, for ever."""
    await _again_and_again(chores, ROUND_S)


async def _again_and_again(chores: Sequence[Chore], period_s: float) -> None:
    quiet = RateLimit()
    while True:
        await asyncio.sleep(period_s)
        now = time.monotonic()
        for number, chore in enumerate(chores):
            try:
                chore(now)
            except Exception:
                if quiet.allows(str(number), now):
                    log.exception("housekeeping_failed chore=%s", getattr(chore, "__qualname__", chore))


def expiry(books: Books) -> Chore:
    """Requests of which nothing was heard for too long leave the books."""

    def expire(now: float) -> None:
        for request_id in books.expire(now):
            log.warning("request_expired request_id=%s", request_id)

    return expire


def when_changed(file: Path | None, act: Callable[[], None]) -> Chore:
    """Act where the file is another one than at the last look. A file that is not there is a change, too."""
    seen = _modified(file)

    def look(_: float) -> None:
        nonlocal seen
        if (now := _modified(file)) != seen:
            seen = now
            act()

    return look


def _modified(file: Path | None) -> tuple[int, int] | None:
    try:
        status = file.stat() if file else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if status else None
