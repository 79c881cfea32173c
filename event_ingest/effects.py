"""What a stream wants of its owner, as values. Someone who has the sockets and the index carries them out, in order."""

from typing import Any

import msgspec

from indexer.trust import Trust


class Apply(msgspec.Struct, frozen=True):
    """Apply this batch now; batches come in sequence order."""

    seq: int
    item: Any


class AskReplay(msgspec.Struct, frozen=True):
    """Ask the engine for batches from `start` on, on a fresh socket (late answers to older questions would confuse this one)."""

    start: int


class DropAll(msgspec.Struct, frozen=True):
    """Whatever is known about this engine's cache is void: drop every entry and every hash."""

    reason: str


class Lost(msgspec.Struct, frozen=True):
    """Batches are gone for good: entries held now may be stale and must not count in full until confirmed."""

    reason: str
    batches: int


class SetTrust(msgspec.Struct, frozen=True):
    """This can be claimed about the entries from here on."""

    trust: Trust


Effect = Apply | AskReplay | DropAll | Lost | SetTrust
