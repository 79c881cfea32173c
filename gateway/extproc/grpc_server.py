"""The gRPC server around the ext-proc service: sockets, limits, TLS, health, drain."""

import asyncio
import logging

import grpc
import msgspec

from gateway.extproc.decision import Decider
from gateway.extproc.grpc_service import ProcessorService
from gateway.extproc.health import Health
from gateway.extproc.server_tls import Reloading, TlsFiles

logger = logging.getLogger("gateway.extproc")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may change about the server."""

    address: str = "127.0.0.1:9002"  # port 0 = any free one
    health_address: str | None = None  # a second, plaintext port with the health service only
    tls: TlsFiles | None = None  # None = plaintext
    max_body_bytes: int = 64 * 1024 * 1024  # larger requests get 413
    decide_timeout_s: float = 8.0  # a decision that takes longer is answered with 504
    max_concurrent_streams: int = 10_000  # per connection; Envoy opens one connection per worker
    drain_s: float = 5.0  # how long new requests are still taken after NOT_SERVING
    grace_s: float = 30.0  # how long running requests may take to finish after that


class Server:
    """`start`, then `set_serving(True)` once the router is ready, then `drain`."""

    def __init__(self, decider: Decider, settings: ServerSettings, service: ProcessorService | None = None) -> None:
        self.settings = settings
        self.service = service or ProcessorService(
            decider, max_body_bytes=settings.max_body_bytes, decide_timeout_s=settings.decide_timeout_s
        )
        self.health = Health()
        self.tls = Reloading(settings.tls) if settings.tls else None
        self.port = 0
        self.health_port: int | None = None
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> int:
        """Listen; returns the port. Raises OSError when an address cannot be bound."""
        settings = self.settings
        # gRPC's default of 4 MB is less than one long prompt. A BUFFERED body is one message; 1 MiB for its framing.
        limit = settings.max_body_bytes + 1024 * 1024
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.max_concurrent_streams", settings.max_concurrent_streams),
                # Proxies ping to notice a picker that hangs; gRPC would call that abuse and end the connection.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.so_reuseport", 0),  # a second process must fail to bind, not share half of the requests
            ]
        )
        server.add_generic_rpc_handlers((self.service.handler(),))
        self.health.register(server)
        await self.health.start()
        self.port = self._bind(server, settings.address, self.tls)
        servers = [server]
        if settings.health_address is not None:
            health = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
            self.health.register(health)
            self.health_port = self._bind(health, settings.health_address, None)
            servers.append(health)
        for each in servers:
            await each.start()
        self._servers = servers
        logger.info("extproc_listening address=%s port=%d tls=%s", settings.address, self.port, self.tls is not None)
        return self.port

    async def set_serving(self, serving: bool) -> None:
        """What health checks are told; requests are answered either way."""
        await self.health.set_serving(serving)

    async def drain(self) -> None:
        """NOT_SERVING at once, keep answering for `drain_s`, then stop; running requests get `grace_s`.

        grpc.aio refuses new streams as soon as it is told to stop: without the wait, requests that the proxy sends
        before its next health check would fail.
        """
        logger.info("drain_started open_streams=%d", self.service.open_streams)
        await self.set_serving(False)
        await asyncio.sleep(self.settings.drain_s)
        await self.stop(self.settings.grace_s)

    async def stop(self, grace_s: float | None = 0) -> None:
        """Refuse new streams; wait at most `grace_s` for the open ones, then cancel them."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        logger.info("extproc_stopped open_streams=%d", self.service.open_streams)
        self._servers = []

    def _bind(self, server: grpc.aio.Server, address: str, tls: Reloading | None) -> int:
        try:
            port = (
                server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls.credentials())
            )
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        if port == 0:
            raise OSError(f"cannot listen on {address}: address in use or not available")
        return port
