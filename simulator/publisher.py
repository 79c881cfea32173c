"""The sockets of an engine's event stream: PUB for live batches, ROUTER for replay, both in one thread.

As in vLLM, the thread serves at most one replay request per turn of its loop and waits up to 0.1 s for a batch in each, so
a replay on an idle engine takes about 100 ms, and live publishing waits while a replay is sent.
"""

import logging
import queue
import threading

import msgspec
import zmq

from simulator.replay_buffer import ReplayBuffer

log = logging.getLogger(__name__)

_TURN_MS = 100


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream is published and replayed.

    `bind` None follows vLLM: an endpoint with `*` or `::`, and every ipc:// or inproc:// one, is bound; any other is
    connected to, so that the subscriber has to bind.
    """

    endpoint: str
    replay: str | None = None
    bind: bool | None = None
    hwm: int = 100_000

    @property
    def binds(self) -> bool:
        if self.bind is not None:
            return self.bind
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://"))


class Faults(msgspec.Struct, kw_only=True):
    """Defects to plant. All may be changed while the publisher runs.

    `silent`: number and keep batches but send none. `drop_next`: batches that are kept for replay but not sent.
    `lose_next`: batches that use up a number and exist nowhere. `deaf`: replay requests are not answered.
    """

    silent: bool = False
    drop_next: int = 0
    lose_next: int = 0
    deaf: bool = False


class Publisher:
    """Owns the thread. `publish` may be called from any thread; call `close` to let go of the ports."""

    def __init__(self, addresses: Addresses, buffer: ReplayBuffer) -> None:
        """Binds or connects at once, so that a taken port raises here: zmq.ZMQError, naming the endpoint."""
        self.faults = Faults()
        self._buffer = buffer
        self._queue: queue.SimpleQueue[bytes | _Restart | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set_hwm(addresses.hwm)
        self._router: zmq.Socket[bytes] | None = None
        try:
            (self._pub.bind if addresses.binds else self._pub.connect)(addresses.endpoint)
            self.endpoint = self._pub.get_string(zmq.LAST_ENDPOINT) if addresses.binds else addresses.endpoint
            self.replay_endpoint: str | None = None
            if addresses.replay is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.bind(addresses.replay)
                self.replay_endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            wanted = f"{addresses.endpoint} and replay {addresses.replay}"
            raise zmq.ZMQError(error.errno, f"cannot publish events on {wanted}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, payload: bytes) -> None:
        """Queue one batch; it gets its sequence number in the thread."""
        self._queue.put(payload)

    def restart(self) -> None:
        """Act as a new process would: sequence numbers from 0 and an empty replay buffer, after what is queued."""
        self._queue.put(_Restart())

    def close(self) -> None:
        """Send what is queued, then close the sockets."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            if self._router is not None and self._router.poll(0):
                self._serve_replay(self._router)
            try:
                item = self._queue.get(timeout=_TURN_MS / 1e3)
            except queue.Empty:
                continue
            if item is None:
                break
            if isinstance(item, _Restart):
                self._buffer.restart()
            else:
                self._send(item)
        self._context.destroy(linger=200)

    def _send(self, payload: bytes) -> None:
        faults = self.faults
        if faults.lose_next > 0:
            faults.lose_next -= 1
            self._buffer.burn_number()
            return
        frames = self._buffer.number(payload)
        if faults.drop_next > 0:
            faults.drop_next -= 1
        elif not faults.silent:
            self._pub.send_multipart(frames)

    def _serve_replay(self, router: "zmq.Socket[bytes]") -> None:
        peer, *request = router.recv_multipart()
        answers = None if self.faults.deaf else self._buffer.answer(request)
        if answers is None:
            log.warning("replay_request_ignored frames=%d deaf=%s", len(request), self.faults.deaf)
            return
        for answer in answers:
            router.send_multipart((peer, *answer))


class _Restart(msgspec.Struct):
    """In the queue: forget numbers and buffer."""
