"""The server's half of a connection, without sockets: a client of the same HTTP/2 library on the other side."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import ngh2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.extproc.calls import Answers
from gateway.extproc.grpc_connection import ConnectionSettings, GrpcConnection
from gateway.extproc.grpc_wire import MessageReader, Status, framed

ECHO, SLOW, LOUD = "/test.Service/Echo", "/test.Service/Slow", "/test.Service/Loud"
CANCEL = 0x8


class Calls:
    """Receivers that write down what they are told."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []
        self.open: list[Answers] = []

    def services(self) -> dict[str, Callable[[Answers], Any]]:
        return {ECHO: lambda a: Echo(self, a), SLOW: lambda a: Slow(self, a), LOUD: lambda a: Loud(self, a)}

    def ends(self) -> int:
        return sum(what == "aborted" for what, _ in self.said)


class Slow:
    """Answers when the test wants."""

    def __init__(self, calls: Calls, answers: Answers) -> None:
        self.calls, self.answers = calls, answers
        calls.open.append(answers)

    def message(self, data: bytes) -> None:
        self.calls.said.append(("message", data))

    def ended(self) -> None:
        self.calls.said.append(("ended", None))

    def aborted(self) -> None:
        self.calls.said.append(("aborted", None))


class Echo(Slow):
    def message(self, data: bytes) -> None:
        super().message(data)
        self.answers.send(data)

    def ended(self) -> None:
        super().ended()
        self.answers.finish()


class Loud(Slow):
    """Has its say at the first message, whatever else is to come."""

    def message(self, data: bytes) -> None:
        super().message(data)
        self.answers.send(b"no")
        self.answers.finish(Status.INVALID_ARGUMENT, "enough")


class Wire:
    """Client and server, and the bytes between them."""

    def __init__(self, *, window: int | None = None, **changes: Any) -> None:
        self.calls, self.counts, self.now = Calls(), Counter[str](), 0.0
        self.server = GrpcConnection(self.calls.services(), ConnectionSettings(**changes), self.counts)
        self.client = ngh2.Connection(ngh2.Role.CLIENT)
        self.client.initiate_connection({} if window is None else {ngh2.Setting.INITIAL_WINDOW_SIZE: window})
        self.seen: list[Any] = []
        self.pump()

    def pump(self) -> None:
        """Until nobody has anything to say."""
        while True:
            to_server, to_client = self.client.data_to_send(), self.server.output(self.now)
            if to_server:
                self.server.received(to_server, self.now)
            if to_client:
                self.client.receive_data(to_client)
                self.seen += self.client.events()
            if not to_server and not to_client:
                return

    def call(self, path: str = ECHO, *headers: tuple[bytes, bytes], pump: bool = True, **pseudo: bytes) -> int:
        fields = {"method": b"POST", "scheme": b"http", "path": path.encode(), "authority": b"x", **pseudo}
        content = (
            () if any(name == b"content-type" for name, _ in headers) else ((b"content-type", b"application/grpc"),)
        )
        sent = [(b":" + name.encode(), value) for name, value in fields.items()]
        stream = self.client.send_request([*sent, *content, *headers])
        if pump:
            self.pump()
        return stream

    def send(self, stream: int, *messages: bytes, end: bool = False, pump: bool = True) -> None:
        self.client.send_data(stream, b"".join(map(framed, messages)), end_stream=end)
        if pump:
            self.pump()

    def status(self, stream: int) -> tuple[int, str] | None:
        """grpc-status and grpc-message of a call, None while it has none."""
        for event in self.seen:
            if isinstance(event, ngh2.TrailersReceived | ngh2.ResponseReceived) and event.stream_id == stream:
                fields = dict(event.headers)
                if b"grpc-status" in fields:
                    return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"").decode()
        return None

    def answers(self, stream: int) -> list[bytes]:
        reader = MessageReader(math.inf)  # type: ignore[arg-type]
        found: list[bytes] = []
        for event in self.seen:
            if isinstance(event, ngh2.DataReceived) and event.stream_id == stream:
                found += reader.feed(event.data)
        return found


# --- what costs a call


def test_an_unknown_method_is_unimplemented_and_the_connection_goes_on() -> None:
    wire = Wire()
    assert wire.status(wire.call("/no.Such/Method")) == (Status.UNIMPLEMENTED, "no method /no.Such/Method")
    stream = wire.call()
    wire.send(stream, b"a", end=True)
    assert (wire.answers(stream), wire.status(stream)) == ([b"a"], (Status.OK, ""))


@pytest.mark.parametrize("header", [{"method": b"GET"}, {}])
def test_what_is_no_grpc_is_415(header: dict[str, bytes]) -> None:
    wire = Wire()
    wire.call(ECHO, (b"content-type", b"application/json" if not header else b"application/grpc"), **header)
    answer = next(event for event in wire.seen if isinstance(event, ngh2.ResponseReceived))
    assert dict(answer.headers)[b":status"] == b"415"
    assert wire.server.open_calls == 0


