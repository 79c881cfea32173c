"""The ZMQ sockets of one stream: opening, and what their monitors say.

Receive limits are off: a limit would make the engine drop messages without a word while we are busy.
"""

import enum
import errno
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

BIND = "bind:"
_HEARTBEAT_MS = 2_000
_BIND_TRIES = 50
_BIND_AGAIN_S = 0.01
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class AddressError(ValueError):
    """An address that ZMQ cannot use: says which, and what would be right."""


class Link(enum.Enum):
    """What a monitor reports, as far as a stream cares."""

    UP = "up"
    DOWN = "down"
    FEWER = "fewer"
    """One of several publishers has gone: the one that we follow, or one that it has replaced."""


class Links:
    """The links of one subscription, by its monitor. A bound one may have several: a new engine comes before the old one's
    link is known to be dead, and whoever tries the port connects and goes without ever having been a publisher."""

    def __init__(self, monitor: Socket) -> None:
        self._monitor = monitor
        self._up = 0
        self._failed = False  # the link that ends next never shook hands

    def next(self) -> Link | None:
        """The next change, None when there is none."""
        while True:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return None
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._up += 1
                return Link.UP
            if event & _FAILED:
                self._failed = True
            elif event == zmq.EVENT_DISCONNECTED:
                failed, self._failed = self._failed, False
                if not failed and self._up:
                    self._up -= 1
                    return Link.FEWER if self._up else Link.DOWN


def context() -> Context:
    """A context for as many sockets as ZMQ can have: by default it ends at 1023, which is 340 streams."""
    made: Context = zmq.Context()
    made.set(zmq.MAX_SOCKETS, made.get(zmq.SOCKET_LIMIT))
    return made


def port_of(address: str) -> int:
    """The port in `tcp://host:port` or `bind:tcp://host:port`; 0 for addresses without one."""
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def for_rank(address: str, rank: int) -> str:
    """The address of a data-parallel rank: engines add the rank to a tcp port (0 stays 0)."""
    head, colon, port = address.rpartition(":")
    if rank == 0 or not port.isdigit() or int(port) == 0:
        return address
    return f"{head}{colon}{int(port) + rank}"


def subscription(context: Context, address: str, topic: str = "") -> tuple[Socket, Socket]:
    """A SUB socket and its monitor. `bind:` addresses are bound, for engines whose publisher connects."""
    socket: Socket | None = None
    monitor: Socket | None = None
    try:
        socket = context.socket(zmq.SUB)
        _prepare(socket)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        # An engine whose machine or wire vanished says no goodbye. libzmq answers heartbeats in a thread of its own, so a
        # busy engine answers too.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED)
        if address.startswith(BIND):
            _bind(socket, address.removeprefix(BIND))
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        close(socket, monitor)
        raise AddressError(
            f"events address {address!r}: {error}; {_advice(error, 'tcp://host:port or bind:tcp://host:port')}"
        ) from error
    return socket, monitor


def question(context: Context, address: str, start: int) -> Socket:
    """A DEALER that has asked an engine for the batches from `start` on.

    The empty frame stands for the delimiter that the engine's ROUTER insists on: without it there is never an answer.
    """
    socket: Socket | None = None
    try:
        socket = context.socket(zmq.DEALER)
        _prepare(socket)
        socket.connect(address)
        socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        close(socket)
        raise AddressError(f"replay address {address!r}: {error}; {_advice(error, 'tcp://host:port')}") from error
    return socket


def receive(socket: Socket) -> list[bytes] | None:
    """The next message, None when there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def close(socket: Socket | None, monitor: Socket | None = None) -> None:
    """Close a socket (and its monitor) at once, whatever is queued."""
    if socket is None:
        return
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(linger=0)
    socket.close(linger=0)


def _advice(error: zmq.ZMQError, form: str) -> str:
    match error.errno:
        case errno.EMFILE | errno.ENFILE:
            return "raise the limit of open files (ulimit -n): a stream takes four and its question two"
        case errno.EADDRINUSE:
            return "something else listens there"
    return f"expected {form}"


def _bind(socket: Socket, address: str) -> None:
    """Bind, also to an address that a socket of ours has just left: ZMQ gives it back a moment after the close."""
    for left in reversed(range(_BIND_TRIES)):
        try:
            socket.bind(address)
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or not left:
                raise
            time.sleep(_BIND_AGAIN_S)


def _prepare(socket: Socket) -> None:
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
