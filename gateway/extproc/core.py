# The life of one HTTP request inside one ext-proc stream.
#
#   request half    HEAD --headers--> BODY --whole body--> DECIDING --decided--> FORWARDED
#                     \--headers, end of stream (or a mode that shows no body)--> DECIDING
#                   any of them --rejected--> CLOSED;   HEAD, BODY, DECIDING --response seen--> BYPASSED
#   response half   WAITING --headers--> OPEN --end of stream--> ENDED
#
# Rules
# 1. Only this file, with `messages` and `headers`, knows ProcessingRequest and ProcessingResponse. Messages and
#    decisions go in, a list of Effects comes out, in the order in which they must be carried out. Deciding waits
#    (tokenizer, queue), so it is an effect too: `Decide` goes out, `decided(...)` comes back; nothing here awaits,
#    reads a clock or owns a socket.
# 2. Envoy names its body mode in the first message (`protocol_config`) and that message alone decides how we answer:
#      BUFFERED              headers are answered at once; the body comes as one message and its answer carries the
#                            routing. Body bytes are not sent back unless the decision changes them.
#      FULL_DUPLEX_STREAMED  nothing is answered before the whole body is here; then headers (with the routing), then
#                            the body itself in pieces of at most 62,000 bytes, the last one with end_of_stream. An empty
#                            answer would mean an empty body.
#      NONE, STREAMED, ...   the headers must be answered before a body is seen: the decision is by head alone
#                            (`Head.body_complete` False), and body messages are waved through.
# 3. Answers leave in the order of the messages they answer. Request messages that arrive while DECIDING wait.
# 4. A response that begins before the decision is Envoy's own (a timeout, say): there is nothing left to decide.
# 5. A client cannot choose its destination. The routing removes every header that only routers may write, even those
#    we were not shown, and in BUFFERED mode those we were shown are already removed with the answer to the headers.
# 6. An end of the stream says nothing about completion: Envoy ends every stream the same way. Only end_of_stream on
#    the response (or its trailers) is `Finished`; every other end of a decided request is `Aborted`, and exactly one of
#    the two is emitted, once. Where Envoy was asked not to show the body (`observe_response` False) and does not, the
#    end of the stream is all that there is: after the response's headers it is `Finished`.
# 7. Rejecting is an ImmediateResponse, then the stream is over. Ending a stream without an answer would mean
#    "continue" to Envoy.
"""The transport-independent core of the ext-proc service: one `Exchange` per stream."""

import enum
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb

from gateway.extproc import headers as wire
from gateway.extproc import messages
from gateway.extproc.decision import (
    ABORTED_BEFORE_RESPONSE,
    ABORTED_DURING_RESPONSE,
    ABORTED_UNSENT,
    NO_ENDPOINTS,
    SERVED_BY,
    Decided,
    Head,
    Rejected,
    ResponseObserver,
)
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

BUFFERED = ProcessingMode.BodySendMode.BUFFERED
BUFFERED_PARTIAL = ProcessingMode.BodySendMode.BUFFERED_PARTIAL
DUPLEX = ProcessingMode.BodySendMode.FULL_DUPLEX_STREAMED


class ProtocolError(Exception):
    """The proxy sent a message that cannot come at this point."""


class Request(enum.Enum):
    HEAD = "head"
    BODY = "body"
    DECIDING = "deciding"
    FORWARDED = "forwarded"
    BYPASSED = "bypassed"
    CLOSED = "closed"


class Response(enum.Enum):
    WAITING = "waiting"
    OPEN = "open"
    ENDED = "ended"


