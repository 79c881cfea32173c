"""One shard of the index: its keys in order of recency, each with the slots that hold it.

    holders: key -> bitset of slots, any tier; the order of the dict is the recency of the keys, oldest first
    tiers:   key -> one bitset per tier, only for keys that somebody holds outside the GPU
    order:   key -> slots by confirmation, oldest first, only for keys near the holder limit

Everything here runs under `lock`, except look-ups in `holders` and `tiers`, which take none.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock

from indexer.matched import slots_of

PerTier = tuple[int, ...]


class Shard:
    """At most `max_keys` keys and `max_holders` slots per key; `lose` hears the bitsets of what is about to go."""

    __slots__ = (
        "_lose",
        "entries",
        "evicted_holders",
        "evicted_keys",
        "holders",
        "last_per_tier",
        "lock",
        "max_holders",
        "max_keys",
        "order",
        "ordered_above",
        "tiers",
    )

    def __init__(self, max_keys: int, max_holders: int, lose: Callable[[Sequence[int]], None]) -> None:
        self.lock = Lock()
        self.holders: dict[int, int] = {}
        self.tiers: dict[int, PerTier] = {}
        self.last_per_tier: PerTier = ()
        self.order: dict[int, list[int]] = {}
        self.max_keys = max_keys
        self.max_holders = max_holders
        self.ordered_above = max_holders >> 1
        self.entries = 0  # (slot, tier, key) triples
        self.evicted_keys = 0
        self.evicted_holders = 0
        self._lose = lose

    def enter(self, key: int, slot: int, bit: int, tier: int) -> bool:
        """Note that `slot` (its `bit`) holds `key` in `tier`; the key becomes the youngest. True if that is new."""
        holders = self.holders
        held = holders.pop(key, 0)
        elsewhere = bool(tier) or key in self.tiers
        fresh = self._enter_tier(key, held, bit, tier) if elsewhere else not held & bit
        if held:
            holders[key] = held = held | bit
            if held.bit_count() > self.ordered_above:
                self._confirm(key, held, slot)
        else:
            holders[key] = bit  # the caller's object, shared by all keys that only this slot holds
            if len(holders) > self.max_keys:
                self._evict_keys()
        if fresh:
            self.entries += 1
        return fresh

    def leave(self, key: int, bit: int, tier: int) -> bool:
        """The slot of `bit` no longer holds `key` in `tier`. False if it did not."""
        held = self.holders.get(key, 0)
        if not held & bit:
            return False
        left = held ^ bit
        per_tier = self.tiers.get(key)
        if per_tier is not None:
            if not per_tier[tier] & bit:
                return False
            rows = list(per_tier)
            rows[tier] ^= bit
            self._set_tiers(key, tuple(rows))
            left = rows[0] | rows[1] | rows[2]
        elif tier:
            return False
        self.entries -= 1
        if left != held:
            self._put(key, left, bit)
        return True

    def forget(self, key: int, bit: int) -> int:
        """The slot of `bit` no longer holds `key` anywhere; returns in how many tiers it did."""
        held = self.holders.get(key, 0)
        if not held & bit:
            return 0
        tiers = self._forget_tiers(key, bit)
        self.entries -= tiers
        self._put(key, held ^ bit, bit)
        return tiers

    def touch(self, key: int) -> None:
        held = self.holders.pop(key, 0)
        if held:
            self.holders[key] = held

    def _put(self, key: int, left: int, gone: int) -> None:
        if left:
            self.holders[key] = left
        else:
            del self.holders[key]
        if key in self.order:
            slot = gone.bit_length() - 1
            if slot in self.order[key]:
                self.order[key].remove(slot)
            if left.bit_count() <= self.ordered_above:
                del self.order[key]

    def _enter_tier(self, key: int, held: int, bit: int, tier: int) -> bool:
        per_tier = self.tiers.get(key, (held, 0, 0))
        if per_tier[tier] & bit:
            return False
        rows = list(per_tier)
        rows[tier] |= bit
        self._set_tiers(key, tuple(rows))
        return True

    def _forget_tiers(self, key: int, bit: int) -> int:
        per_tier = self.tiers.get(key)
        if per_tier is None:
            return 1
        self._set_tiers(key, tuple(bits & ~bit for bits in per_tier))
        return sum(1 for bits in per_tier if bits & bit)

    def _set_tiers(self, key: int, per_tier: PerTier) -> None:
        if any(per_tier[1:]):
            # Neighbours in a chain are mostly held alike: one tuple for all of them halves what tiers cost.
            if per_tier == self.last_per_tier:
                per_tier = self.last_per_tier
            self.tiers[key] = self.last_per_tier = per_tier
        else:
            self.tiers.pop(key, None)

    def _confirm(self, key: int, held: int, slot: int) -> None:
        order = self.order.setdefault(key, [])
        if slot in order:
            order.remove(slot)
        order.append(slot)
        if held.bit_count() <= self.max_holders:
            return
        unordered = held
        for known in order:
            unordered &= ~(1 << known)
        victim = next(slots_of(unordered)) if unordered else order[0]
        bit = 1 << victim
        self._lose([bit])
        self.entries -= self._forget_tiers(key, bit)
        self.evicted_holders += 1
        self._put(key, held ^ bit, bit)

    def _evict_keys(self) -> None:
        # In steps of 1/64: finding the oldest key means passing over the places of those that have left.
        count = len(self.holders) - self.max_keys + (self.max_keys >> 6)
        victims = list(islice(self.holders.items(), count))
        self._lose([held for _, held in victims])
        for key, held in victims:
            del self.holders[key]
            self.entries -= sum(bits.bit_count() for bits in self.tiers.pop(key, (held,)))
            self.order.pop(key, None)
        self.evicted_keys += len(victims)
