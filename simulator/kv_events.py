"""What a simulated engine announces about its prefix cache, before any wire format.

Digests are the full block hashes (16 or 32 bytes). `extra_keys` are as they were hashed, one entry per block; the wire
carries them without tags and adapter paths (see `simulator.wire`).
"""

import msgspec

from indexer.extra_keys import ExtraKeys


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive full blocks of one sequence became hittable; `parent` is the digest of the block before the first."""

    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]
    block_tokens: int
    extra_keys: tuple[ExtraKeys | None, ...]
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


class Removed(msgspec.Struct, frozen=True):
    """One physical copy of a block was evicted. Other copies of the same digest may remain."""

    digest: bytes


class Cleared(msgspec.Struct, frozen=True):
    """The whole prefix cache was reset."""


KvEvent = Stored | Removed | Cleared
