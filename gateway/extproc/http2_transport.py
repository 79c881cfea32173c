"""The services on asyncio sockets, with gRPC and HTTP/2 done by `grpc_connection`: the transport that costs least.

One protocol object per connection moves bytes: all of one read is handed out, then written at once. While the peer does not
read, we do not either.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping
from typing import cast

from gateway.extproc.calls import Service
from gateway.extproc.grpc_connection import ConnectionSettings, GrpcConnection
from gateway.extproc.server_tls import Reloading

logger = logging.getLogger("gateway.extproc")

_LOOK_S = 0.5  # how often deadlines and silent peers are looked for
_ASK_S, _GIVE_UP_S = 30.0, 60.0  # a peer that was silent for so long is pinged, and then given up
_ROUND_TRIP_S = 0.2  # between the notice that we will stop and refusing what comes after it
_FLUSH_S = 1.0  # for what was said last to leave, when we stop
_BACKLOG = 1024


class Http2Transport:
    """One listening address."""

    def __init__(
        self, services: Mapping[str, Service], settings: ConnectionSettings, counts: "Counter[str] | None" = None
    ) -> None:
        """`counts`: see `GrpcConnection`."""
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.connections: set[_Connection] = set()
        self._services, self._settings = services, settings
        self._server: asyncio.Server | None = None
        self._looking: asyncio.Task[None] | None = None
        self._idle: asyncio.Event | None = None  # while we stop: set when the last call is over

    async def start(self, address: str, tls: Reloading | None) -> int:
        """Listen; returns the port. Raises OSError when the address cannot be bound."""
        try:
            listener = _listen(address)
        except OSError as error:
            raise OSError(f"cannot listen on {address}: {error.strerror or error}") from error
        loop = asyncio.get_running_loop()
        context = tls.context() if tls is not None else None
        self._server = await loop.create_server(lambda: _Connection(self), sock=listener, ssl=context, backlog=_BACKLOG)
        self._looking = asyncio.create_task(self._look(), name="http2-connections")
        return int(listener.getsockname()[1])

    async def stop(self, grace_s: float | None) -> None:
        """Take no more connections and streams; wait at most `grace_s` for the open calls, then end them."""
        if self._server is None:
            return
        self._server.close()
        if grace_s:
            for connection in list(self.connections):
                connection.grpc.say_goodbye()
            await asyncio.sleep(_ROUND_TRIP_S)  # streams that are on their way now are still taken
            for connection in list(self.connections):
                connection.grpc.refuse_new()
            if self.open_calls:
                self._idle = asyncio.Event()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), grace_s)
        for connection in list(self.connections):
            connection.close()
        deadline = asyncio.get_running_loop().time() + _FLUSH_S
        for connection in list(self.connections):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(connection.gone.wait(), deadline - asyncio.get_running_loop().time())
            connection.abort()  # a peer that reads nothing must not keep the process
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    @property
    def open_calls(self) -> int:
        return sum(connection.grpc.open_calls for connection in self.connections)

    def settled(self) -> None:
        """Some call may be over."""
        if self._idle is not None and not self.open_calls:
            self._idle.set()

    def connection(self, wake: Callable[[], None]) -> GrpcConnection:
        return GrpcConnection(self._services, self._settings, self.counts, wake)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_S)
            for connection in list(self.connections):
                connection.look(loop.time())


class _Connection(asyncio.Protocol):
    """One socket."""

    def __init__(self, owner: Http2Transport) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._busy = False  # within a read or a write: what is said now leaves at its end
        self._scheduled = False
        self._paused = False
        self._asked = False
        self.gone = asyncio.Event()
        self._heard_at = self._loop.time()
        self._transport: asyncio.Transport
        self.grpc = owner.connection(self._wake)

    # What asyncio says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclasses
        self._owner.connections.add(self)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() not in ("h2", None):
            logger.warning("alpn_refused peer=%s", transport.get_extra_info("peername"))
            self._transport.close()
            return
        self._flush()

    def data_received(self, data: bytes) -> None:
        self._heard_at, self._asked = self._loop.time(), False
        self._busy = True
        try:
            self.grpc.received(data, self._heard_at)
        except Exception:  # a fault of ours: this connection only, and its calls are told
            logger.exception("connection_failed open_calls=%d", self.grpc.open_calls)
            self._transport.abort()
            return
        finally:
            self._busy = False
        self._flush()

    def pause_writing(self) -> None:
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._flush()

    def connection_lost(self, _: Exception | None) -> None:
        self._owner.connections.discard(self)
        self.gone.set()
        self.grpc.lost()
        self._owner.settled()

    # What the server says

    def look(self, now: float) -> None:
        """Deadlines, and peers that went away without a word: their calls would stay open for ever."""
        self.grpc.expire(now)
        silent = now - self._heard_at
        if silent >= _GIVE_UP_S:
            logger.warning("peer_silent seconds=%d open_calls=%d", silent, self.grpc.open_calls)
            self._transport.abort()
        elif silent >= _ASK_S and not self._asked:
            self._asked = True
            self.grpc.ping()

    def close(self) -> None:
        self.grpc.lost()
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def _wake(self) -> None:
        if not self._busy and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        if self._paused or self._transport.is_closing():
            return
        self._busy = True
        try:
            data = self.grpc.output(self._loop.time())
        finally:
            self._busy = False
        if data:
            self._transport.write(data)
        if self.grpc.finished:
            self._transport.close()
        self._owner.settled()


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    everywhere = host == "::"
    return socket.create_server((host, int(port)), family=family, backlog=_BACKLOG, dualstack_ipv6=everywhere)
