# One HTTP/2 connection of a gRPC server, without its socket.
#
#   bytes --received--> messages and ends of calls, to their receivers      calls' answers --output--> bytes
#
#   a call   OPEN --client's END_STREAM--> HALF_CLOSED --finish--> gone
#              \--finish--> gone (trailers, then RST_STREAM NO_ERROR)
#            either --RST_STREAM, connection lost, deadline--> gone, the receiver is told `aborted`
#
# Rules
# 1. libnghttp2 (package ngh2) knows frames, HPACK, windows and stream states; this file knows gRPC on top of them. Nothing
#    here owns a socket, a clock or a task: bytes and times come in, bytes go out.
# 2. Whatever one read contains is handed out before anything is written, then one write takes all answers.
# 3. `send` and `finish` may come at any time, also when the peer is long gone: a reset in the same read as the message that is
#    being answered has closed the stream already. That is an abort like any other, told once.
# 4. A receiver is told exactly one end: `aborted`, unless it finished the call itself. `ended` (the client has no more messages)
#    is not an end: Envoy half-closes every stream, complete or not.
# 5. Trailers leave before the reset that follows them: a reset discards what is queued on its stream.
# 6. What a broken client sends costs its own call, what breaks HTTP/2 costs the connection: GOAWAY first, then the end.
# 7. Received bytes are acknowledged when they are taken, for streams that are gone too, or the connection's window would shrink.
"""gRPC over one HTTP/2 connection, sans-IO."""

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec
import ngh2

from gateway.extproc.calls import Receiver, Service
from gateway.extproc.grpc_wire import CONTENT_TYPE, MessageReader, Refused, Status, framed, timeout_s, trailers

logger = logging.getLogger("gateway.extproc")

_HEADERS = [(b":status", b"200"), (b"content-type", CONTENT_TYPE), (b"grpc-accept-encoding", b"identity")]
_NO_ERROR, _CANCEL = 0x0, 0x8
_MIB = 1024 * 1024


class ConnectionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one connection. Windows are large because the client is the gateway's own proxy, on a fast wire."""

    max_message_bytes: int = 64 * _MIB
    max_concurrent_streams: int = 10_000
    stream_window_bytes: int = 16 * _MIB
    connection_window_bytes: int = 64 * _MIB
    max_header_bytes: int = 65_536
    stream_resets: tuple[int, int] = (100_000, 20_000)
    """Burst and rate per second of RST_STREAM: Envoy ends every ext-proc stream with one, so the usual limits against rapid
    resets (1,000 and 33) would end its connection under load."""


class Call:
    """One open call, and what its receiver answers with (`calls.Answers`)."""

    __slots__ = ("_connection", "begun", "deadline", "half_closed", "metadata", "over", "reader", "receiver", "stream")

    def __init__(self, connection: "GrpcConnection", stream: int, metadata: Mapping[str, str]) -> None:
        self._connection = connection
        self.stream = stream
        self.metadata = metadata
        self.reader: MessageReader
        self.receiver: Receiver
        self.deadline = math.inf
        self.begun = False  # the response's headers are sent
        self.half_closed = False
        self.over = False

    def send(self, message: bytes) -> None:
        self._connection.send(self, message)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        self._connection.finish(self, status, message)


