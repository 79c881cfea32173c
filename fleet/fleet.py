"""The fleet's state, column by column: one row (slot) per endpoint, one NumPy array per fact.

A filter returns a mask and a scorer a vector because they read columns; a thousand endpoints then cost about what ten do.

Rules
1. One owner. The event loop's thread writes (discovery, scraper, books, breaker all run there); nothing here takes a lock.
   Another thread may read single numbers, but an array it holds can be outgrown: `add` may reallocate every column.
2. A slot number means one endpoint from `add` until `release`. `remove` takes the endpoint out of every answer at once but
   keeps the number reserved, because the index still carries its bit; whoever cleared the index calls `release`.
3. A reused slot starts from defaults: `release` resets all columns and tells those in `when_released` (the books).
4. Ages, not guesses: scraped columns keep their last value, `scraped_at` says from when (-inf: never).
"""

import time
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.endpoint import Endpoint, Role
from fleet.listing import Listing
from fleet.pending import PendingPrompts
from fleet.request import Vector

Slots = NDArray[np.intp]
"""Slot numbers."""
Mask = NDArray[np.bool_]

__all__ = ["Adapters", "Fleet", "Mask", "Slots", "Vector"]

_REMEMBERED = 1_000
"""Masks and vectors kept while the fleet stays as it is: more than the filters and scorers of a configuration ask for."""


class Adapters(msgspec.Struct, frozen=True):
    """LoRA adapters of one endpoint, as last scraped."""

    running: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    most: int = 0
    """Adapters that fit into one batch (vLLM: max_lora); 0 where unknown."""


