"""The ext-proc server on real loopback sockets, spoken to with the official client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.extproc.decision import Decided, Decider, Head, Rejected
from gateway.extproc.grpc_server import Server, ServerSettings, TransportName
from gateway.extproc.server_tls import Reloading, TlsError, TlsFiles

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


TRANSPORT: ContextVar[TransportName] = ContextVar("transport")


@pytest.fixture(params=["http2", "grpcio"], autouse=True)
def transport(request: pytest.FixtureRequest) -> None:
    """Every test runs on both transports."""
    TRANSPORT.set(request.param)


@asynccontextmanager
async def serving(decider: Decider, **settings: Any) -> AsyncIterator[Server]:
    server = Server(decider, ServerSettings(address="127.0.0.1:0", transport=TRANSPORT.get(), **settings))
    await server.start()
    await server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def stream_to(server: Server) -> AsyncIterator[Any]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield channel.stream_stream(
            METHOD,
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()


async def until(condition: Callable[[], Any], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"not within 5 s: {what}")


# --- failures


async def test_a_decider_that_raises_is_a_500_in_openais_shape_and_the_server_goes_on(
    messages: Any, scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(head: Head, body: bytes) -> Decided:
        if head.path == "/bad":
            raise RuntimeError("boom")
        return Decided(destination=["a:1"])

    async with serving(scripted(answer)) as server:
        async with stream_to(server) as call:
            await call.write(messages.head(end=True, path="/bad"))
            reply = await call.read()
            assert reply.immediate_response.status.code == 500
            assert json.loads(reply.immediate_response.body)["error"]["code"] == "internal_error"
        assert server.service.counts["decide_errors"] == 1
        assert any("decide_failed" in record.message and record.exc_info for record in caplog.records)
        async with stream_to(server) as call:
            await call.write(messages.head(end=True))
            assert (await call.read()).HasField("request_headers")


async def test_a_decision_that_cannot_be_carried_out_is_a_500_and_its_observer_is_told(
    messages: Any, scripted: Any, recorder: Any
) -> None:
    async def answer(head: Head, body: bytes) -> Decided:
        return Decided(destination=["a:1"], body=b"for a request without one", observer=recorder)

    async with serving(scripted(answer)) as server, stream_to(server) as call:
        await call.write(messages.head(end=True))
        assert (await call.read()).immediate_response.status.code == 500
        assert recorder.calls == [("aborted", "internal-error")]


async def test_an_observer_that_raises_is_counted_and_the_response_goes_on(messages: Any, scripted: Any) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    async def answer(head: Head, body: bytes) -> Decided:
        return Decided(destination=["a:1"], observer=Broken())

    async with serving(scripted(answer)) as server, stream_to(server) as call:
        for message in (messages.head(end=True), messages.response(), messages.response_body(b"x", end=True)):
            await call.write(message)
            assert (await call.read()) is not grpc.aio.EOF
        await until(lambda: server.service.counts["observer_errors"] == 3, "three observer errors")


async def test_a_decision_that_takes_too_long_is_504_and_is_cancelled(messages: Any, scripted: Any) -> None:
    cancelled = asyncio.Event()

    async def answer(head: Head, body: bytes) -> Decided:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Decided(destination=["a:1"])

    async with serving(scripted(answer), decide_timeout_s=0.05) as server, stream_to(server) as call:
        await call.write(messages.head(end=True))
        reply = await call.read()
        assert reply.immediate_response.status.code == 504
        await asyncio.wait_for(cancelled.wait(), 5)
        assert server.service.counts["decide_timeouts"] == 1


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_a_client_that_goes_away_while_deciding_cancels_the_decision(
    messages: Any, scripted: Any, how: str
) -> None:
    cancelled, begun = asyncio.Event(), asyncio.Event()

    async def answer(head: Head, body: bytes) -> Decided:
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Decided(destination=["a:1"])

    async with serving(scripted(answer)) as server, stream_to(server) as call:
        await call.write(messages.head(end=True))
        await asyncio.wait_for(begun.wait(), 5)
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
        await asyncio.wait_for(cancelled.wait(), 5)
        await until(lambda: server.service.open_streams == 0, "no open stream")


async def test_a_decision_made_although_it_was_cancelled_is_reported_as_aborted(
    messages: Any, scripted: Any, recorder: Any
) -> None:
    begun = asyncio.Event()

    async def answer(head: Head, body: bytes) -> Decided:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return Decided(destination=["a:1"], observer=recorder)

    async with serving(scripted(answer)) as server, stream_to(server) as call:
        await call.write(messages.head(end=True))
        await asyncio.wait_for(begun.wait(), 5)
        call.cancel()
        await until(lambda: recorder.calls, "the observer is told")
        assert recorder.calls == [("aborted", "ended-before-forwarding")]


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_the_end_of_the_stream_during_the_response_is_an_abort(
    messages: Any, scripted: Any, recorder: Any, how: str
) -> None:
    async def answer(head: Head, body: bytes) -> Decided:
        return Decided(destination=["a:1"], observer=recorder)

    async with serving(scripted(answer)) as server, stream_to(server) as call:
        for message in (messages.head(end=True), messages.response(), messages.response_body(b"x")):
            await call.write(message)
            await call.read()
        if how == "cancel":
            call.cancel()
        else:
            await call.done_writing()
        await until(lambda: recorder.ends, "the observer is told")
        assert recorder.ends == [("aborted", "ended-during-response")]


async def test_a_message_out_of_order_ends_its_stream_and_no_other(messages: Any, scripted: Any) -> None:
    async def answer(head: Head, body: bytes) -> Decided:
        return Decided(destination=["a:1"])

    async with serving(scripted(answer)) as server:
        async with stream_to(server) as call:
            await call.write(messages.body(b"?"))
            with pytest.raises(grpc.aio.AioRpcError, match="request_body before request_headers") as refused:
                await call.read()
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.service.counts["protocol_errors"] == 1
        async with stream_to(server) as call:
            await call.write(messages.head(end=True))
            assert (await call.read()).HasField("request_headers")


async def test_a_taken_port_is_a_clear_error(scripted: Any) -> None:
    async def answer(head: Head, body: bytes) -> Rejected:
        return Rejected(status=503, message="")

    async with serving(scripted(answer)) as server:
        second = Server(scripted(answer), ServerSettings(address=f"127.0.0.1:{server.port}"))
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await second.start()


# --- service


async def test_a_body_of_10_mb_passes_in_one_message_and_the_rejection_ends_the_stream(
    messages: Any, scripted: Any
) -> None:
    async def answer(head: Head, body: bytes) -> Rejected:
        return Rejected(status=400, message=f"{len(body)} bytes")

    async with serving(scripted(answer)) as server, stream_to(server) as call:
        await call.write(messages.head())
        await call.read()
        await call.write(messages.body(b"x" * 10_000_000))
        reply = await call.read()
        assert "10000000 bytes" in reply.immediate_response.body.decode()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK
        assert server.service.counts["rejected"] == 1


async def test_many_streams_at_once_all_finish(messages: Any, scripted: Any, recorder: Any) -> None:
    async def answer(head: Head, body: bytes) -> Decided:
        await asyncio.sleep(0.01)
        return Decided(destination=["a:1"], observer=recorder)

    async with serving(scripted(answer)) as server:

        async def one() -> None:
            async with stream_to(server) as call:
                for message in (
                    messages.head(),
                    messages.body(b"{}"),
                    messages.response(),
                    messages.response_body(b"x", end=True),
                ):
                    await call.write(message)
                    await call.read()
                await call.done_writing()
                assert await call.read() is grpc.aio.EOF

        await asyncio.gather(*(one() for _ in range(50)))
        await until(lambda: server.service.open_streams == 0, "no open stream")
        assert recorder.ends == [("finished",)] * 50
        assert server.service.counts["decided"] == 50


# --- health and drain


async def test_health_names_and_drain(messages: Any, scripted: Any, recorder: Any) -> None:
    async def answer(head: Head, body: bytes) -> Decided:
        return Decided(destination=["a:1"], observer=recorder)

    settings = {"drain_s": 0.3, "grace_s": 5.0, "health_address": "127.0.0.1:0"}
    async with serving(scripted(answer), **settings) as server, stream_to(server) as running:
        await running.write(messages.head(end=True))
        await running.read()
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as separate,
        ):
            stub, other = health_pb2_grpc.HealthStub(channel), health_pb2_grpc.HealthStub(separate)

            async def status(of: Any, name: str) -> int:
                reply = await of.Check(health_pb2.HealthCheckRequest(service=name))
                return int(reply.status)

            names = ["", "readiness", "liveness", "envoy.service.ext_proc.v3.ExternalProcessor"]
            for name in names:
                assert await status(stub, name) == await status(other, name) == 1
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await status(stub, "nobody")
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND

            watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
            assert (await watch.read()).status == 1
            draining = asyncio.create_task(server.drain())
            assert (await watch.read()).status == 2
            assert [await status(stub, name) for name in names] == [2, 2, 1, 2]
            watch.cancel()

            async with stream_to(server) as late:
                await late.write(messages.head(end=True))
                assert (await late.read()).HasField("request_headers"), "still answered while draining"
            await asyncio.sleep(0.5)
            await running.write(messages.response())
            await running.read()
            await running.write(messages.response_body(b"x", end=True))
            await running.read()
            await running.done_writing()
            await asyncio.wait_for(draining, 3)
        assert ("finished",) in recorder.ends


# --- TLS


async def healthy_over_tls(server: Server, root: bytes) -> bool:
    credentials = grpc.ssl_channel_credentials(root_certificates=root)
    # A subchannel of an earlier certificate must not be reused.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials, options=options) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service="liveness")
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=3)
        except grpc.aio.AioRpcError:
            return False
        return bool(reply.status == 1)


async def test_certificates_are_replaced_without_a_restart_and_a_broken_one_is_not_taken(
    tmp_path: Path, self_signed: Callable[[Path, str], None], scripted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(head: Head, body: bytes) -> Rejected:
        return Rejected(status=503, message="")

    caplog.set_level(logging.INFO)
    files = TlsFiles(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")
    self_signed(tmp_path, "first")
    first = files.certificate.read_bytes()
    async with serving(scripted(answer), tls=files) as server:
        assert await healthy_over_tls(server, first)
        self_signed(tmp_path, "second")
        second = files.certificate.read_bytes()
        assert await healthy_over_tls(server, second)
        assert not await healthy_over_tls(server, first)
        files.certificate.write_bytes(b"half a fi")
        assert await healthy_over_tls(server, second)
        assert server.tls is not None
        assert server.tls.reloads == 1
        assert server.tls.failures >= 1
        assert any("tls_reload_failed" in record.message for record in caplog.records)


def test_missing_and_foreign_files_are_named(tmp_path: Path, self_signed: Callable[[Path, str], None]) -> None:
    files = TlsFiles(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")
    self_signed(tmp_path, "x")
    with pytest.raises(TlsError, match=r"nowhere\.crt: No such file"):
        Reloading(TlsFiles(certificate=tmp_path / "nowhere.crt", key=files.key))
    with pytest.raises(TlsError, match=r"tls\.crt: not a PEM file with a key"):
        Reloading(TlsFiles(certificate=files.certificate, key=files.certificate))
