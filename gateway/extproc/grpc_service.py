"""The ext-proc service on grpc.aio: carries messages between the proxy and one `Exchange` per stream.

What is answered is decided in `core`; here are the waiting, the deadline and the counting.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from gateway.extproc.core import Exchange, ProtocolError
from gateway.extproc.decision import ABORTED_INTERNAL, ABORTED_PROTOCOL, TTL_EXPIRED, Decided, Decider, Rejected
from gateway.extproc.effects import (
    Aborted,
    CancelDecide,
    Close,
    Decide,
    Effect,
    Finished,
    ResponseChunk,
    ResponseHeaders,
    Send,
)
from gateway.extproc.messages import immediate
from gateway.logs import REQUEST_ID

logger = logging.getLogger("gateway.extproc")

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
INTERNAL_ERROR = Rejected(status=500, message="the router failed on this request", code="internal_error")


class ProcessorService:
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

    def handler(self) -> grpc.GenericRpcHandler:
        """What a grpc.aio server is given (`add_generic_rpc_handlers`)."""
        method = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=pb.ProcessingRequest.FromString,
            response_serializer=pb.ProcessingResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})

    async def process(self, _: Any, context: Any) -> None:
        """One stream, one HTTP request."""
        stream = _Stream(self, context, Exchange(max_body_bytes=self._max_body_bytes))
        self.counts["streams"] += 1
        self.open_streams += 1
        reason: str | None = None
        try:
            await stream.run()
        except _PeerGone:
            logger.debug("peer_gone request_id=%s", stream.exchange.request_id)
        except ProtocolError as error:
            reason = ABORTED_PROTOCOL
            self.counts["protocol_errors"] += 1
            logger.error("protocol_error request_id=%s error=%s", stream.exchange.request_id, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            reason = ABORTED_INTERNAL
            self.counts["internal_errors"] += 1
            logger.exception("internal_error request_id=%s", stream.exchange.request_id)
            await stream.give_up()
        finally:
            self.open_streams -= 1
            stream.end(reason)

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


class _PeerGone(Exception):
    """The proxy ended the stream while we wrote to it."""


class _Closed(Exception):
    """Our side has nothing more to say."""


class _Stream:
    """The loop of one stream: whatever comes first of a message, the decision and the deadline."""

    def __init__(self, service: ProcessorService, context: Any, exchange: Exchange) -> None:
        self.exchange = exchange
        self._service = service
        self._context = context
        self._reading: asyncio.Task[Any] | None = None
        self._deciding: asyncio.Task[Decided | Rejected] | None = None
        self._deadline = 0.0

    async def run(self) -> None:
        try:
            while True:
                if self._deciding is None and self._reading is None:
                    message = await self._context.read()
                elif (arrived := await self._wait()) is None:
                    continue
                else:
                    message = arrived
                if message is grpc.aio.EOF:
                    return
                effects = self.exchange.received(message)
                del message  # or a body of megabytes would live until the response begins
                await self._carry_out(effects)
                del effects
        except _Closed:
            return

    async def _wait(self) -> Any:
        """The next message, or None when the decision came first and was carried out.

        The proxy's end of the stream is seen while deciding only because a read is under way.
        """
        if self._reading is None:
            self._reading = asyncio.create_task(self._context.read())
        waited: set[asyncio.Task[Any]] = {self._reading}
        timeout = None
        if self._deciding is not None:
            waited.add(self._deciding)
            timeout = max(0.0, self._deadline - time.monotonic())
        done, _ = await asyncio.wait(waited, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._deciding is not None and (self._deciding in done or not done):
            await self._take_decision(expired=not done)
            return None
        reading, self._reading = self._reading, None
        return reading.result()

    async def _take_decision(self, *, expired: bool) -> None:
        deciding, self._deciding = self._deciding, None
        assert deciding is not None
        service = self._service
        if expired:
            service.counts["decide_timeouts"] += 1
            limit = service.decide_timeout_s
            logger.error("decide_timeout request_id=%s limit_s=%s", self.exchange.request_id, limit)
            outcome: Decided | Rejected = Rejected(
                status=504, message=f"no decision within {limit:g} s", reason=TTL_EXPIRED, code="decide_timeout"
            )
            effects = self.exchange.decided(outcome)
            self._discard(deciding)
        else:
            # A decider that cancels itself must not look like the end of this stream.
            outcome = INTERNAL_ERROR if deciding.cancelled() else deciding.result()
            try:
                effects = self.exchange.decided(outcome)
            except Exception:
                service.counts["internal_errors"] += 1
                logger.exception("decision_unusable request_id=%s", self.exchange.request_id)
                if isinstance(outcome, Decided) and outcome.observer is not None:
                    service.observe(Aborted(outcome.observer, ABORTED_INTERNAL))
                outcome = INTERNAL_ERROR
                effects = self.exchange.decided(outcome)
        service.counts["decided" if isinstance(outcome, Decided) else "rejected"] += 1
        await self._carry_out(effects)

    async def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    await self._write(effect.message)
                case Decide():
                    REQUEST_ID.set(effect.head.request_id)  # of this stream's task, and of those that it starts
                    self._deadline = time.monotonic() + self._service.decide_timeout_s
                    coroutine: Coroutine[Any, Any, Decided | Rejected] = self._service.decide(effect)
                    self._deciding = asyncio.create_task(coroutine)
                case CancelDecide():
                    self._cancel_decide()
                case Close():
                    raise _Closed
                case _:
                    self._service.observe(effect)

    async def _write(self, message: Any) -> None:
        try:
            await self._context.write(message)
        except (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError) as error:
            raise _PeerGone from error

    async def give_up(self) -> None:
        """After an error of our own: a 500 while the client can still get one, else a gRPC error."""
        if not self.exchange.forwarded:
            try:
                await self._write(immediate(INTERNAL_ERROR, self.exchange.request_id))
            except _PeerGone:
                logger.debug("peer_gone request_id=%s", self.exchange.request_id)
            return
        # With fail-open, the proxy lets a response that has begun go on after this.
        await self._context.abort(grpc.StatusCode.INTERNAL, "the router failed on this request")

    def end(self, reason: str | None) -> None:
        """The stream is over: nothing may be left running or unreported."""
        for effect in self.exchange.ended(reason):
            if isinstance(effect, CancelDecide):
                self._cancel_decide()
            else:
                self._service.observe(effect)
        self._cancel_decide()
        if self._reading is not None:
            self._reading.cancel()
            self._reading.add_done_callback(_ignore_result)

    def _cancel_decide(self) -> None:
        deciding, self._deciding = self._deciding, None
        if deciding is not None:
            self._discard(deciding)

    def _discard(self, deciding: asyncio.Task[Decided | Rejected]) -> None:
        """Cancel a decision, and tell the observer of one that is made all the same."""
        deciding.cancel()

        def late(task: asyncio.Task[Decided | Rejected]) -> None:
            if not task.cancelled() and task.exception() is None:
                for effect in self.exchange.decided(task.result()):
                    self._service.observe(effect)

        deciding.add_done_callback(late)


def _ignore_result(task: asyncio.Task[Any]) -> None:
    """Fetch what an abandoned read ended with, so that asyncio does not report it as never retrieved."""
    if not task.cancelled():
        task.exception()
