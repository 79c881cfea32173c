"""What the core asks its transport to do, in order. Values only: nothing here does anything."""

from typing import Any

import msgspec

from gateway.extproc.decision import Head, ResponseObserver


class Send(msgspec.Struct, frozen=True):
    """Write this ProcessingResponse to the stream."""

    message: Any


class Decide(msgspec.Struct, frozen=True):
    """Ask the decider, and pass its answer to `Exchange.decided`."""

    head: Head
    body: bytes


class CancelDecide(msgspec.Struct, frozen=True):
    """The decision is no longer wanted; if it comes all the same, it still goes to `Exchange.decided`."""


class ResponseHeaders(msgspec.Struct, frozen=True):
    observer: ResponseObserver
    status: int
    headers: dict[str, str]
    served: str | None


class ResponseChunk(msgspec.Struct, frozen=True):
    observer: ResponseObserver
    data: bytes


class Finished(msgspec.Struct, frozen=True):
    observer: ResponseObserver


class Aborted(msgspec.Struct, frozen=True):
    observer: ResponseObserver
    reason: str


class Close(msgspec.Struct, frozen=True):
    """End the stream from our side, after everything before this effect was sent."""


Effect = Send | Decide | CancelDecide | ResponseHeaders | ResponseChunk | Finished | Aborted | Close
