"""The thread that listens to Dynamo's events: one event loop, one NATS connection, one path per (worker, rank).

Events name workers by Dynamo's instance id. Somebody who knows which of them are endpoints of ours assigns a path to each;
events of all others are counted. As with the ZMQ subscriber, paths are fed by this thread only, and other threads talk to it
through its loop.

Silence is a state of its own. A subscription with the wrong namespace, or a fleet that publishes on another plane, looks just
like a fleet without traffic, so `alarm` says so once nothing was heard for too long.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from event_ingest.dynamo_stream import DynamoEvents, Worker
from event_ingest.dynamo_wire import SUBSCRIPTIONS, Subject, parse_subject
from event_ingest.nats_transport import NatsTransport
from event_ingest.pipeline import EventPath

log = logging.getLogger(__name__)

_REPEATED_S = 10.0
"""From a connection to the moment by which JetStream has repeated what was missed: nats-py starts a consumer that the server
has forgotten anew after two heartbeats of 5 s."""
_STRANGERS = 256
"""Unknown workers that are told apart; what is beyond is counted as one."""


class DynamoSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen. An empty namespace or list of components takes all."""

    servers: tuple[str, ...]
    namespace: str = ""
    components: tuple[str, ...] = ()
    block_tokens: int
    """Of the engines; the wire does not carry it."""
    jetstream: bool = True
    silent_after_s: float = 60.0

    def takes(self, subject: Subject) -> bool:
        """Whether a subject is one of those wanted; a worker-hash suffix on the namespace does not matter."""
        full = f"{subject.namespace}-{subject.suffix}" if subject.suffix else subject.namespace
        return (not self.namespace or self.namespace in (subject.namespace, full)) and (
            not self.components or subject.component in self.components
        )


class DynamoState(msgspec.Struct, frozen=True, kw_only=True):
    """What can be said about the listener now."""

    connected: bool
    streams: tuple[str, ...]
    messages: int
    """Messages of the wanted namespace and components."""
    elsewhere: int
    """Messages of others."""
    workers: int
    """Workers with a path."""
    strangers: dict[str, int]
    """Events by `component/worker id` of workers that nobody assigned."""
    skipped: dict[str, int]
    alarm: str
    """What is wrong, for people; empty while all is well."""


