"""The services on grpc.aio: the reference transport, and the fallback where libnghttp2 is not to be had."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import grpc

from gateway.extproc.calls import Receiver, Service
from gateway.extproc.grpc_wire import Status
from gateway.extproc.server_tls import Reloading

logger = logging.getLogger("gateway.extproc")

_GONE = (grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioTransport:
    """One listening address. Refuses new streams as soon as it is told to stop."""

    def __init__(
        self,
        services: Mapping[str, Service],
        *,
        max_message_bytes: int,
        max_concurrent_streams: int,
        ask_s: float = 30.0,
        answer_s: float = 30.0,
    ) -> None:
        """A peer that is silent for `ask_s` is pinged, and given up with its calls when that is not answered in `answer_s`."""
        self._server = grpc.aio.server(
            options=[
                # gRPC's default of 4 MB is less than one long prompt.
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", max_concurrent_streams),
                # Proxies ping to notice a picker that hangs; gRPC would call that abuse and end the connection.
                ("grpc.keepalive_permit_without_calls", 1),
                # gRPC's own 2 h are too long for the calls of a proxy whose machine is gone. What ends the connection is
                # the ping's own timeout; grpc.keepalive_timeout_ms alone does not (seen with grpcio 1.85).
                ("grpc.keepalive_time_ms", int(ask_s * 1000)),
                ("grpc.http2.ping_timeout_ms", int(answer_s * 1000)),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.so_reuseport", 0),  # a second process must fail to bind, not share half of the requests
            ]
        )
        self._server.add_generic_rpc_handlers((_Methods(services),))

    async def start(self, address: str, tls: Reloading | None) -> int:
        """Listen; returns the port. Raises OSError when the address cannot be bound."""
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, tls.credentials())
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        if port == 0:
            raise OSError(f"cannot listen on {address}: address in use or not available")
        await self._server.start()
        return port

    async def stop(self, grace_s: float | None) -> None:
        await self._server.stop(grace_s)


class _Methods(grpc.GenericRpcHandler):
    """Every method as a stream of bytes both ways; on the wire a call with one message is the same."""

    def __init__(self, services: Mapping[str, Service]) -> None:
        self._handlers: dict[str, Any] = {
            path: grpc.stream_stream_rpc_method_handler(_Handler(service).serve) for path, service in services.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method)


class _Handler:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def serve(self, _: Any, context: Any) -> None:
        """One call: its messages go to the receiver as they come, its answers leave in order."""
        call = _Call()
        receiver = self._service(call)
        reading = asyncio.create_task(_read(context, receiver))
        try:
            while (message := await call.outbox.get()) is not None:
                await context.write(message)
        except _GONE:
            logger.debug("peer_gone")
        finally:
            reading.cancel()
            if not call.over:
                call.over = True
                receiver.aborted()
        if call.status is not Status.OK:
            await context.abort(_CODES[call.status], call.message)


class _Call:
    """See `calls.Answers`."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.status, self.message = Status.OK, ""
        self.over = False

    def send(self, message: bytes) -> None:
        if not self.over:
            self.outbox.put_nowait(message)

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        if not self.over:
            self.over, self.status, self.message = True, status, message
            self.outbox.put_nowait(None)


async def _read(context: Any, receiver: Receiver) -> None:
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            receiver.message(message)
            del message  # or a body of megabytes would live until the response begins
    except _GONE:
        logger.debug("peer_gone")
    receiver.ended()