class Fleet:
    """Endpoints by slot and what is known of each. Vectors and masks are indexed by slot and `capacity` long."""

    # Scraped from the engine. Requests, requests, share 0..1 of blocks in use by requests, monotonic seconds.
    waiting: Vector
    running: Vector
    kv_usage: Vector
    scraped_at: Vector
    kv_capacity_tokens: Vector
    """Tokens that fit into the engine's KV cache; 0 where unknown."""
    block_tokens: NDArray[np.int64]
    """The engine's block size; 0 where unknown."""

    # Whether to send anything there.
    healthy: Mask
    """False after the scraper failed several times in a row. True until something was tried."""
    tripped: Mask
    """True while the circuit breaker keeps requests away."""
    draining: Mask
    """True while the endpoint finishes what it has and should get nothing new."""

    # The router's own books (fleet.books writes them).
    in_flight: Vector
    """Requests sent there and not yet finished."""
    awaiting: Vector
    """Those of them without a first token."""
    in_flight_tokens: Vector
    """Uncached prompt tokens (n) of requests without a first token."""
    in_flight_square: Vector
    """Sum of n * (h + n/2) over the same requests, h = cached tokens: what attention costs, in tokens squared."""
    oldest_tokens: Vector
    oldest_square: Vector
    """n and n * (h + n/2) of the longest waiting request that the slot computes, without a first token; 0 without one."""
    prefills: NDArray[np.float64]
    """What the four above are views of, so that all is priced in one product: row 0 tokens, row 1 squares; the first
    `capacity` of a row are what is in flight, the others the oldest."""
    oldest_left_tokens: Vector
    oldest_left_square: Vector
    """The same of what is left of it, by the blocks that the engine has announced since; equal to the above until it has."""
    oldest_since: Vector
    """When the engine can have begun with it: the later of its dispatch and the last first token seen (monotonic s)."""
    decoding: Vector
    """Requests that have their first token."""
    decode_tokens: Vector
    """Prompt tokens of those."""
    reserved_tokens: Vector
    """Sum of n + expected output over everything in flight: what the requests will take of the KV cache."""
    chosen_at: Vector
    """A counter value of the last time this slot was reserved; smaller = longer ago. Breaks ties."""

    def __init__(self, capacity: int = 16, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.capacity = capacity
        self.generation = 0
        """Changes with every add and remove; what is derived from endpoints alone can be cached by it."""
        self.scrape_interval_s = 0.0
        """How often the scraped columns are renewed; 0 while nobody scrapes."""
        self.when_released: list[Callable[[int], None]] = []
        self._told: list[weakref.WeakMethod[Callable[[int], None]]] = []
        self.pending = PendingPrompts()
        """Prompts sent and without a first token: their blocks count as cached where they are."""
        self.kept: Mask | None = None
        """Slots that the router queue keeps from the request that is being placed; None but for moments."""
        self.adapters: list[Adapters | None] = [None] * capacity
        self.listings: list[Listing] = [Listing()] * capacity
        """What /v1/models listed; empty where unknown."""
        self.listings_changed = 0
        """Grows with every change of a listing."""
        self.attributes: dict[str, Vector] = {}
        """Configured extra metrics; NaN where an endpoint has none."""
        self._columns: dict[str, float] = {
            "waiting": 0.0,
            "running": 0.0,
            "kv_usage": 0.0,
            "scraped_at": -np.inf,
            "kv_capacity_tokens": 0.0,
            "in_flight": 0.0,
            "awaiting": 0.0,
            "in_flight_tokens": 0.0,
            "in_flight_square": 0.0,
            "oldest_tokens": 0.0,
            "oldest_square": 0.0,
            "oldest_left_tokens": 0.0,
            "oldest_left_square": 0.0,
            "oldest_since": 0.0,
            "decoding": 0.0,
            "decode_tokens": 0.0,
            "reserved_tokens": 0.0,
            "chosen_at": 0.0,
        }
        for name, default in self._columns.items():
            setattr(self, name, np.full(capacity, default))
        self._stack_prefills()
        self.block_tokens = np.zeros(capacity, np.int64)
        self.healthy = np.ones(capacity, np.bool_)
        self.tripped = np.zeros(capacity, np.bool_)
        self.draining = np.zeros(capacity, np.bool_)
        self._live = np.zeros(capacity, np.bool_)
        self._endpoints: list[Endpoint | None] = [None] * capacity
        self._by_address: dict[tuple[str, int], int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._removed: set[int] = set()
        self._cache: dict[Hashable, Any] = {}
        self._slots = np.empty(0, np.intp)

    # Endpoints

    def add(self, endpoint: Endpoint) -> int:
        """The slot of the new endpoint. ValueError where its address and rank are taken or its role label is unknown."""
        key = (endpoint.address, endpoint.rank)
        if key in self._by_address:
            raise ValueError(
                f"endpoint {endpoint.name!r}: {endpoint.address} rank {endpoint.rank} is already in the fleet"
            )
        _ = endpoint.role  # an unknown role must fail here, not while a request is being scheduled
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._endpoints[slot] = endpoint
        self.draining[slot] = endpoint.draining
        self._by_address[key] = slot
        self._live[slot] = True
        self._changed()
        return slot

    def replace(self, slot: int, endpoint: Endpoint) -> None:
        """New labels, events or model for the same address and rank; the slot and what is known about it stay."""
        old = self.endpoint(slot)
        if (old.address, old.rank) != (endpoint.address, endpoint.rank):
            raise ValueError(f"endpoint {endpoint.name!r}: another address is another endpoint; remove and add")
        _ = endpoint.role
        self._endpoints[slot] = endpoint
        self.draining[slot] = endpoint.draining
        self._changed()

    def remove(self, slot: int) -> None:
        """Take the endpoint out. The number stays reserved until `release(slot)`. KeyError where nothing lives there."""
        endpoint = self._endpoints[slot] if self._live[slot] else None
        if endpoint is None:
            raise KeyError(f"slot {slot} holds no endpoint")
        del self._by_address[endpoint.address, endpoint.rank]
        self._live[slot] = False
        self._removed.add(slot)
        self._changed()

    def release(self, slot: int) -> None:
        """Let the number be used again; call it when the index has forgotten the slot. KeyError unless it was removed."""
        self._removed.remove(slot)
        for told in self.when_released:
            told(slot)
        for weak in self._told:
            if method := weak():
                method(slot)
        for name, default in self._columns.items():
            getattr(self, name)[slot] = default
        self.block_tokens[slot] = 0
        self.healthy[slot], self.tripped[slot], self.draining[slot] = True, False, False
        self.adapters[slot], self.listings[slot], self._endpoints[slot] = None, Listing(), None
        self.listings_changed += 1
        for column in self.attributes.values():
            column[slot] = np.nan
        self._free.append(slot)

    def tell_of_released(self, method: Callable[[int], None]) -> None:
        """As `when_released`, for a method of something that may go before the fleet does: it is not kept alive by this."""
        self._told = [*(weak for weak in self._told if weak() is not None), weakref.WeakMethod(method)]

    def __contains__(self, slot: int) -> bool:
        """Whether a live endpoint has this slot."""
        return 0 <= slot < self.capacity and bool(self._live[slot])

    def endpoint(self, slot: int) -> Endpoint:
        """The endpoint of a live slot, or of one removed and not yet released (log lines still want its name)."""
        endpoint = self._endpoints[slot]
        if endpoint is None:
            raise KeyError(f"slot {slot} holds no endpoint")
        return endpoint

    def slot_of(self, address: str, rank: int = 0) -> int | None:
        """The live slot of `ip:port` and rank, or None."""
        return self._by_address.get((address, rank))

    def slots(self) -> Slots:
        """All live endpoints, healthy or not, in slot order. Do not write into the array: it is shared."""
        return self._slots

    def available(self) -> Slots:
        """Live endpoints that are healthy, whose breaker is closed and which are not draining."""
        return self.usable().nonzero()[0]

    def usable(self) -> Mask:
        """The same per slot."""
        return self._live & self.healthy & ~(self.tripped | self.draining)

    # Derived from endpoints, cached until one comes or goes

    def mask_of(self, key: Hashable, test: Callable[[Endpoint], bool]) -> Mask:
        """Per slot whether `test(endpoint)` holds (False for free slots). `key` stands for `test` in the cache."""
        mask: Mask | None = self._cache.get(key)
        if mask is None:
            mask = np.zeros(self.capacity, np.bool_)
            for slot in self._slots:
                mask[slot] = test(self.endpoint(int(slot)))
            self._remember(key, mask)
        return mask

    def vector_of(self, key: Hashable, value: Callable[[Endpoint], float]) -> Vector:
        """Per slot `value(endpoint)` (0 for free slots). `key` stands for `value` in the cache."""
        vector: Vector | None = self._cache.get(key)
        if vector is None:
            vector = np.zeros(self.capacity)
            for slot in self._slots:
                vector[slot] = value(self.endpoint(int(slot)))
            self._remember(key, vector)
        return vector

    def _remember(self, key: Hashable, value: Any) -> None:
        if len(self._cache) >= _REMEMBERED:  # of plugins that a reload has replaced, say
            self._cache.clear()
        self._cache[key] = value

    def role_mask(self, roles: Iterable[Role | None]) -> Mask:
        """Per slot whether its role is among `roles`; None among them means endpoints without a role label."""
        wanted = frozenset(roles)
        known: Mask | None = self._cache.get(wanted)
        return self.mask_of(wanted, lambda endpoint: endpoint.role in wanted) if known is None else known

    def listed(self, slot: int, listing: Listing) -> None:
        """An endpoint listed its models."""
        if self.listings[slot] != listing:
            self.listings[slot] = listing
            self.listings_changed += 1

    def age(self, slots: Slots, now: float | None = None) -> Vector:
        """Seconds since each was last scraped; inf where it never was."""
        return (self.clock() if now is None else now) - self.scraped_at[slots]

    def attribute(self, key: str) -> Vector:
        """The column of a configured extra metric, created (all NaN) where it is new."""
        if key not in self.attributes:
            self.attributes[key] = np.full(self.capacity, np.nan)
        return self.attributes[key]

    def _changed(self) -> None:
        self.generation += 1
        self._cache.clear()
        self._slots = np.flatnonzero(self._live)

    def _stack_prefills(self) -> None:
        tokens, square = (self.in_flight_tokens, self.oldest_tokens), (self.in_flight_square, self.oldest_square)
        self.prefills = np.stack([np.concatenate(tokens), np.concatenate(square)])
        self.in_flight_tokens, self.oldest_tokens = np.split(self.prefills[0], 2)
        self.in_flight_square, self.oldest_square = np.split(self.prefills[1], 2)

    def _grow(self) -> None:
        old, new = self.capacity, self.capacity * 2
        for name, default in self._columns.items():
            setattr(self, name, np.concatenate([getattr(self, name), np.full(new - old, default)]))
        self._stack_prefills()
        self.block_tokens = np.concatenate([self.block_tokens, np.zeros(new - old, np.int64)])
        self.healthy = np.concatenate([self.healthy, np.ones(new - old, np.bool_)])
        for name in ("tripped", "draining", "_live"):
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros(new - old, np.bool_)]))
        for key, column in self.attributes.items():
            self.attributes[key] = np.concatenate([column, np.full(new - old, np.nan)])
        self.adapters += [None] * (new - old)
        self.listings += [Listing()] * (new - old)
        self._endpoints += [None] * (new - old)
        self._free = list(range(new - 1, old - 1, -1))
        self.capacity = new