def test_a_message_over_the_limit_is_refused_before_it_has_come_and_its_receiver_is_told() -> None:
    wire = Wire(max_message_bytes=100)
    stream = wire.call(SLOW)
    wire.client.send_data(stream, framed(b"x" * 101)[:5])
    wire.pump()
    status = wire.status(stream)
    assert status is not None
    assert status[0] == Status.RESOURCE_EXHAUSTED
    assert wire.calls.said == [("aborted", None)]
    assert wire.server.open_calls == 0


def test_a_stream_that_ends_within_a_message_is_an_error_of_its_own() -> None:
    wire = Wire()
    stream = wire.call(SLOW)
    wire.client.send_data(stream, framed(b"abc")[:-1], end_stream=True)
    wire.pump()
    assert wire.status(stream) == (Status.INTERNAL, "the stream ended inside a message")
    assert wire.calls.said == [("aborted", None)]


def test_a_broken_timeout_is_refused_and_one_that_passes_ends_the_call() -> None:
    wire = Wire()
    broken = wire.status(wire.call(SLOW, (b"grpc-timeout", b"soon")))
    assert broken is not None
    assert broken[0] == Status.INTERNAL
    wire.call(SLOW, (b"grpc-timeout", b"2S"))
    wire.now = 1.9
    wire.server.expire(wire.now)
    assert wire.server.open_calls == 1
    wire.now = 2.0
    wire.server.expire(wire.now)
    wire.pump()
    assert wire.server.open_calls == 0
    assert wire.calls.ends() == 1


# --- ends


def test_a_reset_in_the_same_read_as_its_message_is_one_abort_and_costs_nobody_else() -> None:
    wire = Wire()
    other, gone = wire.call(), wire.call()
    wire.send(gone, b"a", pump=False)
    held = wire.client.data_to_send()
    wire.client.reset_stream(gone, CANCEL)
    wire.server.received(held + wire.client.data_to_send(), wire.now)  # one read
    wire.pump()
    assert wire.calls.said == [("message", b"a"), ("aborted", None)]
    wire.calls.open[1].send(b"late")
    wire.calls.open[1].finish()
    wire.send(other, b"b", end=True)
    assert (wire.answers(other), wire.status(other)) == ([b"b"], (Status.OK, ""))
    assert wire.calls.ends() == 1


def test_an_answer_before_the_client_has_finished_comes_whole_with_its_status_and_stops_the_client() -> None:
    wire = Wire()
    stream = wire.call(LOUD)
    wire.send(stream, b"a", b"b")
    assert wire.calls.said == [("message", b"a")], "nothing after the end"
    assert wire.answers(stream) == [b"no"]
    assert wire.status(stream) == (Status.INVALID_ARGUMENT, "enough")
    resets = [event.error_code for event in wire.seen if isinstance(event, ngh2.StreamReset)]
    assert resets == [0]
    assert wire.server.open_calls == 0
    assert wire.calls.ends() == 0, "who finishes a call is not told of its end"


def test_a_half_closed_call_is_still_answered() -> None:
    wire = Wire()
    stream = wire.call(SLOW)
    wire.send(stream, b"a", end=True)
    assert wire.calls.said == [("message", b"a"), ("ended", None)]
    wire.calls.open[0].send(b"later")
    wire.calls.open[0].finish()
    wire.pump()
    assert (wire.answers(stream), wire.status(stream)) == ([b"later"], (Status.OK, ""))


def test_a_lost_connection_aborts_every_call_once() -> None:
    wire = Wire()
    wire.call(SLOW)
    wire.call(SLOW)
    wire.server.lost()
    wire.server.lost()
    assert wire.calls.ends() == 2
    wire.calls.open[0].send(b"x")
    assert wire.server.open_calls == 0


def test_a_call_without_a_message_is_ended_at_once() -> None:
    wire = Wire()
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", ECHO.encode()), (b":authority", b"x")]
    stream = wire.client.send_request([*fields, (b"content-type", b"application/grpc")], end_stream=True)
    wire.pump()
    assert wire.status(stream) == (Status.OK, "")


# --- windows


def test_bytes_of_streams_that_are_gone_return_to_the_connections_window() -> None:
    wire = Wire(connection_window_bytes=65_535, stream_window_bytes=65_535)
    for _ in range(20):
        stream = wire.call(SLOW)
        wire.send(stream, b"x" * 30_000, pump=False)
        wire.client.reset_stream(stream, CANCEL)
        wire.pump()
    stream = wire.call()
    wire.send(stream, b"y" * 60_000, end=True)
    assert wire.answers(stream) == [b"y" * 60_000]