class Exchange:
    """One request and its response, as one ext-proc stream sees them.

    `max_body_bytes`: larger requests are answered with 413. `default_mode`: the body mode of proxies that do not send
    `protocol_config` (a BodySendMode).
    """

    def __init__(self, *, max_body_bytes: int = 64 * 1024 * 1024, default_mode: int = BUFFERED) -> None:
        self.request = Request.HEAD
        self.response = Response.WAITING
        self._max_body_bytes = max_body_bytes
        self._mode = default_mode
        self._response_mode = int(ProcessingMode.BodySendMode.STREAMED)
        self._head: Head | None = None
        self._generated_id = False
        self._has_body = False
        self._answers = ""  # the message that the routing answers: "request_headers" or "request_body"
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._trailers = False  # FULL_DUPLEX_STREAMED: the body was ended by trailers, which are answered too
        self._held: list[Any] = []  # request messages that arrived while DECIDING
        # Kept of the decision for the response; the decision itself may hold a body of megabytes.
        self._response_headers: Mapping[str, str] = {}
        self._first = ""  # the endpoint that the decision puts first
        self._observed = True
        self._observer: ResponseObserver | None = None  # set from the decision until Finished or Aborted

    @property
    def request_id(self) -> str:
        """The request's id, "" before its headers have arrived."""
        return self._head.request_id if self._head else ""

    @property
    def forwarded(self) -> bool:
        """True once the routing has been answered: the client can no longer be given an answer of our own."""
        return self.request in (Request.FORWARDED, Request.BYPASSED)

    # --- what comes in ------------------------------------------------------------------------------------------

    def received(self, message: Any) -> list[Effect]:
        """Take the next ProcessingRequest. Raises ProtocolError when it cannot come now."""
        kind = message.WhichOneof("request")
        if self.request is Request.CLOSED:
            return []  # what Envoy had already sent when it was told the final answer
        match kind:
            case "request_headers":
                return self._request_headers(message)
            case "request_body" | "request_trailers" if self.request is Request.DECIDING:
                self._held.append(message)
                return []
            case "request_body":
                return self._request_body(message.request_body)
            case "request_trailers":
                return self._request_trailers()
            case "response_headers":
                return [*self._bypass(), *self._response_begins(message)]
            case "response_body":
                return [*self._bypass(), *self._response_body(message.response_body)]
            case "response_trailers":
                return [*self._bypass(), Send(messages.answer(response_trailers={})), *self._finish()]
        raise ProtocolError(f"message without a known request field ({kind}); is the proxy newer than this router?")

    def decided(self, outcome: Decided | Rejected) -> list[Effect]:
        """Take the decider's answer to `Decide`. Also valid after the stream has ended or was bypassed."""
        if self.request is not Request.DECIDING:
            if isinstance(outcome, Decided) and outcome.observer is not None:
                return [Aborted(outcome.observer, ABORTED_UNSENT)]
            return []
        if isinstance(outcome, Rejected):
            return self._reject(outcome)
        assert self._head is not None
        shown = self._answers == "request_body" or (self._mode == DUPLEX and self._has_body)
        if outcome.body is not None and not shown:
            raise ValueError(f"decision for {self._head.path} changes a body that this request does not show us")
        effects: list[Effect] = list(self._forward(outcome))
        self.request = Request.FORWARDED
        self._response_headers = outcome.response_headers
        self._first = outcome.destination[0] if outcome.destination else ""
        self._observed = outcome.observe_response
        self._observer = outcome.observer
        self._body = []
        held, self._held = self._held, []
        for message in held:
            effects += self.received(message)
        return effects

    def ended(self, reason: str | None = None) -> list[Effect]:
        """The stream is over, whoever ended it and however. Safe to call at any time and more than once."""
        effects: list[Effect] = [CancelDecide()] if self.request is Request.DECIDING else []
        self.request = Request.CLOSED
        self._held = []
        self._body = []
        if self._observer is not None:
            during = self.response is not Response.WAITING
            if during and not self._observed and reason is None:
                return [*effects, *self._finish()]
            default = ABORTED_DURING_RESPONSE if during else ABORTED_BEFORE_RESPONSE
            effects.append(Aborted(self._observer, reason or default))
            self._observer = None
        return effects

    # --- the request half ---------------------------------------------------------------------------------------

    def _request_headers(self, message: Any) -> list[Effect]:
        if self.request is not Request.HEAD:
            raise ProtocolError("a second request_headers message in one stream")
        if message.HasField("protocol_config"):
            self._mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        received = wire.read(message.request_headers.headers)
        subset = messages.subset(message)
        ends = message.request_headers.end_of_stream
        self._has_body = not ends
        shows_body = self._mode in (BUFFERED, BUFFERED_PARTIAL, DUPLEX)
        request_id = received.get(wire.REQUEST_ID, "")
        self._generated_id = not request_id
        self._head = Head(
            method=received.get(":method", ""),
            path=received.get(":path", ""),
            authority=received.get(":authority", received.get("host", "")),
            headers={n: v for n, v in received.items() if not n.startswith(":") and n not in wire.INJECTED},
            request_id=request_id or str(uuid.uuid4()),
            subset=subset,
            body_complete=ends or shows_body,
        )
        if subset == ():
            return self._reject(Rejected(status=503, message="the gateway allows no endpoint", reason=NO_ENDPOINTS))
        length = received.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return self._too_large()
        if ends or not shows_body:
            return self._decide("request_headers")
        self.request = Request.BODY
        if self._mode == DUPLEX:
            return []
        answer = messages.answer(request_headers={})
        wire.remove(answer.request_headers.response.header_mutation, [n for n in wire.STRIPPED if n in received])
        return [Send(answer)]

    def _request_body(self, body: Any) -> list[Effect]:
        if self.request in (Request.FORWARDED, Request.BYPASSED):
            if self._mode == DUPLEX and self.request is Request.BYPASSED:
                return [Send(m) for m in messages.echo("request_body", body.body, body.end_of_stream)]
            return [Send(messages.answer(request_body={}))]  # a mode in which the decision did not wait for the body
        if self.request is not Request.BODY:
            raise ProtocolError("request_body before request_headers")
        self._body.append(body.body)
        self._body_bytes += len(body.body)
        if self._body_bytes > self._max_body_bytes:
            return self._too_large()
        if self._mode == DUPLEX:
            return self._decide("request_headers") if body.end_of_stream else []
        # BUFFERED sends one message: without end_of_stream it is still the whole body, trailers follow.
        # BUFFERED_PARTIAL sends one message too: without end_of_stream it is a prefix.
        if self._mode == BUFFERED_PARTIAL and not body.end_of_stream:
            assert self._head is not None
            self._head = msgspec.structs.replace(self._head, body_complete=False)
        return self._decide("request_body")

    def _request_trailers(self) -> list[Effect]:
        if self.request is Request.HEAD:
            raise ProtocolError("request_trailers before request_headers")
        if self.request is Request.BODY and self._mode == DUPLEX:
            self._trailers = True
            return self._decide("request_headers")
        return [Send(messages.answer(request_trailers={}))]

    def _decide(self, answers: str) -> list[Effect]:
        assert self._head is not None
        self.request = Request.DECIDING
        self._answers = answers
        # join() of one piece would copy it; a BUFFERED body is always one piece.
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = [body]
        return [Decide(self._head, body)]

    def _forward(self, decision: Decided) -> Iterator[Send]:
        """The routing, on the message that may still change the headers, and in FULL_DUPLEX_STREAMED the body."""
        assert self._head is not None
        set_headers = {name.lower(): value for name, value in decision.set_headers.items()}
        if self._generated_id:
            set_headers.setdefault(wire.REQUEST_ID, self._head.request_id)
        set_headers.pop(wire.DESTINATION, None)
        if decision.destination:
            set_headers[wire.DESTINATION] = ",".join(decision.destination)
        removed = [*wire.STRIPPED, *(name.lower() for name in decision.remove_headers)]
        echoed = self._mode == DUPLEX and self._has_body
        if decision.body is not None:
            if echoed:
                removed.append("content-length")
            else:
                set_headers["content-length"] = str(len(decision.body))

        answer = pb.ProcessingResponse()
        common = getattr(answer, self._answers).response
        common.clear_route_cache = True
        wire.write(common.header_mutation, set_headers)
        wire.remove(common.header_mutation, removed, keep=set_headers)
        if decision.destination:
            metadata: dict[str, Any] = {wire.DESTINATION: set_headers[wire.DESTINATION]}
            if decision.scores:
                metadata[messages.SCORES_KEY] = dict(decision.scores)
            answer.dynamic_metadata.update({messages.LB_NAMESPACE: metadata})
        if decision.body is not None and not echoed:
            common.body_mutation.body = decision.body
        yield Send(answer)

        if echoed:
            body = self._body[0] if decision.body is None else decision.body
            for message in messages.echo("request_body", body, end_of_stream=not self._trailers):
                yield Send(message)
            if self._trailers:
                yield Send(messages.answer(request_trailers={}))

    def _too_large(self) -> list[Effect]:
        limit = self._max_body_bytes
        return self._reject(
            Rejected(status=413, message=f"the request body is larger than {limit} bytes", code="request_too_large")
        )

    def _reject(self, rejected: Rejected) -> list[Effect]:
        answer = messages.immediate(rejected, self.request_id)  # may raise; the state must not have changed then
        self.request = Request.CLOSED
        self._body = []
        return [Send(answer), Close()]

    def _bypass(self) -> list[Effect]:
        if self.request in (Request.FORWARDED, Request.BYPASSED):
            return []
        effects: list[Effect] = [CancelDecide()] if self.request is Request.DECIDING else []
        self.request = Request.BYPASSED
        self._held = []
        return effects

    # --- the response half --------------------------------------------------------------------------------------

    def _response_begins(self, message: Any) -> list[Effect]:
        if self.response is not Response.WAITING:
            raise ProtocolError("a second response_headers message in one stream")
        self.response = Response.OPEN
        answer = messages.answer(response_headers={})
        served, told = messages.served(message), self._response_headers
        if told and served and self._first and served != self._first:  # the gateway went on to a fallback
            told = {**told, SERVED_BY: served}
        wire.write(answer.response_headers.response.header_mutation, told)
        if not self._observed and self._response_mode != DUPLEX:
            # Honoured where the gateway says allow_mode_override; elsewhere the body keeps coming and is observed.
            answer.mode_override.response_header_mode = ProcessingMode.HeaderSendMode.SEND
            answer.mode_override.response_body_mode = ProcessingMode.BodySendMode.NONE
        effects: list[Effect] = [Send(answer)]
        if self._observer is not None:
            headers = wire.read(message.response_headers.headers)
            status = headers.pop(":status", "")
            code = int(status) if status.isdecimal() else 0
            effects.append(ResponseHeaders(self._observer, code, headers, served))
        if message.response_headers.end_of_stream:
            effects += self._finish()
        return effects

    def _response_body(self, body: Any) -> list[Effect]:
        self.response = Response.OPEN  # already is, unless the gateway skips response headers
        self._observed = True
        effects: list[Effect]
        if self._response_mode == DUPLEX:
            effects = [Send(m) for m in messages.echo("response_body", body.body, body.end_of_stream)]
        else:
            effects = [Send(messages.answer(response_body={}))]
        if self._observer is not None and body.body:
            effects.append(ResponseChunk(self._observer, body.body))
        if body.end_of_stream:
            effects += self._finish()
        return effects

    def _finish(self) -> list[Effect]:
        self.response = Response.ENDED
        observer, self._observer = self._observer, None
        return [Finished(observer)] if observer is not None else []
