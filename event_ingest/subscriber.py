"""The thread that listens to all engines.

One thread, one poller: per stream a subscription, its monitor, and while something is being asked a replay socket. All
decisions are the stream's (see `stream`); this file moves frames, time and questions. Other threads talk to it through a queue.
"""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import zmq

from event_ingest import sockets
from event_ingest.effects import AskReplay, SetTrust
from event_ingest.pipeline import EventPath, Outcome
from event_ingest.stream import END_MARKER
from fleet.endpoint import Endpoint
from indexer.trust import Trust

log = logging.getLogger(__name__)

TrustChanged: TypeAlias = Callable[[EventPath, Trust], None]

_AT_ONCE = 500  # messages taken from one socket before the others get their turn
_TICK_S = 0.25
_SETTLING_S = 0.05  # from a link being up to the first question: the publisher must know our subscription by then


class _Stream:
    """The sockets of one stream."""

    def __init__(self, context: sockets.Context, endpoint: Endpoint, path: EventPath) -> None:
        assert endpoint.events is not None
        self.endpoint = endpoint
        self.path = path
        self.events, self.monitor = sockets.subscription(context, endpoint.events, endpoint.topic)
        self.links = sockets.Links(self.monitor)
        self.replay: sockets.Socket | None = None
        self.up_at: float | None = None

    def sockets(self) -> list[sockets.Socket]:
        return [s for s in (self.events, self.monitor, self.replay) if s is not None]


