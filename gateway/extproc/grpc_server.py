"""The gRPC server around the ext-proc service: transport, limits, TLS, health, drain."""

import asyncio
import importlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Literal, Protocol, TypeAlias

import msgspec

from gateway.extproc.calls import Service
from gateway.extproc.decision import Decider
from gateway.extproc.health import SERVICE, Health
from gateway.extproc.process_stream import ProcessStream
from gateway.extproc.processor import Processor
from gateway.extproc.server_tls import Reloading, TlsFiles

logger = logging.getLogger("gateway.extproc")

PROCESS = f"/{SERVICE}/Process"
TransportName: TypeAlias = Literal["auto", "http2", "grpcio"]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may change about the server."""

    address: str = "127.0.0.1:9002"  # port 0 = any free one
    health_address: str | None = None  # a second, plaintext port with the health service only
    transport: TransportName = "auto"  # http2 where its library can be imported, else grpcio
    tls: TlsFiles | None = None  # None = plaintext
    max_body_bytes: int = 64 * 1024 * 1024  # larger requests get 413
    decide_timeout_s: float = 8.0  # a decision that takes longer is answered with 504
    max_concurrent_streams: int = 10_000  # per connection; Envoy opens one connection per worker
    drain_s: float = 5.0  # how long new requests are still taken after NOT_SERVING
    grace_s: float = 30.0  # how long running requests may take to finish after that


class Transport(Protocol):
    """Sockets and gRPC: gives every call to the receiver that its service makes."""

    async def start(self, address: str, tls: Reloading | None) -> int: ...

    async def stop(self, grace_s: float | None) -> None: ...


class Server:
    """`start`, then `set_serving(True)` once the router is ready, then `drain`."""

    def __init__(self, decider: Decider, settings: ServerSettings) -> None:
        self.settings = settings
        self.service = Processor(
            decider, max_body_bytes=settings.max_body_bytes, decide_timeout_s=settings.decide_timeout_s
        )
        self.health = Health()
        self.tls = Reloading(settings.tls) if settings.tls else None
        self.transport = chosen(settings.transport)
        self.port = 0
        self.health_port: int | None = None
        self._transports: list[Transport] = []

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError when an address cannot be bound."""
        settings, checks = self.settings, self.health.services()
        process: dict[str, Service] = {PROCESS: lambda call: ProcessStream(self.service, call)}
        self.port = await self._open({**process, **checks}, settings.address, self.tls, self.service.counts)
        if settings.health_address is not None:
            self.health_port = await self._open(checks, settings.health_address, None, Counter())
        logger.info(
            "extproc_listening address=%s port=%d tls=%s transport=%s",
            *(settings.address, self.port, self.tls is not None, self.transport),
        )
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told; requests are answered either way."""
        self.health.set_serving(serving)

    async def drain(self) -> None:
        """NOT_SERVING at once, keep answering for `drain_s`, then stop; running requests get `grace_s`.

        Without the wait, requests that the proxy sends before its next health check would fail.
        """
        logger.info("drain_started open_streams=%d", self.service.open_streams)
        await self.set_serving(False)
        await asyncio.sleep(self.settings.drain_s)
        await self.stop(self.settings.grace_s)

    async def stop(self, grace_s: float | None = 0) -> None:
        """Refuse new streams; wait at most `grace_s` for the open ones, then cancel them."""
        await asyncio.gather(*(transport.stop(grace_s) for transport in self._transports))
        logger.info("extproc_stopped open_streams=%d", self.service.open_streams)
        self._transports = []

    async def _open(
        self, services: Mapping[str, Service], address: str, tls: Reloading | None, counts: "Counter[str]"
    ) -> int:
        settings = self.settings
        # A BUFFERED body is one message; 1 MiB for what is around it.
        limit = settings.max_body_bytes + 1024 * 1024
        streams = settings.max_concurrent_streams
        transport = (
            http2(services, limit, streams, counts) if self.transport == "http2" else grpcio(services, limit, streams)
        )
        port = await transport.start(address, tls)
        self._transports.append(transport)
        return port


def chosen(wanted: TransportName) -> str:
    """The transport that is used; `auto` is settled, with a word where it is the slower one. Raises ValueError for one that
    is not to be had."""
    if wanted == "grpcio":
        return wanted
    try:
        importlib.import_module("ngh2")
    except ImportError as error:
        if wanted == "http2":
            raise ValueError(f"transport http2 needs the package ngh2 ({error}); use auto or grpcio") from error
        logger.warning("transport_fallback transport=grpcio reason=%r", str(error))
        return "grpcio"
    return "http2"


def http2(
    services: Mapping[str, Service], max_message_bytes: int, max_concurrent_streams: int, counts: "Counter[str]"
) -> Transport:
    # Imported here: where libnghttp2 has no build, the other transport works without it.
    from gateway.extproc.grpc_connection import ConnectionSettings
    from gateway.extproc.http2_transport import Http2Transport

    settings = ConnectionSettings(max_message_bytes=max_message_bytes, max_concurrent_streams=max_concurrent_streams)
    return Http2Transport(services, settings, counts)


def grpcio(services: Mapping[str, Service], max_message_bytes: int, max_concurrent_streams: int) -> Transport:
    from gateway.extproc.grpcio_transport import GrpcioTransport

    return GrpcioTransport(services, max_message_bytes=max_message_bytes, max_concurrent_streams=max_concurrent_streams)
