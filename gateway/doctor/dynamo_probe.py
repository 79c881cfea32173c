"""Listen to everything that Dynamo workers publish over NATS, whatever the configuration subscribes to."""

import asyncio
import contextlib
import time
from collections import Counter
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from event_ingest.dynamo_wire import SUBSCRIPTIONS, decode, parse_subject
from gateway.config_document import Dynamo as Settings
from gateway.doctor.facts import Dynamo
from gateway.dynamo_workers import MOST_BYTES, WorkerMapError, discovered, read_workers, workers_of

CONNECT_S = 2.0


class DynamoProbe:
    """Listens from `start` to `close`; `facts` is what was heard so far."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Client | None = None
        self._subjects: Counter[str] = Counter()
        self._workers: dict[int, str] = {}
        self._error = ""
        self._started = time.monotonic()
        self.known: dict[int, str] = {}
        """Worker id -> `ip:port`, or the IP alone where only that is known."""

    async def start(self) -> None:
        """Connect and subscribe; what is wrong with that becomes a fact."""
        try:
            self.known = _known(self._settings)
        except (OSError, WorkerMapError) as error:
            self._error = str(error)
        self._started = time.monotonic()
        try:
            async with asyncio.timeout(CONNECT_S + 1):
                self._client = await nats.connect(
                    list(self._settings.servers),
                    name="warmroute-doctor",
                    connect_timeout=int(CONNECT_S),
                    allow_reconnect=False,
                    error_cb=_ignore,
                )
                for subject in SUBSCRIPTIONS:
                    await self._client.subscribe(subject, cb=self._message)
                await self._client.flush()
        except (OSError, NatsError, TimeoutError) as error:
            self._error = f"{', '.join(self._settings.servers)}: {error or type(error).__name__}"
            return
        await self._stored()

    async def _stored(self) -> None:
        """The last message of every JetStream stream: who published there, without reading it all."""
        if self._client is None or not self._settings.jetstream:
            return
        context = self._client.jetstream(timeout=1)
        with contextlib.suppress(
            NatsError, JetStreamError, TimeoutError
        ):  # a server without JetStream is nothing unusual
            for info in await context.streams_info():
                subject = f"{info.config.name}.kv-events"
                if parse_subject(subject) is not None and info.state.messages:
                    last = await context.get_last_msg(info.config.name or "", subject)
                    self._heard(subject, last.data or b"")

    async def _message(self, message: Msg) -> None:
        self._heard(message.subject, message.data)

    def _heard(self, subject: str, body: bytes) -> None:
        self._subjects[subject] += 1
        for event in decode(body, self._settings.block_tokens).events:
            self._workers[event.worker_id] = subject

    def facts(self) -> Dynamo:
        return Dynamo(
            servers=tuple(self._settings.servers),
            error=self._error,
            subjects=dict(self._subjects),
            workers=dict(self._workers),
            namespace=self._settings.namespace,
            components=tuple(self._settings.components),
            known=dict(self.known),
            block_tokens=self._settings.block_tokens,
            seconds=time.monotonic() - self._started,
        )

    async def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(NatsError, OSError):
                await self._client.close()


async def _ignore(error: Exception) -> None:
    """What goes wrong while connecting is raised there as well."""


def _known(settings: Settings) -> dict[int, str]:
    known = workers_of(settings.endpoints, "warmroute.dynamo.endpoints")
    place = Path(settings.discovery) if settings.discovery is not None else None
    if place is not None and place.is_dir():
        return {**discovered(place, settings.namespace), **known}
    if place is not None:
        with place.open() as file:
            known |= read_workers(file.read(MOST_BYTES), str(place))
    return known
