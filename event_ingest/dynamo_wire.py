"""What Dynamo workers publish over NATS: subjects, envelopes, events.

    namespace.<ns>.component.<comp>.kv-events                       1.0, 1.3: one event in an envelope
    namespace.<ns>.component.<comp>.endpoint.<ep>.kv-events         1.6: a list of events in an envelope
    namespace-<ns>-component-<comp>-kv-events.kv-events             JetStream: JSON, one event, no envelope

The component says what a worker does (`backend`, `prefill`, `decode`); a subscription written for one of them misses the
others, so subscribe to `SUBSCRIPTIONS`. Bodies are taken as they come: msgpack or JSON, with or without envelope, one event
or a list. As everywhere, what cannot be used is counted with a reason and costs nothing else.

The wire has no token ids, no adapter name, no salt and no block size: per block only a content hash (`tokens_hash`) and the
engine's own `block_hash`. See `dynamo_stream` for what can be done with that.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Reason, Skipped
from fleet.endpoint import Role

SUBSCRIPTIONS = ("namespace.*.component.*.kv-events", "namespace.*.component.*.endpoint.*.kv-events")

_CORE = re.compile(
    r"namespace\.(?P<ns>[^.]+)\.component\.(?P<comp>[^.]+)(?:\.endpoint\.(?P<ep>[^.]+))?\.(?P<topic>[^.]+)"
)
_JETSTREAM = re.compile(r"namespace-(?P<ns>.+)-component-(?P<comp>.+)-kv-events\.(?P<topic>[^.]+)")
_WORKER_HASH = re.compile(r"[-_][0-9a-f]{8,}$")
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "backend": Role.BOTH}
_MASK = (1 << 64) - 1


class Subject(msgspec.Struct, frozen=True):
    """A parsed subject. `namespace` is without the worker-hash suffix that some deployments add (kept in `suffix`)."""

    namespace: str
    component: str
    endpoint: str | None
    topic: str
    suffix: str = ""

    @property
    def role(self) -> Role | None:
        """What the component's name says about its workers; None for names that say nothing."""
        name = self.component.lower()
        return next((role for word, role in _ROLES.items() if name == word or word in re.split(r"[-_]", name)), None)


class WorkerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of one worker's rank."""

    worker_id: int
    rank: int
    event_id: int
    """Counts events per (worker, rank); starts at 0 or 1 depending on the release."""
    event: Event


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """One message. Without an envelope on the wire the first three fields are None."""

    publisher_id: int | None = None
    sequence: int | None = None
    published_s: float | None = None
    events: tuple[WorkerEvent, ...] = ()
    skipped: tuple[Skipped, ...] = ()


class _Unusable(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def parse_subject(subject: str) -> Subject | None:
    """The parts of a subject, None where it is none of the known forms."""
    found = _CORE.fullmatch(subject) or _JETSTREAM.fullmatch(subject)
    if found is None:
        return None
    parts = found.groupdict()
    suffix = _WORKER_HASH.search(parts["ns"])
    namespace = parts["ns"][: suffix.start()] if suffix else parts["ns"]
    return Subject(namespace, parts["comp"], parts.get("ep"), parts["topic"], suffix.group()[1:] if suffix else "")


def decode(body: bytes, block_tokens: int) -> Envelope:
    """Decode one message; never raises. `block_tokens` is the engine's block size, which the wire does not carry."""
    try:
        value = _parse(body)
        if not isinstance(value, dict) or "payload" not in value:
            events, skipped = _events(value, block_tokens)
            return Envelope(events=events, skipped=skipped)
        payload = value["payload"]
        events, skipped = _events(_parse(payload) if isinstance(payload, bytes) else payload, block_tokens)
    except (msgspec.MsgspecError, RecursionError) as error:
        return Envelope(skipped=(Skipped(Reason.BAD_BATCH, str(error), loses="removals"),))
    stamp = _unsigned(value.get("published_at"))
    return Envelope(
        publisher_id=_unsigned(value.get("publisher_id")),
        sequence=_unsigned(value.get("sequence")),
        published_s=stamp / 1000 if stamp is not None else None,
        events=events,
        skipped=skipped,
    )


def _parse(body: bytes) -> Any:
    # In msgpack these two first bytes are small numbers, which no message is.
    if body.lstrip()[:1] in (b"{", b"["):
        return msgspec.json.decode(body)
    return msgspec.msgpack.decode(body)


def _events(value: Any, block_tokens: int) -> tuple[tuple[WorkerEvent, ...], tuple[Skipped, ...]]:
    events: list[WorkerEvent] = []
    skipped: list[Skipped] = []
    for number, entry in enumerate(value if isinstance(value, list) else [value]):
        try:
            events.append(_worker_event(entry, block_tokens))
        except _Unusable as error:
            skipped.append(Skipped(error.reason, f"event {number}: {error.detail}", loses="removals"))
    return tuple(events), tuple(skipped)


def _worker_event(entry: Any, block_tokens: int) -> WorkerEvent:
    if not isinstance(entry, dict) or not isinstance(inner := entry.get("event"), dict):
        raise _Unusable(Reason.BAD_EVENT, "not a map with a worker's event")
    medium = entry.get("storage_tier")
    if medium is not None and not isinstance(medium, str):
        raise _Unusable(Reason.BAD_FIELD, f"storage_tier is {type(medium).__name__}")
    return WorkerEvent(
        worker_id=_required(entry, "worker_id"),
        rank=_required(inner, "dp_rank", 0),
        event_id=_required(inner, "event_id"),
        event=_data(inner.get("data"), (medium or "device").upper(), block_tokens),
    )


def _data(data: Any, medium: str, block_tokens: int) -> Event:
    match data:
        case "cleared" | {"cleared": _}:
            return AllBlocksCleared()
        case {"stored": dict(stored)}:
            blocks = list(_blocks(stored))
            parent = stored.get("parent_hash")
            return BlockStored(
                hashes=tuple(_hash(block.get("block_hash"), "block_hash") for block in blocks),
                contents=tuple(_hash(block.get("tokens_hash"), "tokens_hash") for block in blocks),
                parent=None if parent is None else _hash(parent, "parent_hash"),
                block_tokens=block_tokens,
                medium=medium,
            )
        case {"removed": {"block_hashes": list(hashes)}}:
            return BlockRemoved(hashes=tuple(_hash(value, "block_hashes") for value in hashes), medium=medium)
        case dict() if data and not data.keys() & {"stored", "removed"}:
            raise _Unusable(Reason.UNKNOWN_KIND, f"{str(next(iter(data)))[:40]!r}")
        case _:
            raise _Unusable(Reason.BAD_EVENT, "data is neither stored, removed nor cleared")


def _blocks(stored: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    blocks = stored.get("blocks")
    if not isinstance(blocks, list):
        raise _Unusable(Reason.MISSING_FIELD, "stored.blocks")
    for block in blocks:
        if not isinstance(block, dict):
            raise _Unusable(Reason.BAD_FIELD, "a stored block is not a map")
        yield block


def _hash(value: Any, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value <= _MASK:
        return value & _MASK
    raise _Unusable(Reason.BAD_HASH, f"{name} {str(value)[:40]!r} is not a 64-bit integer")


def _required(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _unsigned(fields.get(name, default))
    if value is None:
        raise _Unusable(Reason.MISSING_FIELD if name not in fields else Reason.BAD_FIELD, name)
    return value


def _unsigned(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MASK else None