class DynamoListener:
    """See the head of this file. `errors` counts messages that our own code failed on."""

    def __init__(self, source: DynamoSource) -> None:
        self.errors = 0
        self.source = source
        self._events = DynamoEvents(self._path_for, source.block_tokens)
        self._transport = NatsTransport(
            source.servers,
            SUBSCRIPTIONS,
            on_message=self._message,
            on_link=self._link,
            jetstream=source.jetstream,
        )
        self._paths: dict[tuple[int, int], EventPath] = {}
        self._seen: dict[tuple[int, int], set[Worker]] = {}
        self._stored: set[tuple[int, int]] = set()  # workers whose events JetStream keeps for us
        self._storing = False  # whether the message at hand is one that JetStream keeps
        self._strangers: Counter[str] = Counter()
        self._heard = 0
        self._elsewhere = 0
        self._since: float | None = None  # when the connection came up, or was started, without a message since
        self._wanted = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="dynamo-events", daemon=True)

    # ------------------------------------------------------------------------------------------ from any other thread

    @property
    def thread_name(self) -> str:
        return self._thread.name

    @property
    def died(self) -> bool:
        """Whether the thread has ended although nobody stopped it."""
        return self._wanted and not self._thread.is_alive()

    def start(self) -> None:
        self._wanted = True
        self._since = time.monotonic()
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the connection and end the thread. Index entries stay as they are."""
        self._wanted = False
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(timeout_s)

    def assign(self, worker_id: int, rank: int, path: EventPath) -> None:
        """From now on `path` is what this worker's events go into."""
        self._call(lambda: self._assign((worker_id, rank), path))

    def release(self, worker_id: int, rank: int) -> "Future[None]":
        """Drop the entries of that worker's path; its slot is free once the future is done."""
        return self._call(lambda: self._release((worker_id, rank)))

    def observe(
        self, path: EventPath, keys: Sequence[int], prompt: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """Pass on what an engine reported about a request (`EventPath.observe`)."""

        def pass_on() -> None:
            path.observe(keys, prompt, predicted, cached, time.monotonic(), decided_at)

        self._call(pass_on)

    def state(self, now: float) -> DynamoState:
        return DynamoState(
            connected=self._transport.connected,
            streams=self._transport.streams,
            messages=self._heard,
            elsewhere=self._elsewhere,
            workers=len(self._paths),
            strangers=dict(self._strangers),
            skipped={str(reason): count for reason, count in dict(self._events.skipped).items()},
            alarm=self.alarm(now),
        )

    def alarm(self, now: float) -> str:
        """What is wrong with the subscription as a whole; empty while events come, or while it is too early to say."""
        since = self._since
        if since is None:
            if self._strangers and not self._seen:
                return f"events of {len(self._strangers)} workers, none of them known; add them to warmroute.dynamo"
            return ""
        if now - since < self.source.silent_after_s:
            return ""
        quiet = f"{now - since:.0f} s"
        if not self._transport.connected:
            return f"no connection to {', '.join(self.source.servers)} for {quiet}"
        if self._elsewhere:
            wanted = self.source.namespace or "any namespace"
            return f"nothing heard for {quiet} of {wanted}, only of others ({self._elsewhere} messages)"
        return (
            f"nothing heard for {quiet} on {' or '.join(SUBSCRIPTIONS)}; do the workers publish over NATS "
            "(DYN_EVENT_PLANE=nats) and to this server?"
        )

    def _call(self, action: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:  # the thread must go on; whoever asked is told
                self.errors += 1
                log.exception("command_failed")
                future.set_exception(error)
            else:
                future.set_result(None)

        if self._loop.is_closed():
            future.set_result(None)
        else:
            self._loop.call_soon_threadsafe(run)
        return future

    # ------------------------------------------------------------------------------------------- the listening thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._transport.run())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def _cancel(self) -> None:
        self._task.cancel()

    def _assign(self, who: tuple[int, int], path: EventPath) -> None:
        self._release(who)
        self._paths[who] = path

    def _release(self, who: tuple[int, int]) -> None:
        path = self._paths.pop(who, None)
        self._stored.discard(who)
        for worker in self._seen.pop(who, ()):
            self._events.forget(worker)
        if path is not None:
            path.close()

    def _path_for(self, worker: Worker, subject: Subject) -> EventPath | None:
        who = (worker.worker_id, worker.rank)
        path = self._paths.get(who)
        if path is None:
            self._stranger(f"{worker.component}/{worker.worker_id}")
            return None
        self._seen.setdefault(who, set()).add(worker)
        if self._storing:
            self._stored.add(who)
        log.info("dynamo_worker_heard stream=%s component=%s worker=%d", path.name, worker.component, worker.worker_id)
        return path

    def _stranger(self, name: str) -> None:
        if name not in self._strangers:
            if len(self._strangers) >= _STRANGERS:
                name = "others"
            else:
                log.warning("dynamo_worker_unknown worker=%s hint=%r", name, "add it to warmroute.dynamo.endpoints")
        self._strangers[name] += 1

    def _message(self, subject: str, body: bytes, stamp: float | None) -> None:
        parsed = parse_subject(subject)
        if parsed is not None and not self.source.takes(parsed):
            self._elsewhere += 1
            return
        now = time.monotonic()
        self._heard += 1
        self._since = None
        self._storing = stamp is not None
        try:
            self._events.feed(subject, body, now, stamp)
        except Exception:  # a fault of ours must not silence all workers
            self.errors += 1
            log.exception("message_failed subject=%s bytes=%d", subject, len(body))

    def _link(self, up: bool) -> None:
        """Core NATS repeats nothing: whoever was heard there has lost what passed while the connection was down. JetStream
        repeats it, but not in the same moment."""
        now = time.monotonic()
        for who, path in self._paths.items():
            if who not in self._seen:
                continue
            if not up:
                path.disconnected(now)
            elif who not in self._stored:
                path.connected(now)
        if up:
            self._loop.call_later(_REPEATED_S, self._resume)
        if not up:
            self._since = now
        elif self._heard:
            self._since = None  # a quiet fleet is no fault once the wire was seen to work

    def _resume(self) -> None:
        """By now JetStream has repeated what passed while the connection was down, if it is not down again."""
        now = time.monotonic()
        for who, path in self._paths.items():
            if who in self._stored and self._transport.connected:
                path.resumed(now)
