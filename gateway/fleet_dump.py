"""What the gateway knows of its fleet at one moment, as one JSON document: written by GET /state/dump, read by
`warmroute explain`.

It holds addresses, numbers and hashes; no text of any prompt. Times are ages in seconds before `at`, so that a dump can be read
on another machine. Block keys are bounded, the most recently used first, and `complete` says whether they are all there.
"""

import base64
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from fleet.endpoint import Endpoint
from fleet.fleet import Adapters, Fleet
from fleet.listing import Listing
from gateway.hybrid_matching import Layout
from gateway.matching import Streams
from indexer.index import Index
from indexer.matched import slots_of
from indexer.tier import NAMES
from indexer.trust import Reason, State, Trust

VERSION = 1
KEYS = 200_000
"""Block keys in a dump unless more are asked for: a few megabytes."""
SCRAPED = ("waiting", "running", "kv_usage", "kv_capacity_tokens")
BOOKED = (
    *("in_flight", "awaiting", "in_flight_tokens", "in_flight_square", "decoding", "decode_tokens", "reserved_tokens"),
    *("oldest_tokens", "oldest_square", "oldest_left_tokens", "oldest_left_square", "chosen_at"),
)


class DumpError(ValueError):
    """The document is no dump; the message says what is wrong with it."""


class DumpedEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: Endpoint
    columns: dict[str, float]
    """Of fleet.fleet.Fleet, scraped and booked."""
    scraped_age_s: float | None = None
    oldest_age_s: float | None = None
    """Since the engine can have begun with its longest waiting prompt."""
    healthy: bool = True
    tripped: bool = False
    draining: bool = False
    block_tokens: int = 0
    listing: Listing = Listing()
    adapters: Adapters | None = None
    trust: State = "exact"
    trust_reason: Reason = Reason.NONE
    trust_detail: str = ""
    stream_block_tokens: int = 0
    engine_block_tokens: int = 0
    layout: Layout = ()
    keys: dict[str, str] = {}
    """Tier -> block keys, base64 of 64-bit little-endian integers."""


class FleetDump(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    at: float
    """Unix seconds."""
    complete: bool
    endpoints: list[DumpedEndpoint]


class DumpedStreams:
    """What a dump says of the event streams, for `gateway.matching`."""

    def __init__(self, by_slot: dict[int, DumpedEndpoint]) -> None:
        self._by_slot = by_slot

    def block_tokens(self, slot: int) -> int:
        return self._by_slot[slot].stream_block_tokens

    def engine_block_tokens(self, slot: int) -> int:
        return self._by_slot[slot].engine_block_tokens

    def layout(self, slot: int) -> Layout:
        return self._by_slot[slot].layout

    def trust(self, slot: int) -> Trust:
        here = self._by_slot[slot]
        return Trust(here.trust, here.trust_reason, 0.0, here.trust_detail)


def fleet_rows(
    fleet: Fleet,
    streams: Streams,
    layout_of: Callable[[int], Layout],
    engine_block_of: Callable[[int], int] = lambda slot: 0,
) -> dict[int, DumpedEndpoint]:
    """Slot -> everything but its keys. To be called on the event loop's thread."""
    now, rows = fleet.clock(), {}
    for slot in map(int, fleet.slots()):
        trust = streams.trust(slot)
        rows[slot] = DumpedEndpoint(
            endpoint=fleet.endpoint(slot),
            columns={name: float(getattr(fleet, name)[slot]) for name in (*SCRAPED, *BOOKED)},
            scraped_age_s=_age(now, float(fleet.scraped_at[slot])),
            oldest_age_s=_age(now, float(fleet.oldest_since[slot])),
            healthy=bool(fleet.healthy[slot]),
            tripped=bool(fleet.tripped[slot]),
            draining=bool(fleet.draining[slot]),
            block_tokens=int(fleet.block_tokens[slot]),
            listing=fleet.listings[slot],
            adapters=fleet.adapters[slot],
            trust=trust.state,
            trust_reason=trust.reason,
            trust_detail=trust.detail,
            stream_block_tokens=streams.block_tokens(slot),
            engine_block_tokens=engine_block_of(slot),
            layout=layout_of(slot),
        )
    return rows


def with_keys(rows: dict[int, DumpedEndpoint], index: Index, at: float, keys: int = KEYS) -> FleetDump:
    """The dump. Takes a while with many keys and shares nothing with the event loop: call it in a worker thread."""
    held: dict[tuple[int, int], list[int]] = {}
    for key, per_tier in index.youngest(keys):
        for tier, bits in enumerate(per_tier):
            for slot in slots_of(bits):
                held.setdefault((slot, tier), []).append(key)
    endpoints = []
    for slot, row in rows.items():
        mine = {name: _packed(held[slot, tier]) for tier, name in enumerate(NAMES) if (slot, tier) in held}
        endpoints.append(msgspec.structs.replace(row, keys=mine))
    return FleetDump(version=VERSION, at=at, complete=len(index) <= keys, endpoints=endpoints)


def read_dump(raw: bytes) -> FleetDump:
    """Raises DumpError."""
    try:
        dump = msgspec.json.decode(raw, type=FleetDump)
    except msgspec.DecodeError as error:
        raise DumpError(f"not a dump of GET /state/dump: {error}") from error
    if dump.version != VERSION:
        raise DumpError(f"version {dump.version} of the dump is not the one this program reads, {VERSION}")
    return dump


def restore(dump: FleetDump, fleet: Fleet, index: Index) -> DumpedStreams:
    """Fill an empty fleet and index. Raises DumpError for columns or keys that nothing can be made of."""
    by_slot: dict[int, DumpedEndpoint] = {}
    for row in dump.endpoints:
        slot = fleet.add(row.endpoint)
        by_slot[slot] = row
        now = fleet.clock()
        for name, value in row.columns.items():
            if name not in SCRAPED and name not in BOOKED:
                raise DumpError(f"endpoint {row.endpoint.name}: no column {name!r}")
            getattr(fleet, name)[slot] = value
        fleet.scraped_at[slot] = -np.inf if row.scraped_age_s is None else now - row.scraped_age_s
        fleet.oldest_since[slot] = 0.0 if row.oldest_age_s is None else now - row.oldest_age_s
        fleet.healthy[slot], fleet.tripped[slot], fleet.draining[slot] = row.healthy, row.tripped, row.draining
        fleet.block_tokens[slot] = row.block_tokens
        fleet.listed(slot, row.listing)
        fleet.adapters[slot] = row.adapters
        for name, packed in row.keys.items():
            if name not in NAMES:
                raise DumpError(f"endpoint {row.endpoint.name}: no tier {name!r}; there are {', '.join(NAMES)}")
            index.add(slot, NAMES.index(name), _unpacked(packed, row.endpoint.name))
    return DumpedStreams(by_slot)


def _age(now: float, then: float) -> float | None:
    return now - then if np.isfinite(then) and then > 0 else None


def _packed(keys: Iterable[int]) -> str:
    return base64.b64encode(np.array(list(keys), "<u8").tobytes()).decode()


def _unpacked(text: str, name: str) -> list[int]:
    try:
        keys: Any = np.frombuffer(base64.b64decode(text, validate=True), "<u8")
    except ValueError as error:
        raise DumpError(f"endpoint {name}: keys are not base64 of 64-bit integers: {error}") from error
    result: list[int] = keys.tolist()
    return result
