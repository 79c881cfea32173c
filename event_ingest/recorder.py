"""Record a live stream to a file, beginning with the engine's whole replay buffer."""

import threading
import time
from collections.abc import Callable
from typing import TextIO

import zmq

from event_ingest import sockets
from event_ingest.effects import AskReplay, Effect
from event_ingest.pipeline import time_of
from event_ingest.recording import Message, write_line
from event_ingest.stream import END_MARKER, Stream
from event_ingest.vllm_wire import decode

_SETTLING_S = 0.05
_POLL_MS = 200


def record(
    events: str,
    replay: str | None,
    out: TextIO,
    *,
    topic: str = "",
    duration_s: float | None = None,
    stop: threading.Event | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write every message of a stream to `out` until `duration_s` have passed or `stop` is set; returns how many.

    With a replay address the engine's buffer is asked for first, and gaps are asked for as they show. Lines of both sockets
    carry the port of the events address. Raises AddressError for addresses that cannot be used.
    """
    context = sockets.context()
    stream = Stream(can_replay=replay is not None)
    port = sockets.port_of(events)
    written = 0
    question: sockets.Socket | None = None
    up_at: float | None = None
    poller = zmq.Poller()
    subscription, monitor = sockets.subscription(context, events, topic)
    poller.register(subscription, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    links = sockets.Links(monitor)

    def carry_out(effects: list[Effect]) -> None:
        nonlocal question
        for effect in effects:
            if isinstance(effect, AskReplay) and replay is not None:
                end_question()
                question = sockets.question(context, replay, effect.start)
                poller.register(question, zmq.POLLIN)

    def end_question() -> None:
        nonlocal question
        if question is not None:
            poller.unregister(question)
            sockets.close(question)
            question = None

    def keep(frames: list[bytes]) -> None:
        nonlocal written
        out.write(write_line(Message(time.time(), port, tuple(frames))))
        written += 1
        if progress is not None:
            progress(written)

    def follow(frames: list[bytes], now: float, *, live: bool) -> None:
        """Let the stream see what was recorded, so that it asks for what is missing."""
        if len(frames) < 2 or len(frames[-2]) != 8:
            return
        if not live and frames[-2] == END_MARKER:
            end_question()
            carry_out(stream.replay_ended(now))
            return
        take = stream.live if live else stream.replayed
        carry_out(take(int.from_bytes(frames[-2], "big"), time_of(decode(frames[-1])), None, now))

    started = time.monotonic()
    try:
        while not (stop is not None and stop.is_set()):
            now = time.monotonic()
            if duration_s is not None and now - started >= duration_s:
                break
            poller.poll(_POLL_MS)
            now = time.monotonic()
            while (link := links.next()) is not None:
                up_at = now + _SETTLING_S if link is not sockets.Link.DOWN else None
                if link is not sockets.Link.UP:
                    end_question()
                    carry_out(stream.disconnected(now))
            if up_at is not None and now >= up_at:
                up_at = None
                carry_out(stream.connected(now))
            while question is not None and (frames := sockets.receive(question)) is not None:
                keep(frames)
                follow(frames, now, live=False)
            while (frames := sockets.receive(subscription)) is not None:
                keep(frames)
                follow(frames, now, live=True)
            carry_out(stream.tick(now))
            out.flush()
    finally:
        end_question()
        sockets.close(subscription, monitor)
        context.term()
    return written
