"""What a scrape looks at, for whoever writes the metrics page in a thread of its own.

Writing the page takes a second at a thousand endpoints (95,000 lines of text), and no decision may wait for that. What the
fleet and the parts hold belongs to the event loop, though, so each look happens there, takes plain values away, and is over in
milliseconds.

    worker thread   page --asks--> ScrapeView --plain values--> families --> text
    event loop                     `----- the look itself -----'
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from gateway.part_metrics import Parts, Sample
from gateway.picture_metrics import EndpointState, IndexState, Picture, StreamState

LONGEST_LOOK_S = 10.0
"""How long the event loop may be busy with other things before the scrape is given up."""

T = TypeVar("T")


class ScrapeView:
    """The picture and the parts, to be asked on any thread once `bind` was called on the event loop's."""

    def __init__(self, picture: Picture, parts: Parts) -> None:
        self._picture, self._parts = picture, parts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.get_ident()

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say whose thread this is."""
        self._loop, self._thread = loop, threading.get_ident()

    def streams(self) -> list[StreamState]:
        return self._look(self._picture.streams)

    def index(self) -> IndexState:
        return self._look(self._picture.index)

    def endpoints(self) -> list[EndpointState]:
        return self._look(self._picture.endpoints)

    def samples(self) -> Iterable[Sample]:
        return self._look(lambda: list(self._parts.samples()))

    def _look(self, look: Callable[[], T]) -> T:
        """Raises what the look raises, and TimeoutError where the event loop has no time for it."""
        if self._loop is None or threading.get_ident() == self._thread:
            return look()
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def now() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(look())
                except Exception as error:  # noqa: BLE001 - raised in the thread that asked
                    done.set_exception(error)

        self._loop.call_soon_threadsafe(now)
        try:
            return done.result(LONGEST_LOOK_S)
        except TimeoutError:
            done.cancel()
            raise TimeoutError(f"the event loop did not answer within {LONGEST_LOOK_S:g} s") from None
