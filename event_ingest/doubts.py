"""What speaks against a stream's picture while it is connected and in order, and until when.

A *fault* is something that happened and cannot be undone: batches lost, a late join, events that could not be used. The
newest loss counts; what is less than one does not replace a fault that is there. It ends

    when the engine empties its cache in the batch of the fault or a later one     nothing from before it is held any more
    when its reports have agreed with the picture for long enough (`forgive`)      whatever was wrong is gone by now
    with the process                                                               everything from it is dropped

A *doubt* is a suspicion: a response does not fit what was announced, and the engine has not yet said what it published. It
ends with the engine's complete answer. A fault says more than a doubt, so it is named first.
"""

from typing import TypeAlias

from indexer.trust import Reason, State

Claim: TypeAlias = tuple[State, Reason, str]
"""What can be claimed: state, reason, and a detail for people."""

_EXACT: Claim = ("exact", Reason.NONE, "")
_DOUBTED: Claim = (
    "degraded",
    Reason.CATCHING_UP,
    "a response does not fit what was announced: the engine is being asked",
)


class Doubts:
    """The fault and the doubt of one stream. `seq` are batch numbers."""

    __slots__ = ("_before", "_fault", "doubted")

    def __init__(self) -> None:
        self.doubted = False
        """A response does not fit, and the engine has not yet answered what it published."""
        self._fault: Claim | None = None
        self._before = 0  # the first batch that ends the fault by emptying the cache

    @property
    def has_fault(self) -> bool:
        return self._fault is not None

    def lost(self, detail: str, next_seq: int) -> None:
        """Batches before `next_seq` are gone for good, and entries from before them may be stale."""
        self._fault = ("degraded", Reason.LOST_BATCHES, detail)
        self._before = next_seq

    def begins_late(self, reason: Reason, detail: str) -> None:
        """What came before the first batch is not known: matches may come out low."""
        self._fault = ("degraded", reason, detail)

    def cannot_ask(self, detail: str) -> None:
        """What came before the first batch cannot be asked for; a fault that is there says more."""
        if self._fault is None:
            self._fault = ("degraded", Reason.NO_REPLAY, detail)

    def unused(self, reason: Reason, detail: str, seq: int) -> None:
        """Something in batch `seq` could not be used."""
        if self._fault is None:
            self._fault = ("degraded", reason, detail)
        self._before = max(self._before, seq)

    def cleared(self, seq: int) -> None:
        """Batch `seq` emptied the engine's cache."""
        if seq >= self._before:
            self._fault = None

    def forgive(self) -> None:
        """The fault does not matter any more."""
        self._fault = None

    def claim(self) -> Claim:
        """What can be claimed in spite of all that."""
        return self._fault or (_DOUBTED if self.doubted else _EXACT)