def test_five_megabytes_pass_through_small_windows_both_ways() -> None:
    wire = Wire(window=20_000, connection_window_bytes=65_535, stream_window_bytes=16_384)
    stream = wire.call()
    wire.send(stream, b"z" * 5_000_000, end=True)
    assert wire.answers(stream) == [b"z" * 5_000_000]
    assert wire.status(stream) == (Status.OK, "")


def test_trailers_wait_for_a_body_that_the_peers_window_holds_back_and_so_does_the_reset() -> None:
    wire = Wire(window=0)
    stream = wire.call(LOUD)
    wire.send(stream, b"a")
    assert wire.status(stream) is None
    assert wire.server.open_calls == 1
    wire.client.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 100})
    wire.pump()
    assert (wire.answers(stream), wire.status(stream)) == ([b"no"], (Status.INVALID_ARGUMENT, "enough"))
    assert wire.server.open_calls == 0


# --- what costs the connection


@pytest.mark.parametrize(
    "bad",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x00\x00\x05\x00\x00\x00\x00\x00\x00hello",  # DATA on stream 0
        b"\x00\xff\xff\x00\x00\x00\x00\x00\x01" + b"x" * 65_535,  # longer than the largest frame
        b"\x00\x00\x03\x01\x04\x00\x00\x00\x63\xff\xff\xff",  # HPACK of nonsense
    ],
)
def test_broken_http2_ends_the_connection_with_a_word_and_aborts_its_calls(bad: bytes) -> None:
    if bad.startswith(b"GET"):
        server = GrpcConnection({}, ConnectionSettings(), counts := Counter())
        server.received(bad, 0.0)
        server.output(0.0)
        assert server.finished
    else:
        wire = Wire()
        wire.call(SLOW)
        wire.server.received(bad, wire.now)
        said = wire.server.output(wire.now)
        assert said[3] == 0x7, "GOAWAY"
        assert wire.server.finished
        wire.server.lost()
        assert wire.calls.ends() == 1
        counts = wire.counts
    assert counts["connection_errors"] == 1


def test_resets_by_the_thousand_are_how_the_proxy_ends_streams() -> None:
    wire = Wire()
    for _ in range(3000):
        wire.client.reset_stream(wire.call(SLOW, pump=False), 0x2)
        wire.pump()
    stream = wire.call()
    wire.send(stream, b"a", end=True)
    assert wire.status(stream) == (Status.OK, "")
    assert wire.counts["connection_errors"] == 0


def test_goodbye_lets_what_is_on_its_way_in_and_then_nothing_more() -> None:
    wire = Wire()
    first = wire.call(SLOW)
    wire.server.say_goodbye()
    early = wire.client.send_request(
        [
            *((b":method", b"POST"), (b":scheme", b"http"), (b":path", SLOW.encode()), (b":authority", b"x")),
            (b"content-type", b"application/grpc"),
        ]
    )
    wire.pump()
    wire.server.refuse_new()
    wire.pump()
    away = [event.last_stream_id for event in wire.seen if isinstance(event, ngh2.GoAwayReceived)]
    assert away == [2**31 - 1, early]
    assert wire.server.open_calls == 2
    for answers in wire.calls.open:
        answers.finish()
    wire.pump()
    assert [wire.status(stream) for stream in (first, early)] == [(Status.OK, "")] * 2


# --- whatever comes, however it is cut


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=200), st.sampled_from(["send", "end", "reset"]))),
    st.data(),
)
def test_the_same_bytes_cut_anywhere_tell_receivers_the_same(
    actions: list[tuple[int, bytes, str]], data: st.DataObject
) -> None:
    def play(cut: Callable[[bytes], list[bytes]]) -> tuple[list[tuple[str, Any]], int]:
        wire = Wire()
        streams = [wire.call(path, pump=False) for path in (ECHO, SLOW, LOUD)]
        alive = set(streams)
        for number, payload, what in actions:
            if (stream := streams[number]) in alive:
                if what == "reset":
                    wire.client.reset_stream(stream, CANCEL)
                else:
                    wire.client.send_data(stream, framed(payload), end_stream=what == "end")
                if what != "send":
                    alive.discard(stream)
        for piece in cut(wire.client.data_to_send()):
            wire.server.received(piece, 0.0)
        wire.server.lost()
        return wire.calls.said, wire.server.open_calls

    def pieces(stream: bytes) -> list[bytes]:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        return [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]

    assert play(lambda stream: [stream]) == play(pieces)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_nothing_that_a_peer_sends_raises(noise: bytes) -> None:
    wire = Wire()
    wire.call(SLOW)
    wire.server.received(noise, 0.0)
    wire.server.output(0.0)
    wire.server.received(noise, 0.0)
    wire.server.output(0.0)
    wire.server.lost()
    assert wire.server.open_calls == 0
    assert wire.calls.ends() <= 1 + len([what for what, _ in wire.calls.said if what != "aborted"])
