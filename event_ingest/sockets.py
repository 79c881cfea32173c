"""The ZMQ sockets of one stream: opening, and what their monitors say.

Receive limits are off: a limit would make the engine drop messages without a word while we are busy.
"""

import enum

import zmq
from zmq.utils.monitor import recv_monitor_message

BIND = "bind:"
_HEARTBEAT_MS = 2_000

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class AddressError(ValueError):
    """An address that ZMQ cannot use: says which, and what would be right."""


class Link(enum.Enum):
    """What a monitor reports, as far as a stream cares."""

    UP = "up"
    DOWN = "down"


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
    socket = context.socket(zmq.SUB)
    monitor: Socket | None = None
    try:
        _prepare(socket)
        socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        # An engine whose machine or wire vanished says no goodbye. libzmq answers heartbeats in a thread of its own, so a
        # busy engine answers too.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5_000)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if address.startswith(BIND):
            socket.bind(address.removeprefix(BIND))
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        close(socket, monitor)
        raise AddressError(
            f"events address {address!r}: {error}; expected tcp://host:port or bind:tcp://host:port"
        ) from error
    return socket, monitor


def question(context: Context, address: str, start: int) -> Socket:
    """A DEALER that has asked an engine for the batches from `start` on.

    The empty frame stands for the delimiter that the engine's ROUTER insists on: without it there is never an answer.
    """
    socket = context.socket(zmq.DEALER)
    try:
        _prepare(socket)
        socket.connect(address)
        socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)
    except zmq.ZMQError as error:
        close(socket)
        raise AddressError(f"replay address {address!r}: {error}; expected tcp://host:port") from error
    return socket


def receive(socket: Socket) -> list[bytes] | None:
    """The next message, None when there is none."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def link_event(monitor: Socket) -> Link | None:
    """The next change of a link, None when there is none."""
    try:
        event = recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
    except zmq.Again:
        return None
    return Link.DOWN if event == zmq.EVENT_DISCONNECTED else Link.UP


def close(socket: Socket, monitor: Socket | None = None) -> None:
    """Close a socket (and its monitor) at once, whatever is queued."""
    if monitor is not None:
        socket.disable_monitor()
        monitor.close(linger=0)
    socket.close(linger=0)


def _prepare(socket: Socket) -> None:
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
