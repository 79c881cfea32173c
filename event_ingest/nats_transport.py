"""One NATS connection that listens to Dynamo's KV events, on whichever of its two planes they come.

    core NATS    a subscription per form of subject, with wildcards for namespace and component
    JetStream    the older form: every stream named namespace-<ns>-component-<comp>-kv-events, from its first message on

Streams appear when their first worker does, so they are looked for again and again. Their consumers are ordered and leave
nothing behind on the server; nats-py starts one anew, at the right message, when the server forgets it. Core NATS repeats
nothing: what passes while the connection is down is gone, which is why `on_link` says when that was.

This file moves bytes. It lives in one asyncio loop and knows neither events nor an index.
"""

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError
from nats.js.errors import ServiceUnavailableError

log = logging.getLogger(__name__)

OnMessage: TypeAlias = Callable[[str, bytes, float | None], None]
"""Subject, body, and the server's own time of the message (s; JetStream only)."""

_STREAM = re.compile(r"namespace-.+-component-.+-kv-events")
_RETRY_S = 1.0
_LOOK_S = 5.0
_PAGE = 256  # streams in one answer of the server


class NatsTransport:
    """`run` for ever; cancel it to end. `servers` are URLs (nats://, tls://), `subjects` those of core NATS.

    `on_link(True)` comes before the first message after a connection, `on_link(False)` when it is lost.
    """

    def __init__(
        self,
        servers: Sequence[str],
        subjects: Sequence[str],
        *,
        on_message: OnMessage,
        on_link: Callable[[bool], None],
        jetstream: bool = True,
    ) -> None:
        self.connected = False
        self.streams: tuple[str, ...] = ()
        """JetStream streams that are followed."""
        self._servers, self._subjects = list(servers), tuple(subjects)
        self._on_message, self._on_link = on_message, on_link
        self._jetstream = jetstream
        self._subscriptions: dict[str, Any] = {}
        self._complained = ""
        self._plain = False  # the server was seen to have no JetStream

    async def run(self) -> None:
        client = await self._connect()
        try:
            for subject in self._subjects:
                await client.subscribe(subject, cb=self._core)
            while True:
                if self._jetstream and self.connected:
                    await self._follow_streams(client)
                await asyncio.sleep(_LOOK_S)
        finally:
            self.connected = False
            with contextlib.suppress(NatsError, OSError):
                await client.close()

    async def _connect(self) -> Client:
        while True:
            try:
                client: Client = await nats.connect(
                    self._servers,
                    name="warmroute",
                    connect_timeout=5,
                    reconnect_time_wait=_RETRY_S,
                    max_reconnect_attempts=-1,  # the picture ages meanwhile, and the trust says so
                    disconnected_cb=self._down,
                    reconnected_cb=self._up,
                    error_cb=self._failed,
                )
            except (OSError, NatsError, TimeoutError) as error:
                self._complain(f"connect to {', '.join(self._servers)}: {error}")
                await asyncio.sleep(_RETRY_S)
                continue
            await self._up()
            return client

    async def _up(self) -> None:
        self.connected = True
        self._complained = ""
        log.info("nats_connected servers=%s", ",".join(self._servers))
        self._on_link(True)

    async def _down(self) -> None:
        if self.connected:
            self.connected = False
            log.warning("nats_disconnected servers=%s", ",".join(self._servers))
            self._on_link(False)

    async def _failed(self, error: Exception) -> None:
        self._complain(str(error) or type(error).__name__)

    def _complain(self, what: str) -> None:
        """Once per kind of trouble: a server that is away would fill the log every second."""
        if what != self._complained:
            self._complained = what
            log.warning("nats_error error=%r", what)

    async def _core(self, message: Msg) -> None:
        self._on_message(message.subject, message.data, None)

    # JetStream

    async def _follow_streams(self, client: Client) -> None:
        context = client.jetstream()
        try:
            names: list[str] = []
            while True:
                page = await context.streams_info(offset=len(names))
                names += [info.config.name or "" for info in page]
                if len(page) < _PAGE:
                    break
            for name in names:
                if name not in self._subscriptions and _STREAM.fullmatch(name):
                    self._subscriptions[name] = await context.subscribe(
                        f"{name}.kv-events", stream=name, ordered_consumer=True, cb=self._stored
                    )
                    log.info("nats_stream_followed stream=%s", name)
            for gone in self._subscriptions.keys() - set(names):
                with contextlib.suppress(NatsError):
                    await self._subscriptions.pop(gone).unsubscribe()
                log.info("nats_stream_gone stream=%s", gone)
        except ServiceUnavailableError:
            if not self._plain:  # nothing unusual: newer releases of Dynamo do not use it
                self._plain = True
                log.info("nats_without_jetstream servers=%s", ",".join(self._servers))
        except (NatsError, JetStreamError, TimeoutError) as error:
            self._complain(f"JetStream: {error or type(error).__name__}")
        self.streams = tuple(sorted(self._subscriptions))

    async def _stored(self, message: Msg) -> None:
        try:
            stamp: float | None = message.metadata.timestamp.timestamp()
        except (NatsError, AttributeError, ValueError):
            stamp = time.time()
        self._on_message(message.subject, message.data, stamp)