class Subscriber:
    """Listens to the KV events of a fleet.

    `on_trust` is called from the listening thread whenever a stream's trust changes. `errors` counts messages that our own
    code failed on (logged with a traceback): the stream goes on.
    """

    def __init__(self, *, on_trust: TrustChanged | None = None) -> None:
        self.errors = 0
        self._on_trust = on_trust
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._context = sockets.context()
        self._poller = zmq.Poller()
        self._streams: dict[str, _Stream] = {}
        self._owners: dict[sockets.Socket, _Stream] = {}
        self._running = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    # --------------------------------------------------------------------------------------- from any other thread

    def start(self) -> None:
        self._running = True
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close all sockets and end the thread. Index entries stay as they are."""
        if self._thread.is_alive():
            self._call(self._halt)
            self._thread.join(timeout_s)

    def add(self, endpoint: Endpoint, path: EventPath) -> "Future[None]":
        """Listen to an endpoint; the future fails with AddressError if its address is unusable.

        An endpoint added again under the same path name replaces the old one (whose entries are dropped).
        """
        return self._call(lambda: self._add(endpoint, path))

    def remove(self, name: str) -> "Future[None]":
        """Stop listening and drop the entries of the path of that name; its slot is free once the future is done."""
        return self._call(lambda: self._remove(name))

    def observe(
        self, name: str, keys: Sequence[int], prompt: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """Pass on what an engine reported about a request (`EventPath.observe`)."""

        def pass_on() -> None:
            stream = self._streams.get(name)
            if stream is not None:
                self._handle(stream, stream.path.observe(keys, prompt, predicted, cached, time.monotonic(), decided_at))

        self._call(pass_on)

    @property
    def thread_name(self) -> str:
        return self._thread.name

    @property
    def died(self) -> bool:
        """Whether the thread has ended although nobody stopped it."""
        return self._running and not self._thread.is_alive()

    def paths(self) -> list[EventPath]:
        """The paths being fed: their counters and trust may be read from any thread."""
        return [stream.path for stream in list(self._streams.values())]

    def _call(self, action: Callable[[], None]) -> "Future[None]":
        future: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except sockets.AddressError as error:
                future.set_exception(error)
            except Exception as error:  # the thread must go on; whoever asked is told
                self.errors += 1
                log.exception("command_failed")
                future.set_exception(error)
            else:
                future.set_result(None)

        self._commands.put(run)
        with contextlib.suppress(OSError):  # it is being woken already, or has stopped
            self._wake.send(b"\0")
        return future

    # ------------------------------------------------------------------------------------------ the listening thread

    def _run(self) -> None:
        self._poller.register(self._woken, zmq.POLLIN)
        last_tick = time.monotonic()
        while self._running:
            ready = dict(self._poller.poll(int(_TICK_S * 1000) if not self._settling() else 20))
            for source in ready:
                if isinstance(source, zmq.Socket):
                    stream = self._owners.get(source)
                    if stream is not None:
                        self._receive(stream, source)
                else:
                    self._obey()
            now = time.monotonic()
            for stream in list(self._streams.values()):
                if stream.up_at is not None and now >= stream.up_at:
                    stream.up_at = None
                    self._carry_out(stream, partial(stream.path.connected, now))
                if now - last_tick >= _TICK_S:
                    self._carry_out(stream, partial(stream.path.tick, now))
            if now - last_tick >= _TICK_S:
                last_tick = now
        for stream in list(self._streams.values()):
            self._close(stream)
        self._context.term()
        self._wake.close()
        self._woken.close()

    def _settling(self) -> bool:
        return any(stream.up_at is not None for stream in self._streams.values())

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while not self._commands.empty():
            self._commands.get()()

    def _halt(self) -> None:
        self._running = False

    def _add(self, endpoint: Endpoint, path: EventPath) -> None:
        if endpoint.events is None:
            raise sockets.AddressError(f"endpoint {endpoint.name!r} has no events address")
        self._remove(path.name)
        stream = _Stream(self._context, endpoint, path)
        self._streams[path.name] = stream
        for source in stream.sockets():
            self._owners[source] = stream
            self._poller.register(source, zmq.POLLIN)
        log.info("stream_added stream=%s events=%s replay=%s", path.name, endpoint.events, endpoint.replay)

    def _remove(self, name: str) -> None:
        stream = self._streams.pop(name, None)
        if stream is not None:
            self._close(stream)
            stream.path.close()
            log.info("stream_removed stream=%s", name)

    def _close(self, stream: _Stream) -> None:
        self._end_question(stream)
        for source in stream.sockets():
            self._poller.unregister(source)
            self._owners.pop(source, None)
        sockets.close(stream.events, stream.monitor)

    def _receive(self, stream: _Stream, source: sockets.Socket) -> None:
        now = time.monotonic()
        if source is stream.monitor:
            while (link := stream.links.next()) is not None:
                if link is not sockets.Link.UP:
                    self._end_question(stream)
                    self._carry_out(stream, partial(stream.path.disconnected, now))
                stream.up_at = now + _SETTLING_S if link is not sockets.Link.DOWN else None
                log.info("link_changed stream=%s link=%s", stream.path.name, link.value)
            return
        for _ in range(_AT_ONCE):
            frames = sockets.receive(source)
            if frames is None:
                return
            try:
                if source is stream.events:
                    outcomes = stream.path.feed(frames, now, wall=time.time())
                else:
                    if len(frames) > 1 and frames[-2] == END_MARKER:
                        self._end_question(stream)
                    outcomes = stream.path.feed_replay(frames, now)
                self._handle(stream, outcomes)
            except Exception:  # a fault of ours must not silence all other streams
                self.errors += 1
                log.exception("message_failed stream=%s frames=%s", stream.path.name, [len(f) for f in frames])
            if source is not stream.events and source is not stream.replay:
                return  # answered, or replaced by a newer question

    def _carry_out(self, stream: _Stream, action: Callable[[], Sequence[Outcome]]) -> None:
        try:
            self._handle(stream, action())
        except Exception:  # as above
            self.errors += 1
            log.exception("stream_failed stream=%s", stream.path.name)

    def _handle(self, stream: _Stream, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case AskReplay(start):
                    self._end_question(stream)
                    if stream.endpoint.replay is not None:
                        self._ask(stream, start)
                case SetTrust(trust):
                    if self._on_trust is not None:
                        self._on_trust(stream.path, trust)

    def _ask(self, stream: _Stream, start: int) -> None:
        assert stream.endpoint.replay is not None
        try:
            stream.replay = sockets.question(self._context, stream.endpoint.replay, start)
        except sockets.AddressError as error:
            log.error("replay_impossible stream=%s error=%r", stream.path.name, str(error))
            return  # the question times out, and the trust says so
        self._owners[stream.replay] = stream
        self._poller.register(stream.replay, zmq.POLLIN)

    def _end_question(self, stream: _Stream) -> None:
        if stream.replay is not None:
            self._poller.unregister(stream.replay)
            self._owners.pop(stream.replay, None)
            sockets.close(stream.replay)
            stream.replay = None
