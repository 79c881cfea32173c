"""KV event batches as vLLM puts them on the wire (msgpack).

A payload is the array `[ts, events, rank]`. Each event is a map tagged by its key `type` (0.32) or, in older releases, an
array with the tag first. Hashes are the last 8 bytes of the digest as an unsigned integer, or the whole digest as bytes.
The hashed extra keys lose their tags and the LoRA path on the way out, exactly as the engine publishes them.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from indexer import engine_hash
from indexer.extra_keys import ExtraKeys
from simulator.kv_events import Cleared, KvEvent, Removed, Stored

_MEDIUM = "GPU"
_KIND = "full_attention"


class WireFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`arrays`: the older array form of events. `whole_digests`: bytes instead of 64-bit integers."""

    arrays: bool = False
    whole_digests: bool = False


def encode_batch(events: Iterable[KvEvent], ts: float, rank: int = 0, form: WireFormat | None = None) -> bytes:
    """One payload. `ts` is the engine's wall clock in seconds, `rank` its data-parallel rank."""
    form = form or WireFormat()
    one = _as_array if form.arrays else _as_map
    return msgspec.msgpack.encode([ts, [one(event, form) for event in events], rank])


def published_keys(keys: ExtraKeys | None) -> list[Any] | None:
    """The untagged form: adapter name, media, salt, embeddings; None when there are no extra keys."""
    if keys is None:
        return None
    published: list[Any] = [] if keys.lora is None else [keys.lora[0]]
    published += [list(item) for item in keys.media]
    if keys.salt is not None:
        published.append(keys.salt)
    return published + list(keys.prompt_embeds)


def _hash(digest: bytes, form: WireFormat) -> int | bytes:
    return digest if form.whole_digests else engine_hash.wire(digest)


def _as_map(event: KvEvent, form: WireFormat) -> dict[str, Any]:
    match event:
        case Stored():
            fields: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": [_hash(digest, form) for digest in event.digests],
                "parent_block_hash": None if event.parent is None else _hash(event.parent, form),
                "token_ids": event.token_ids,
                "block_size": event.block_tokens,
                "lora_id": event.lora_id,
                "medium": _MEDIUM,
                "lora_name": event.lora_name,
                "extra_keys": [published_keys(keys) for keys in event.extra_keys],
                "group_idx": 0,
                "kv_cache_spec_kind": _KIND,
            }
            if event.session_id is not None:
                fields["session_id"] = event.session_id
            return fields
        case Removed(digest):
            return {"type": "BlockRemoved", "block_hashes": [_hash(digest, form)], "medium": _MEDIUM, "group_idx": 0}
        case Cleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: KvEvent, form: WireFormat) -> list[Any]:
    fields = _as_map(event, form)
    fields.pop("session_id", None)  # newer than the array form
    return list(fields.values())
