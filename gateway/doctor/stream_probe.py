"""Listen to event streams beside the gateway: every topic, live batches, and one question to the replay socket.

Listening does not disturb: a PUB has any number of subscribers. A `bind:` address is bound only where nobody else has; a
gateway that starts meanwhile would find it taken for the seconds of the examination.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from event_ingest.sockets import BIND
from event_ingest.stream import END_MARKER
from event_ingest.vllm_wire import decode
from fleet.endpoint import Endpoint
from gateway.doctor.facts import Heard, Link, Replay, Stream

MOST_HEARD = 2_000
"""Messages kept per stream; what an examination needs are the newest of its own request and a look at the order."""
ANSWER_S = 2.5
"""Without progress for so long a replay question has failed."""
WHOLE_ANSWER_S = 5.0
_TIME = msgspec.msgpack.Decoder(list[msgspec.Raw])
_WATCHED = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CLOSED


class Listener:
    """Listens to all streams from `start` to `close`; `streams` is what was heard so far."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._context = zmq.asyncio.Context()
        self._endpoints = [endpoint for endpoint in endpoints if endpoint.events is not None]
        self._heard: dict[int, list[Heard]] = {at: [] for at in range(len(self._endpoints))}
        self._links: dict[int, tuple[Link, str]] = {}
        self._replays: dict[int, Replay] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self, settle_s: float = 0.5) -> None:
        """Open all sockets, and give their links a moment to come up."""
        bound: set[str] = set()
        for at, endpoint in enumerate(self._endpoints):
            address = endpoint.events or ""
            if address.startswith(BIND) and address in bound:
                self._links[at] = ("bind_failed", "another endpoint of the configuration binds the same address")
                continue
            bound.add(address)
            self._open(at, address)
        if any(address.startswith(BIND) for address in bound):
            await asyncio.sleep(2 * settle_s)  # engines try again every 0.1 s or so, and who knows how many there are
        await self.until(lambda: all(link[0] in ("up", "bind_failed") for link in self._links.values()), settle_s)
        await asyncio.sleep(0.1)  # the publishers must have our subscriptions before anything is provoked

    def _open(self, at: int, address: str) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            monitor = socket.get_monitor_socket(_WATCHED)
            if address.startswith(BIND):
                socket.bind(address.removeprefix(BIND))
                self._links[at] = ("bound", "")
            else:
                socket.connect(address)
                self._links[at] = ("unanswered", "")
        except zmq.ZMQError as error:
            self._links[at] = ("bind_failed", str(error))
            socket.disable_monitor()
            socket.close(linger=0)
            return
        self._tasks += [
            asyncio.create_task(self._watch(at, monitor)),
            asyncio.create_task(self._receive(at, socket)),
        ]

    async def _watch(self, at: int, monitor: "zmq.asyncio.Socket") -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            self._changed.set()
            link = self._links[at][0]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._links[at] = ("up", "")
            elif event == zmq.EVENT_CONNECTED and link in ("unanswered", "refused"):
                self._links[at] = ("no_publisher", "")
            elif event in (zmq.EVENT_CONNECT_RETRIED, zmq.EVENT_CLOSED) and link == "unanswered":
                self._links[at] = ("refused", "")

    async def _receive(self, at: int, socket: "zmq.asyncio.Socket") -> None:
        try:
            while True:
                frames = await socket.recv_multipart()
                if len(self._heard[at]) < MOST_HEARD:
                    self._heard[at].append(heard(frames))
                self._changed.set()
        finally:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
            socket.close(linger=0)

    async def until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait for something to have been heard, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()

    async def ask_replays(self, *, everything: bool) -> None:
        """Ask every replay socket: for the whole buffer, or only for the last batch heard (a long answer holds up the
        engine's publisher for a moment).
        """
        asked: list[Awaitable[None]] = []
        for at, endpoint in enumerate(self._endpoints):
            if endpoint.replay is None:
                continue
            numbers = [it.seq for it in self._heard[at] if it.seq is not None]
            asked.append(self._ask(at, endpoint.replay, 0 if everything or not numbers else numbers[-1]))
        await asyncio.gather(*asked)

    async def _ask(self, at: int, address: str, start: int) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        times: list[tuple[int, float]] = []
        answered = ended = False
        numbers: list[int] = []
        try:
            socket.connect(address)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            async with asyncio.timeout(WHOLE_ANSWER_S):
                while not ended:
                    frames = await asyncio.wait_for(socket.recv_multipart(), ANSWER_S)
                    answered = True
                    if len(frames) < 2 or frames[-2] == END_MARKER:
                        ended = True
                    else:
                        numbers.append(int.from_bytes(frames[-2], "big"))
                        if (ts := engine_time(frames[-1])) is not None:
                            times.append((numbers[-1], ts))
        except (TimeoutError, zmq.ZMQError):
            pass  # what came, and that it did not end, is the result
        finally:
            socket.close(linger=0)
        self._replays[at] = Replay(
            answered=answered,
            start=start,
            first=numbers[0] if numbers else None,
            last=numbers[-1] if numbers else None,
            span_s=times[-1][1] - times[0][1] if times else 0.0,
            times=times,
            complete=ended and len(numbers) == (numbers[-1] - numbers[0] + 1 if numbers else 0),
        )

    def streams(self) -> list[Stream]:
        return [
            Stream(
                endpoint=endpoint,
                link=self._links[at][0],
                detail=self._links[at][1],
                heard=list(self._heard[at]),
                replay=self._replays.get(at),
            )
            for at, endpoint in enumerate(self._endpoints)
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)


def heard(frames: Sequence[bytes]) -> Heard:
    """A live message."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return Heard(topic="", seq=None, batch=None, skipped=("bad_frames",))
    decoded = decode(frames[-1])
    topic = frames[0].decode("utf-8", "replace") if len(frames) > 2 else ""
    skipped = tuple(str(it.reason) for it in decoded.skipped)
    return Heard(topic=topic, seq=int.from_bytes(frames[-2], "big"), batch=decoded.batch, skipped=skipped)


def engine_time(payload: bytes) -> float | None:
    """The time of a batch, s; its events are left alone, for a buffer holds ten thousand batches."""
    try:
        return msgspec.msgpack.decode(_TIME.decode(payload)[0], type=float)
    except (msgspec.MsgspecError, IndexError):
        return None
