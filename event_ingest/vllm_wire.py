"""The batches that vLLM and SGLang publish over ZMQ.

A payload is a msgpack array `[time, [event, ...], rank, ...]`. An event is a map with its tag under `type` (vLLM 0.32)
or an array with its tag first and trailing defaults left out (older vLLM, SGLang). One batch may hold both. Unknown
map keys and unknown trailing elements are ignored, so that a newer engine is still understood.

The batch is cut into raw events first and each is decoded alone, so a broken event costs itself and nothing else.
"""

import math
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from event_ingest.events import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Decoded,
    Event,
    Extra,
    Item,
    Reason,
    Skipped,
)

_MASK = (1 << 64) - 1
_RAW_LIST = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ANY = msgspec.msgpack.Decoder()

_STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
)
_REMOVED_FIELDS = ("block_hashes", "medium")


class _Unusable(Exception):
    """This event cannot be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def decode(payload: bytes) -> Decoded:
    """Decode one batch. Never raises: what cannot be used is in `skipped`, with its reason."""
    try:
        parts = _RAW_LIST.decode(payload)
        if len(parts) < 2:
            return _lost_batch(f"{len(parts)} elements, a batch has a time and a list of events")
        raws = _RAW_LIST.decode(parts[1])
        ts = _ANY.decode(parts[0])
        rank = _ANY.decode(parts[2]) if len(parts) > 2 else None
    except (msgspec.MsgspecError, RecursionError) as error:
        return _lost_batch(str(error))

    skipped: list[Skipped] = []
    if isinstance(ts, bool) or not isinstance(ts, int | float) or not math.isfinite(ts):
        skipped.append(Skipped(Reason.BAD_TIMESTAMP, f"time {ts!r}", loses="nothing"))
        ts = 0.0
    events: list[Event] = []
    for number, raw in enumerate(raws):
        decoded = _decode_event(raw, number)
        if isinstance(decoded, Skipped):
            skipped.append(decoded)
        else:
            events.append(decoded)
    known_rank = rank if isinstance(rank, int) and not isinstance(rank, bool) else None
    return Decoded(Batch(float(ts), tuple(events), known_rank), tuple(skipped))


def _lost_batch(detail: str) -> Decoded:
    return Decoded(None, (Skipped(Reason.BAD_BATCH, detail, loses="removals"),))


def _decode_event(raw: msgspec.Raw, number: int) -> Event | Skipped:
    where = f"event {number}"
    try:
        value = _ANY.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        return Skipped(Reason.BAD_EVENT, f"{where}: {error}", loses="removals")
    if isinstance(value, dict):
        tag, fields = value.get("type"), value
    elif isinstance(value, list) and value:
        tag, fields = value[0], None
    else:
        return Skipped(
            Reason.BAD_EVENT, f"{where}: {type(value).__name__} is not a tagged map or array", loses="removals"
        )
    if not isinstance(tag, str):
        return Skipped(Reason.BAD_EVENT, f"{where}: tag is {type(tag).__name__}, not a string", loses="removals")
    if tag not in _KINDS:
        return Skipped(Reason.UNKNOWN_KIND, f"{where}: {tag[:40]!r}", loses="removals")
    from_array, build = _KINDS[tag]
    try:
        return build(fields if fields is not None else from_array(value[1:]))
    except _Unusable as error:
        loses = "stores" if tag == "BlockStored" else "removals"
        return Skipped(error.reason, f"{where}: {tag}: {error.detail}", loses=loses)


# ---------------------------------------------------------------------------------------------------- array forms


def _stored_from_array(elements: Sequence[Any]) -> dict[str, Any]:
    """Name an array's elements: positions up to the extra keys, types after them.

    Releases disagree about what comes after the extra keys (a list of multimodal infos may precede the group), so the
    tail is read by type: the string is the kind, the integer before it the group and the one after it the window.
    """
    fields: dict[str, Any] = dict(zip(_STORED_FIELDS, elements, strict=False))
    if isinstance(name := fields.get("lora_name"), dict):  # SGLang puts {"cache_salt": ..} where vLLM has the adapter
        fields["lora_name"] = None
        fields["cache_salt"] = name.get("cache_salt")
    before: list[int] = []
    after: list[int] = []
    for element in elements[len(_STORED_FIELDS) :]:
        if isinstance(element, str):
            fields.setdefault("kv_cache_spec_kind", element)
        elif isinstance(element, int) and not isinstance(element, bool):
            (after if "kv_cache_spec_kind" in fields else before).append(element)
    if before:
        fields["group_idx"] = before[0]
    if after or len(before) > 1:
        fields["kv_cache_spec_sliding_window"] = (after or before[1:])[0]
    return fields


def _removed_from_array(elements: Sequence[Any]) -> dict[str, Any]:
    fields: dict[str, Any] = dict(zip(_REMOVED_FIELDS, elements, strict=False))
    tail = [e for e in elements[len(_REMOVED_FIELDS) :] if isinstance(e, int) and not isinstance(e, bool)]
    if tail:
        fields["group_idx"] = tail[0]
    return fields


# --------------------------------------------------------------------------------------------------------- fields


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    hashes = _hashes(fields)
    parent = fields.get("parent_block_hash")
    lora = _lora(fields)
    parent_hash = None if parent is None else _hash(parent)
    return BlockStored(
        hashes=hashes,
        parent=parent_hash,
        tokens=_tokens(fields),
        block_tokens=_integer(fields, "block_size", 0) or 0,
        medium=_medium(fields),
        group=_integer(fields, "group_idx", 0) or 0,
        kind=_text(fields, "kv_cache_spec_kind"),
        window=_integer(fields, "kv_cache_spec_sliding_window", None),
        lora=lora,
        extras=_extras(fields, len(hashes), is_root=parent_hash is None),
        locality=_text(fields, "locality"),
        ownership=_text(fields, "ownership"),
        session_id=_text(fields, "session_id"),
    )


def _removed(fields: Mapping[str, Any]) -> BlockRemoved:
    return BlockRemoved(hashes=_hashes(fields), medium=_medium(fields), group=_integer(fields, "group_idx", 0) or 0)


def _cleared(fields: Mapping[str, Any]) -> AllBlocksCleared:
    return AllBlocksCleared()


_KINDS: dict[str, tuple[Callable[[Sequence[Any]], dict[str, Any]], Callable[[Mapping[str, Any]], Event]]] = {
    "BlockStored": (_stored_from_array, _stored),
    "BlockRemoved": (_removed_from_array, _removed),
    "AllBlocksCleared": (lambda elements: {}, _cleared),
}


def _hashes(fields: Mapping[str, Any]) -> tuple[int, ...]:
    if "block_hashes" not in fields:
        raise _Unusable(Reason.MISSING_FIELD, "block_hashes")
    values = fields["block_hashes"]
    if not isinstance(values, list):
        raise _Unusable(Reason.BAD_FIELD, f"block_hashes is {type(values).__name__}, not an array")
    return tuple([_hash(value) for value in values])


def _hash(value: Any) -> int:
    """The wire's hash as 64 unsigned bits: SGLang's are signed, full digests keep their last eight bytes."""
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value <= _MASK:
        return value & _MASK
    if isinstance(value, bytes) and len(value) >= 8:
        return int.from_bytes(value[-8:], "big")
    raise _Unusable(Reason.BAD_HASH, f"{str(value)[:40]!r} is neither 64 bits nor a digest")


def _tokens(fields: Mapping[str, Any]) -> bytes:
    values = fields.get("token_ids")
    if values is None:
        return b""
    if not isinstance(values, list):
        raise _Unusable(Reason.BAD_TOKENS, f"token_ids is {type(values).__name__}, not an array")
    if values and isinstance(values[0], list):
        # SGLang with EAGLE sends (token, next token) pairs: the first of each is the token at that position.
        if not all(isinstance(pair, list) and pair for pair in values):
            raise _Unusable(Reason.BAD_TOKENS, "token_ids mixes pairs and numbers")
        values = [pair[0] for pair in values]
    try:
        packed = array("I", values)
    except (TypeError, OverflowError) as error:
        raise _Unusable(Reason.BAD_TOKENS, str(error)) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _integer(fields: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise _Unusable(Reason.BAD_FIELD, f"{name} is {str(value)[:40]!r}, not a number of 0 to 2^31-1")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise _Unusable(Reason.BAD_FIELD, f"{name} is {type(value).__name__}, not a string")


def _medium(fields: Mapping[str, Any]) -> str:
    return (_text(fields, "medium") or "GPU").upper()


def _lora(fields: Mapping[str, Any]) -> str | None:
    name = _text(fields, "lora_name")
    if name:
        return name
    number = fields.get("lora_id")
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise _Unusable(Reason.BAD_FIELD, f"lora_id is {type(number).__name__}, not a number")
    # An adapter number means nothing outside its engine. The blocks must not be taken for the base model's.
    return f"\0lora_id={number}"


def _extras(fields: Mapping[str, Any], blocks: int, *, is_root: bool) -> tuple[Extra | None, ...]:
    values = fields.get("extra_keys")
    extras: list[Extra | None] = []
    if values is not None and blocks:
        if not isinstance(values, list) or len(values) != blocks:
            raise _Unusable(Reason.BAD_EXTRA_KEYS, f"not an array with one element for each of {blocks} hashes")
        extras = [_extra(value, fields) for value in values]
    salt = fields.get("cache_salt")
    if salt is not None and blocks and is_root:
        if not isinstance(salt, str):
            raise _Unusable(Reason.BAD_EXTRA_KEYS, f"cache_salt is {type(salt).__name__}, not a string")
        extras = extras or [None] * blocks
        extras[0] = msgspec.structs.replace(extras[0] or Extra(), salt=salt)
    return tuple(extras) if any(extras) else ()


def _extra(value: Any, fields: Mapping[str, Any]) -> Extra | None:
    """Sort one block's extra keys: adapter name, multimodal items, embeddings digest, salt."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise _Unusable(Reason.BAD_EXTRA_KEYS, f"a block's extra keys are {type(value).__name__}, not an array")
    salt: str | None = None
    items: list[Item] = []
    embeds = b""
    for position, key in enumerate(value):
        match key:
            case str() if position == 0 and fields.get("lora_name"):
                pass  # the adapter's name, which the event has in a field of its own
            case str() | ["cache_salt", str()]:
                salt = key if isinstance(key, str) else key[1]
            case [str() as identifier, int() as offset] | ["mm", str() as identifier, int() as offset]:
                items.append(Item(identifier, offset))
            case bytes() | ["prompt_embeds", bytes()]:
                embeds += key if isinstance(key, bytes) else key[1]
            case int() | ["lora", *_]:
                pass  # older releases put the adapter's number here
            case _:
                raise _Unusable(Reason.BAD_EXTRA_KEYS, f"{str(key)[:40]!r} is no extra key")
    return Extra(salt, tuple(items), embeds) if salt is not None or items or embeds else None
