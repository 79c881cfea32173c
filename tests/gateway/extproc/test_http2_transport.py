"""The sockets of the HTTP/2 transport: peers that fall silent, that do not read, that speak something else; the loop in use."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import ngh2
import pytest
import uvloop

from gateway.extproc.calls import Answers
from gateway.extproc.decision import Rejected
from gateway.extproc.grpc_connection import ConnectionSettings
from gateway.extproc.grpc_server import Server, ServerSettings, chosen
from gateway.extproc.grpc_wire import framed
from gateway.extproc.http2_transport import Http2Transport

PATH = "/test.Service/Echo"
HEADERS = [
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH.encode()), (b":authority", b"x")),
    (b"content-type", b"application/grpc"),
]
PING = 0x6


class Echo:
    """Answers every message with as many bytes as it says."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.aborts = 0

    def message(self, data: bytes) -> None:
        self.answers.send(b"x" * int(data))

    def ended(self) -> None:
        self.answers.finish()

    def aborted(self) -> None:
        self.aborts += 1


class World:
    """A transport with one service, and a raw client."""

    def __init__(self) -> None:
        self.calls: list[Echo] = []
        self.port = 0
        self.transport = Http2Transport({PATH: self._service}, ConnectionSettings())

    def _service(self, answers: Answers) -> Echo:
        self.calls.append(Echo(answers))
        return self.calls[-1]

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, ngh2.Connection]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        client = ngh2.Connection(ngh2.Role.CLIENT)
        client.initiate_connection()
        writer.write(client.data_to_send())
        return reader, writer, client


@asynccontextmanager
async def serving() -> AsyncIterator[World]:
    world = World()
    world.port = await world.transport.start("127.0.0.1:0", None)
    try:
        yield world
    finally:
        await world.transport.stop(0)


async def until(condition: Callable[[], Any], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"not within 5 s: {what}")


async def test_a_silent_peer_is_asked_and_then_given_up_with_its_calls() -> None:
    async with serving() as world:
        reader, writer, client = await world.connect()
        client.send_request(HEADERS)
        writer.write(client.data_to_send())
        await until(lambda: world.calls, "a call")
        (connection,) = world.transport.connections
        await reader.read(65536)  # the server's own settings
        now = asyncio.get_running_loop().time()
        connection.look(now + 31)
        connection.look(now + 40)
        asked = await asyncio.wait_for(reader.read(65536), 5)
        assert asked.count(bytes([0, 0, 8, PING, 0])) == 1, "once"
        assert not world.calls[0].aborts
        connection.look(now + 61)
        await until(lambda: world.calls[0].aborts == 1, "the call is aborted")
        assert world.transport.open_calls == 0
        writer.close()


async def test_a_peer_that_does_not_read_is_not_read_either_until_it_does() -> None:
    async with serving() as world:
        reader, writer, client = await world.connect()
        client.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 2**31 - 1})
        client.set_local_window_size(2**31 - 1)
        stream = client.send_request(HEADERS)
        client.send_data(stream, framed(b"30000000"))
        writer.write(client.data_to_send())
        await until(lambda: world.calls, "a call")
        (connection,) = world.transport.connections
        await until(lambda: connection._paused, "the server waits")
        received = 0
        while received < 30_000_000:
            received += len(await asyncio.wait_for(reader.read(1 << 20), 10))
        await until(lambda: not connection._paused, "it goes on")
        client.send_data(stream, framed(b"7"), end_stream=True)
        writer.write(client.data_to_send())
        assert await asyncio.wait_for(reader.read(1 << 16), 5)
        writer.close()


async def test_a_peer_that_reads_nothing_does_not_keep_the_server_from_stopping() -> None:
    async with serving() as world:
        _, writer, client = await world.connect()
        client.update_settings({ngh2.Setting.INITIAL_WINDOW_SIZE: 2**31 - 1})
        client.set_local_window_size(2**31 - 1)
        stream = client.send_request(HEADERS)
        client.send_data(stream, framed(b"30000000"))
        writer.write(client.data_to_send())
        await until(lambda: world.calls, "a call")
        (connection,) = world.transport.connections
        await until(lambda: connection._paused, "the server waits")
        await asyncio.wait_for(world.transport.stop(0.1), 10)
        await until(lambda: not world.transport.connections, "the connection is gone")
        assert world.calls[0].aborts == 1
        writer.transport.abort()


async def test_http_1_is_turned_away_and_the_server_goes_on() -> None:
    async with serving() as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(reader.read(), 5)  # until it is closed
        writer.close()
        assert world.transport.counts["connection_errors"] == 1
        await until(lambda: not world.transport.connections, "the connection is gone")
        _, other, client = await world.connect()
        client.send_request(HEADERS)
        other.write(client.data_to_send())
        await until(lambda: world.calls, "a call")
        other.close()


async def test_a_fault_of_ours_costs_one_connection_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as world:
        _, writer, client = await world.connect()
        stream = client.send_request(HEADERS)
        client.send_data(stream, framed(b"no number"))
        writer.write(client.data_to_send())
        await until(lambda: world.calls and world.calls[0].aborts, "the call is aborted")
        assert any("connection_failed" in record.message and record.exc_info for record in caplog.records)
        writer.close()


def test_it_runs_on_the_loop_that_the_gateway_uses(scripted: Any) -> None:
    async def answer(head: Any, body: bytes) -> Rejected:
        return Rejected(status=503, message="")

    async def run() -> None:
        server = Server(scripted(answer), ServerSettings(address="127.0.0.1:0", transport="http2"))
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        client = ngh2.Connection(ngh2.Role.CLIENT)
        client.initiate_connection()
        writer.write(client.data_to_send())
        assert await asyncio.wait_for(reader.read(9), 5), "settings"
        writer.close()
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def test_an_ipv6_address_for_everybody_takes_ipv4_too() -> None:
    world = World()
    try:
        port = await world.transport.start("[::]:0", None)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        await until(lambda: world.transport.connections, "a connection")
    await world.transport.stop(0)
    await until(lambda: not world.transport.connections, "the connection is closed")
    assert world.transport.open_calls == 0


def test_without_the_library_the_other_transport_is_taken_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert chosen("auto") == "http2"
    monkeypatch.setitem(sys.modules, "ngh2", None)
    assert chosen("auto") == "grpcio"
    assert "transport_fallback" in caplog.text
    with pytest.raises(ValueError, match=r"http2 needs the package ngh2 .* use auto or grpcio"):
        chosen("http2")
    assert chosen("grpcio") == "grpcio"
