"""What the router can claim about the index entries of one event stream.

    exact      the entries are what the engine holds, as of its last announced step
    degraded   some entries may be wrong or missing, the reason says why: a match counts, at a discount
    blind      nothing is claimed: a match counts nothing, the endpoint is chosen by load alone

The discount is one half for every reason: enough for an exact endpoint with more than half of the prefix to win against a
degraded one that seems to have all of it, and not so much that a lone degraded endpoint with a long match is passed
over for one that has nothing.
"""

from enum import StrEnum
from typing import Final, Literal

import msgspec

State = Literal["exact", "degraded", "blind"]

DEGRADED_WEIGHT: Final = 0.5


class Reason(StrEnum):
    """The fixed set of reason labels, so that a dashboard can list them. `NONE` belongs to exact."""

    NONE = "none"
    # blind
    NO_EVENTS = "no_events"  # no address to listen to, or nothing ever heard
    SYNCING = "syncing"  # connected, the engine's buffer is being replayed
    DISCONNECTED = "disconnected"  # was heard once, is silent now although it is used
    UNKNOWN_KIND = "unknown_kind"  # a cache group whose hit rule is not known
    UNREADABLE = "unreadable"  # batches arrive that cannot be decoded
    # degraded
    LOST_BATCHES = "lost_batches"  # a gap older than the engine's buffer
    CATCHING_UP = "catching_up"  # a gap that a replay will fill
    RESTARTED = "restarted"  # the sequence fell back; entries of the old process are being dropped
    NO_REPLAY = "no_replay"  # joined late, and the engine offers no replay: its older blocks are unknown
    SKIPPED_EVENTS = "skipped_events"  # events of a shape that cannot be applied
    ORPHANS = "orphans"  # blocks whose parent was never announced
    INDEX_EVICTED = "index_evicted"  # the index reached a limit and dropped entries of this stream
    HASH_MISMATCH = "hash_mismatch"  # the engine's hashes are not those of the configured algorithm and seed
    OVERPREDICTED = "overpredicted"  # responses report fewer cached tokens than predicted


class Trust(msgspec.Struct, frozen=True):
    """The state of one stream since a moment of the router's monotonic clock, seconds."""

    state: State
    reason: Reason = Reason.NONE
    since: float = 0.0
    detail: str = ""  # for people: "lost 12 batches", never a label

    def __post_init__(self) -> None:
        if (self.state == "exact") != (self.reason is Reason.NONE):
            raise ValueError(f"trust {self.state} with reason {self.reason}: exact has none, all others have one")

    @property
    def weight(self) -> float:
        """With what factor a match on this stream's endpoint counts, 0..1."""
        if self.state == "exact":
            return 1.0
        return DEGRADED_WEIGHT if self.state == "degraded" else 0.0

    def __str__(self) -> str:
        return self.state if self.state == "exact" else f"{self.state}({self.reason})"


def exact(since: float) -> Trust:
    return Trust("exact", Reason.NONE, since)


def degraded(reason: Reason, since: float, detail: str = "") -> Trust:
    return Trust("degraded", reason, since, detail)


def blind(reason: Reason, since: float, detail: str = "") -> Trust:
    return Trust("blind", reason, since, detail)
