"""What engines say about their caches, in one form for every wire format.

Decoders normalise: hashes are unsigned 64-bit integers, token ids are packed as little-endian unsigned 32-bit,
media are upper case, and extra keys are sorted into what they mean. Nothing here knows a wire format or an index.
"""

import enum

import msgspec


class Reason(enum.StrEnum):
    """Why a message, a batch, an event or a part of one was not used. These are metric labels: the set is fixed."""

    BAD_FRAMES = "bad_frames"
    """Not topic, eight bytes of sequence number and payload."""
    BAD_BATCH = "bad_batch"
    """The payload is not a msgpack array of a time and a list of events: the whole batch is lost."""
    BAD_TIMESTAMP = "bad_timestamp"
    """The batch's time is not a finite number; its events are used."""
    BAD_EVENT = "bad_event"
    """One event is neither a tagged map nor a tagged array, or its bytes are broken."""
    UNKNOWN_KIND = "unknown_kind"
    """The event's tag is none that this release knows."""
    MISSING_FIELD = "missing_field"
    """A field without which the event means nothing is absent."""
    BAD_FIELD = "bad_field"
    """A field has a type or value that it cannot have."""
    BAD_HASH = "bad_hash"
    """A block hash is neither a 64-bit integer nor at least eight bytes."""
    BAD_TOKENS = "bad_tokens"
    """Token ids are not integers of 0 to 2^32-1 (or pairs of those)."""
    BAD_EXTRA_KEYS = "bad_extra_keys"
    """Extra keys do not line up with the hashes, or one of them has an unknown shape."""
    TOKENS_DO_NOT_FIT = "tokens_do_not_fit"
    """A full-attention event's tokens are not block size times hashes, so its blocks cannot be placed."""
    BLOCK_SIZE_CONFLICT = "block_size_conflict"
    """A hash was announced with two different block sizes."""
    CONTENT_CONFLICT = "content_conflict"
    """A hash was announced with two different contents: the engine's hashes are not what they should be."""
    UNSUPPORTED_CACHE_KIND = "unsupported_cache_kind"
    """The event belongs to a cache group whose kind the index does not model."""
    ORPHANS_FULL = "orphans_full"
    """Blocks that waited for their parent were dropped because too many wait."""


class Skipped(msgspec.Struct, frozen=True):
    """One thing that was not used: why (a metric label), and what exactly (for a log line)."""

    reason: Reason
    detail: str
    loses: str = "stores"
    """What may have been lost: `nothing`, `stores` (matches may come out low) or `removals` (matches may come out high)."""


class Item(msgspec.Struct, frozen=True):
    """A multimodal item in a block: its content id and where it starts, in tokens from the block's start (may be negative)."""

    identifier: str
    offset: int


class Extra(msgspec.Struct, frozen=True):
    """What distinguishes a block beside its tokens and its adapter."""

    salt: str | None = None
    items: tuple[Item, ...] = ()
    embeds: bytes = b""
    """Digest of prompt embeddings in the block; requests never compute one, so such blocks match nothing."""


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one sequence were cached."""

    hashes: tuple[int, ...]
    parent: int | None = None
    tokens: bytes = b""
    """Token ids of the whole range, four bytes each, little-endian; empty where only the location is announced."""
    block_tokens: int = 0
    """Block size in tokens; 0 in location-only events."""
    contents: tuple[int, ...] = ()
    """Ready-made content hash per block, where the wire carries no token ids (Dynamo)."""
    medium: str = "GPU"
    group: int = 0
    kind: str | None = None
    """The cache group's attention kind; None where the engine does not say (read as full attention)."""
    window: int | None = None
    """Sliding window of the group, in tokens."""
    lora: str | None = None
    """Adapter name; an adapter that has a number only becomes a name that no request can have."""
    extras: tuple[Extra | None, ...] = ()
    """One per hash, or empty where no block has any."""
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of each of these blocks is gone from a medium (and group)."""

    hashes: tuple[int, ...]
    medium: str = "GPU"
    group: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True):
    """The cache is empty: every medium, every group."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, frozen=True):
    """The events of one engine step, in the order in which they happened."""

    ts: float
    """The engine's wall clock, s; 0 where it could not be read."""
    events: tuple[Event, ...]
    rank: int | None = None


class Decoded(msgspec.Struct, frozen=True):
    """What a decoder made of one payload; `batch` is None where nothing could be read."""

    batch: Batch | None
    skipped: tuple[Skipped, ...] = ()


def event_kind(event: Event) -> str:
    """The event's metric label."""
    return type(event).__name__
