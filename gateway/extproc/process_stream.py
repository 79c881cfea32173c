"""One ext-proc stream on any transport: carries messages between the proxy's call and its `Exchange`.

What is answered is decided in `core`; here are the waiting for the decision, its deadline, and the ends. Messages come in as
calls from the event loop and answers go out as such, so that no task runs per message; only a decision is one.
"""

import asyncio
import logging
from contextvars import copy_context
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from google.protobuf.message import DecodeError

from gateway.extproc.calls import Answers
from gateway.extproc.core import ProtocolError
from gateway.extproc.decision import ABORTED_INTERNAL, ABORTED_PROTOCOL, TTL_EXPIRED, Decided, Rejected
from gateway.extproc.effects import Aborted, CancelDecide, Close, Decide, Effect, Send
from gateway.extproc.grpc_wire import Status
from gateway.extproc.messages import immediate
from gateway.extproc.processor import INTERNAL_ERROR, Processor
from gateway.logs import REQUEST_ID

logger = logging.getLogger("gateway.extproc")


class ProcessStream:
    """One stream, one HTTP request; a `calls.Receiver`."""

    def __init__(self, processor: Processor, answers: Answers) -> None:
        self.exchange = processor.exchange()
        self._processor = processor
        self._answers = answers
        self._deciding: asyncio.Task[Decided | Rejected] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._over = False

    # What the proxy does

    def message(self, data: bytes) -> None:
        if self._over:
            return
        try:
            self._carry_out(self.exchange.received(pb.ProcessingRequest.FromString(data)))
        except (ProtocolError, DecodeError) as error:
            self._processor.counts["protocol_errors"] += 1
            logger.error("protocol_error request_id=%s error=%s", self.exchange.request_id, error)
            self._answers.finish(Status.INVALID_ARGUMENT, str(error))
            self._end(ABORTED_PROTOCOL)
        except Exception:
            self._processor.counts["internal_errors"] += 1
            logger.exception("internal_error request_id=%s", self.exchange.request_id)
            self._give_up()

    def ended(self) -> None:
        if not self._over:
            self._answers.finish()
            self._end(None)

    def aborted(self) -> None:
        if not self._over:
            self._end(None)

    # What the decider does

    def _decide(self, wanted: Decide) -> None:
        context = copy_context()
        context.run(REQUEST_ID.set, wanted.head.request_id)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self._processor.decide_timeout_s, self._expired)
        self._deciding = loop.create_task(self._processor.decide(wanted), context=context)
        self._deciding.add_done_callback(self._decided)

    def _decided(self, task: "asyncio.Task[Decided | Rejected]") -> None:
        if task is not self._deciding:  # it was discarded; see there
            return
        self._deciding = None
        self._stop_clock()
        # A decider that cancels itself must not look like the end of this stream.
        self._answer(INTERNAL_ERROR if task.cancelled() else task.result())

    def _expired(self) -> None:
        processor, limit = self._processor, self._processor.decide_timeout_s
        processor.counts["decide_timeouts"] += 1
        logger.error("decide_timeout request_id=%s limit_s=%s", self.exchange.request_id, limit)
        deciding, self._deciding = self._deciding, None
        message = f"no decision within {limit:g} s"
        self._answer(Rejected(status=504, message=message, reason=TTL_EXPIRED, code="decide_timeout"))
        if deciding is not None:
            self._discard(deciding)

    def _answer(self, outcome: Decided | Rejected) -> None:
        counts = self._processor.counts
        try:
            effects = self.exchange.decided(outcome)
        except Exception:
            counts["internal_errors"] += 1
            logger.exception("decision_unusable request_id=%s", self.exchange.request_id)
            if isinstance(outcome, Decided) and outcome.observer is not None:
                self._processor.observe(Aborted(outcome.observer, ABORTED_INTERNAL))
            outcome = INTERNAL_ERROR
            effects = self.exchange.decided(outcome)
        counts["decided" if isinstance(outcome, Decided) else "rejected"] += 1
        try:
            self._carry_out(effects)
        except Exception:
            counts["internal_errors"] += 1
            logger.exception("internal_error request_id=%s", self.exchange.request_id)
            self._give_up()

    # What follows

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._answers.send(effect.message.SerializeToString())
                case Decide():
                    self._decide(effect)
                case CancelDecide():
                    self._cancel_decide()
                case Close():
                    self._answers.finish()
                    self._end(None)
                    return
                case _:
                    self._processor.observe(effect)

    def _give_up(self) -> None:
        """After an error of our own: a 500 while the client can still get one, else a gRPC error."""
        if self.exchange.forwarded:
            # With fail-open, the proxy lets a response that has begun go on after this.
            self._answers.finish(Status.INTERNAL, "the router failed on this request")
        else:
            self._answers.send(immediate(INTERNAL_ERROR, self.exchange.request_id).SerializeToString())
            self._answers.finish()
        self._end(ABORTED_INTERNAL)

    def _end(self, reason: str | None) -> None:
        """The stream is over: nothing may be left running or unreported."""
        self._over = True
        self._processor.open_streams -= 1
        for effect in self.exchange.ended(reason):
            if isinstance(effect, CancelDecide):
                self._cancel_decide()
            else:
                self._processor.observe(effect)
        self._cancel_decide()

    def _cancel_decide(self) -> None:
        self._stop_clock()
        deciding, self._deciding = self._deciding, None
        if deciding is not None:
            self._discard(deciding)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _discard(self, deciding: "asyncio.Task[Decided | Rejected]") -> None:
        """Cancel a decision, and tell the observer of one that is made all the same."""
        deciding.cancel()

        def late(task: "asyncio.Task[Any]") -> None:
            if not task.cancelled() and task.exception() is None:
                for effect in self.exchange.decided(task.result()):
                    self._processor.observe(effect)

        deciding.add_done_callback(late)
