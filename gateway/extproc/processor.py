"""What all ext-proc streams of a server have in common: the decider, what it may take, what is counted."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from gateway.extproc.core import Exchange
from gateway.extproc.decision import Decided, Decider, Rejected
from gateway.extproc.effects import Aborted, Decide, Effect, Finished, ResponseChunk, ResponseHeaders

logger = logging.getLogger("gateway.extproc")

INTERNAL_ERROR = Rejected(status=500, message="the router failed on this request", code="internal_error")


class Processor:
    """Answers `Process` streams with the decisions of the injected decider.

    `counts` has what a metrics page shows: streams, decided, rejected, finished, aborted, decide_errors,
    decide_timeouts, decide_cancelled, observer_errors, protocol_errors, internal_errors.
    `on_decided(seconds)` is called with the duration of every decision.
    """

    def __init__(
        self,
        decider: Decider,
        *,
        max_body_bytes: int = 64 * 1024 * 1024,
        decide_timeout_s: float = 8.0,
        on_decided: Callable[[float], None] | None = None,
    ) -> None:
        self._decider = decider
        self._max_body_bytes = max_body_bytes
        self.decide_timeout_s = decide_timeout_s
        self._on_decided = on_decided
        self.counts: Counter[str] = Counter()
        self.open_streams = 0

    def exchange(self) -> Exchange:
        """The core of a new stream."""
        self.counts["streams"] += 1
        self.open_streams += 1
        return Exchange(max_body_bytes=self._max_body_bytes)

    async def decide(self, wanted: Decide) -> Decided | Rejected:
        """The decider's answer; what it raises becomes a 500 here, loudly."""
        started = time.perf_counter()
        try:
            outcome = await self._decider.decide(wanted.head, wanted.body)
        except asyncio.CancelledError:
            self.counts["decide_cancelled"] += 1
            raise
        except Exception:
            self.counts["decide_errors"] += 1
            logger.exception("decide_failed request_id=%s path=%s", wanted.head.request_id, wanted.head.path)
            return INTERNAL_ERROR
        if self._on_decided is not None:
            self._on_decided(time.perf_counter() - started)
        return outcome

    def observe(self, effect: Effect) -> None:
        """Tell an observer. What it raises is counted and logged: the response goes on."""
        try:
            match effect:
                case ResponseHeaders():
                    effect.observer.response_headers(effect.status, effect.headers, effect.served)
                case ResponseChunk():
                    effect.observer.response_chunk(effect.data)
                case Finished():
                    self.counts["finished"] += 1
                    effect.observer.finished()
                case Aborted():
                    self.counts["aborted"] += 1
                    effect.observer.aborted(effect.reason)
        except Exception:
            self.counts["observer_errors"] += 1
            logger.exception("observer_failed effect=%s", type(effect).__name__)