class GrpcConnection:
    """See the head of this file. `services`: path (`/package.Service/Method`) -> what takes its calls."""

    def __init__(
        self,
        services: Mapping[str, Service],
        settings: ConnectionSettings,
        counts: "Counter[str]",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called when there may be output although nothing was received. `counts`: connections, connection_errors,
        refused_calls, resets."""
        self._services, self._settings, self._counts, self._wake = services, settings, counts, wake
        self._calls: dict[int, Call] = {}
        self._to_reset: list[int] = []
        self._failed = False  # the peer broke HTTP/2
        self._dead = False  # so much that nothing can be said to it
        self._http = ngh2.Connection(
            ngh2.Role.SERVER,
            ngh2.Configuration(
                auto_window_update=False,
                stream_reset_rate_limit=settings.stream_resets,
                max_inbound_header_list_size=settings.max_header_bytes,
            ),
        )
        self._http.initiate_connection(
            {
                ngh2.Setting.MAX_CONCURRENT_STREAMS: settings.max_concurrent_streams,
                ngh2.Setting.INITIAL_WINDOW_SIZE: settings.stream_window_bytes,
                ngh2.Setting.MAX_HEADER_LIST_SIZE: settings.max_header_bytes,
                ngh2.Setting.ENABLE_PUSH: 0,
            }
        )
        self._http.set_local_window_size(settings.connection_window_bytes)
        counts["connections"] += 1

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    @property
    def finished(self) -> bool:
        """Nothing more will be read or written: close the socket once all output is out."""
        return self._dead or (not self._http.want_write and (self._failed or not self._http.want_read))

    # ------------------------------------------------------------------------------------------------------ incoming

    def received(self, data: bytes, now: float) -> None:
        """Bytes from the peer, at monotonic `now` (s). Never raises for what they contain."""
        try:
            self._http.receive_data(data)
        except ngh2.NGH2Error as error:  # what is left to say (a GOAWAY) is in the output
            self._broken(str(error) or type(error).__name__)
        self._hand_out(now)

    def _hand_out(self, now: float) -> None:
        for event in self._http.events():
            match event:
                case ngh2.DataReceived(stream, payload, ended):
                    self._data(stream, payload, ended)
                case ngh2.RequestReceived(stream, headers, ended):
                    self._opened(stream, headers, ended, now)
                case ngh2.TrailersReceived(stream, _):
                    self._half_closed(stream)
                case ngh2.StreamReset(stream, _):
                    self._counts["resets"] += 1
                    self._gone(stream)
                case ngh2.StreamClosed(stream, _, _):
                    self._gone(stream)
                case ngh2.ConnectionClosed(code, _):
                    if code:
                        self._broken(f"HTTP/2 error code {code}")
                    self.lost()

    def lost(self) -> None:
        """The connection is gone, or will be: all calls are aborted."""
        for stream in list(self._calls):
            self._gone(stream)

    def expire(self, now: float) -> None:
        """End the calls whose client waits no longer."""
        for call in [call for call in self._calls.values() if now >= call.deadline]:
            self._end(call, Status.DEADLINE_EXCEEDED, "the deadline of the call has passed")
            self._reset(call.stream, _CANCEL)
            call.receiver.aborted()

    def ping(self) -> None:
        """Ask whether the peer is still there; anything received is an answer."""
        self._tell(self._http.ping)

    def _opened(self, stream: int, headers: tuple[tuple[bytes, bytes], ...], ended: bool, now: float) -> None:
        fields = dict(headers)
        if fields.get(b":method") != b"POST" or not fields.get(b"content-type", b"").startswith(CONTENT_TYPE):
            self._http.send_response(stream, [(b":status", b"415"), (b"content-length", b"0")], end_stream=True)
            self._counts["refused_calls"] += 1
            return
        call = Call(self, stream, _metadata(headers))
        self._calls[stream] = call
        call.reader = MessageReader(self._settings.max_message_bytes, call.metadata.get("grpc-encoding", "identity"))
        call.receiver = _NOBODY
        path = fields.get(b":path", b"").decode("latin-1")
        service = self._services.get(path)
        try:
            if service is None:
                raise Refused(Status.UNIMPLEMENTED, f"no method {path}")
            if timeout := fields.get(b"grpc-timeout"):
                call.deadline = now + timeout_s(timeout)
        except Refused as refused:
            self._refuse(call, refused)
            return
        call.receiver = service(call)
        if ended:
            self._half_closed(stream)

    def _data(self, stream: int, payload: bytes, ended: bool) -> None:
        call = self._calls.get(stream)
        if call is not None and not call.over:
            try:
                for message in call.reader.feed(payload):
                    if call.over:
                        break
                    call.receiver.message(message)
            except Refused as refused:
                self._refuse(call, refused)
        if payload:
            with contextlib.suppress(ngh2.NGH2Error):  # of a connection that is broken
                self._http.acknowledge_received_data(len(payload), stream)
        if ended:
            self._half_closed(stream)

    def _half_closed(self, stream: int) -> None:
        call = self._calls.get(stream)
        if call is None or call.half_closed:
            return
        call.half_closed = True
        if call.over:
            return
        if call.reader.inside:
            self._refuse(call, Refused(Status.INTERNAL, "the stream ended inside a message"))
        else:
            call.receiver.ended()

    def _broken(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            self._counts["connection_errors"] += 1
            logger.warning("http2_broken why=%r open_calls=%d", why, len(self._calls))

    def _refuse(self, call: Call, refused: Refused) -> None:
        self._counts["refused_calls"] += 1
        self._end(call, refused.status, refused.message)
        call.receiver.aborted()

    def _gone(self, stream: int) -> None:
        call = self._calls.pop(stream, None)
        if call is not None and not call.over:
            call.over = True
            call.receiver.aborted()

    # ------------------------------------------------------------------------------------------------------ outgoing

    def send(self, call: Call, message: bytes) -> None:
        if call.over:
            return
        try:
            if not call.begun:
                self._http.send_response(call.stream, _HEADERS)
                call.begun = True
            self._http.send_data(call.stream, framed(message))
        except ngh2.NGH2Error:  # rule 3: its end is among the events that come next
            return
        self._wake()

    def finish(self, call: Call, status: Status, message: str) -> None:
        if not call.over:
            self._end(call, status, message)

    def output(self, now: float) -> bytes:
        """What is to be written now."""
        try:
            data = self._http.data_to_send()
            if self._to_reset:
                waiting, self._to_reset = self._to_reset, []
                for stream in waiting:
                    if stream in self._calls and self._pending(stream):
                        self._to_reset.append(stream)  # the peer's window is closed
                    else:
                        self._reset(stream, _NO_ERROR)
                data += self._http.data_to_send()
        except ngh2.NGH2Error as error:
            self._broken(str(error) or type(error).__name__)
            self._dead = True
            return b""
        self._hand_out(now)  # the ends of streams that this output closes
        return data

    def say_goodbye(self) -> None:
        """Announce the end: the peer opens no new streams once it has heard of it. Streams on their way are still taken."""
        self._tell(self._http.send_shutdown_notice)

    def refuse_new(self) -> None:
        """At least a round trip later: the last stream that was accepted is named, later ones will be retried elsewhere."""
        self._tell(self._http.send_goaway)

    def _tell(self, say: Callable[[], None]) -> None:
        with contextlib.suppress(ngh2.NGH2Error):  # the connection is broken or closing already
            say()
        self._wake()

    def _end(self, call: Call, status: Status, message: str) -> None:
        call.over = True
        try:
            if call.begun:
                self._http.send_trailers(call.stream, trailers(status, message))
            else:  # trailers only
                self._http.send_response(call.stream, [*_HEADERS[:2], *trailers(status, message)], end_stream=True)
        except ngh2.NGH2Error:  # rule 3
            return
        if not call.half_closed:
            self._to_reset.append(call.stream)
        self._wake()

    def _reset(self, stream: int, code: int) -> None:
        try:
            self._http.reset_stream(stream, code)
        except ngh2.NGH2Error:  # rule 3
            return

    def _pending(self, stream: int) -> int:
        try:
            return self._http.queued_body_size(stream)
        except ngh2.NGH2Error:
            return 0


class _Nobody:
    """The receiver of calls that are refused."""

    def message(self, data: bytes) -> None:
        return

    def ended(self) -> None:
        return

    def aborted(self) -> None:
        return


_NOBODY = _Nobody()


def _metadata(headers: tuple[tuple[bytes, bytes], ...]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers if not name.startswith(b":")}
