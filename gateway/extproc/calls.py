"""The seam between gRPC's transports and the services on them: one call, seen from both sides."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from gateway.extproc.grpc_wire import Status


class Receiver(Protocol):
    """A service's side of one call. Called on the event loop; must not block.

    It is told exactly one end: `aborted`, unless it finished the call itself. `ended` is not an end.
    """

    def message(self, data: bytes) -> None:
        """The client's next message, serialized."""

    def ended(self) -> None:
        """The client has no more messages; the call is open until it is finished or aborted."""

    def aborted(self) -> None:
        """The client is gone; nothing more can be said to it."""


class Answers(Protocol):
    """A transport's side of the call. May be used at any time: when the client is gone, nothing happens."""

    def send(self, message: bytes) -> None:
        """Answer with a message, serialized. Answers leave in order."""

    def finish(self, status: Status = Status.OK, message: str = "") -> None:
        """End the call after everything that was sent."""


Service: TypeAlias = Callable[[Answers], Receiver]
