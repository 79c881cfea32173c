"""The index: which slots hold which block keys, in which tier. Two levels of LRU, both bounded and counted.

    key's top bits --> shard: key -> bitset of slots, oldest key first (indexer.shard)
    slot flags     --> dense: slots whose leading run can be bisected (indexer.prefix)

Rules
1. Reads never write and take no lock. A writer moves a key to the young end of its shard by taking it out and putting
   it back, so a reader that misses a key looks again under that shard's lock; only then is it missing.
2. Locks are per shard, a shard is a range of key bits (keys are uniform, prompts are not), and no thread ever holds
   two. Inside one, only the lock of the slot flags is taken.
3. Nothing is forgotten silently. A key dropped by the key LRU and a holder dropped by the holder limit are counted in
   total and per slot (`lost`), and take the slot's dense flag away: what is left may have holes.
4. `dense` is a claim of whoever feeds a slot: no key this slot holds has a missing parent. It must be withdrawn before
   the add or remove that breaks it, and may be made again after the one that mends it. A slot that never claimed it is
   walked linearly, which is always right.
5. Order inside a batch: callers pass keys in chain order, parent first. The last key is made the oldest, so within a
   chain the tail is forgotten before the head.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from threading import Lock

import msgspec

from indexer import tier as tiers
from indexer.matched import PREDICTED, Matched, slots_of
from indexer.predicted import Predicted
from indexer.prefix import Cut, Peek, Run, Table, bisected, itemised, prolonged, walked
from indexer.shard import PerTier, Shard

MAX_SLOTS = 1 << 16


class Stats(msgspec.Struct, frozen=True):
    """`entries` are (slot, tier, key) triples; the evicted ones are counted since the index was made."""

    keys: int
    entries: int
    evicted_keys: int
    evicted_holders: int


class Index:
    """See the head of this file.

    max_keys     distinct keys, all shards together; evicted by recency, in steps of 1/64 of a shard
    max_holders  slots per key; the least recently confirmed one goes. Confirmations are ordered from when a key has
                 more than max_holders // 2 holders; holders not confirmed since are older than all others, lowest
                 slot first. A fleet smaller than half the limit pays nothing for it.
    shards       a power of two; 1 makes the key LRU exact over the entire index
    """

    def __init__(self, max_keys: int = 8_000_000, max_holders: int = 1024, shards: int = 64) -> None:
        if shards < 1 or shards & (shards - 1) or shards > 1 << 16:
            raise ValueError(f"shards must be a power of two up to 65536, got {shards}")
        if max_keys < shards or max_holders < 1:
            raise ValueError(f"max_keys must be at least {shards} (shards), max_holders at least 1")
        self.max_keys = max_keys
        self.max_holders = max_holders
        self._shards = [Shard(max_keys // shards, max_holders, self._lose) for _ in range(shards)]
        self._shift = 64 - (shards.bit_length() - 1)
        self._peeks: list[Peek] = [shard.holders.get for shard in self._shards]
        self._table = Table(self._peeks, [shard.tiers.get for shard in self._shards], self._shift, self.holders)
        self._bits: dict[int, int] = {}  # one int object per slot, shared by all keys that only this slot holds
        self._flags = Lock()
        self._claimed = 0  # slots whose feeder says they are dense
        self._holed = 0  # slots that lost an entry here
        self._mixed = 0  # slots with entries outside the GPU
        self._dense = 0  # claimed and not holed
        self._withdrawals = 0  # grows whenever a slot stops being dense
        self._lost: dict[int, int] = {}

    # Writing

    def add(self, slot: int, tier: int, keys: Iterable[int]) -> int:
        """Enter `keys` (chain order) as held by `slot` in `tier`; returns how many it did not hold there before."""
        bit, shards, shift = self._bit(slot, tier), self._shards, self._shift
        if tier:
            with self._flags:
                self._mixed |= bit
        new = 0
        for key in reversed(list(keys)):
            shard = shards[key >> shift]
            with shard.lock:
                new += shard.enter(key, slot, bit, tier)
        return new

    def remove(self, slot: int, tier: int, keys: Iterable[int]) -> int:
        """Take `keys` of `slot` out of `tier`; returns how many it held. A key that is not there is left alone."""
        bit, shards, shift = self._bit(slot, tier), self._shards, self._shift
        gone = 0
        for key in keys:
            shard = shards[key >> shift]
            with shard.lock:
                gone += shard.leave(key, bit, tier)
        return gone

    def clear(self, slot: int, keys: Iterable[int] | None = None) -> int:
        """Forget everything of `slot`, in all tiers; returns the number of entries.

        With `keys` (all keys the caller has entered and not removed) the cost is theirs; without, every key of the
        index is looked at. Afterwards the slot has lost nothing, and is dense if its feeder still claims so.
        """
        bit = self._bit(slot, 0)
        self._withdraw(bit)
        gone = 0
        if keys is not None:
            for key in keys:
                shard = self._shards[key >> self._shift]
                with shard.lock:
                    gone += shard.forget(key, bit)
        else:
            for shard in self._shards:
                with shard.lock:
                    for key in [key for key, held in shard.holders.items() if held & bit]:
                        gone += shard.forget(key, bit)
        with self._flags:
            self._holed &= ~bit
            self._mixed &= ~bit
            self._dense = self._claimed & ~self._holed
            self._lost.pop(slot, None)
        return gone

    def touch(self, keys: Sequence[int]) -> None:
        """Make `keys` (chain order, from the first block) the most recently used; unknown ones are skipped."""
        shards, shift = self._shards, self._shift
        for key in reversed(keys):
            shard = shards[key >> shift]
            with shard.lock:
                shard.touch(key)

    def set_dense(self, slot: int, dense: bool) -> None:
        """Claim that no key `slot` holds has a parent it lacks (rule 4), or withdraw the claim."""
        bit = self._bit(slot, 0)
        with self._flags:
            self._claimed = self._claimed | bit if dense else self._claimed & ~bit
            if not dense:
                self._withdrawals += 1
            self._dense = self._claimed & ~self._holed

    # Reading

    def holders(self, key: int) -> int:
        """The bitset of slots that hold `key` in any tier."""
        position = key >> self._shift
        held = self._peeks[position](key)
        if held is None:
            shard = self._shards[position]
            with shard.lock:
                held = shard.holders.get(key, 0)
        return held

    def tier_of(self, slot: int, key: int) -> int | None:
        """The fastest tier in which `slot` holds `key`, None if it does not."""
        per_tier = self._shards[key >> self._shift].tiers.get(key) or (self.holders(key),)
        return next((tier for tier, held in enumerate(per_tier) if held >> slot & 1), None)

    def match(self, keys: Sequence[int], predicted: Predicted | None = None) -> Matched:
        """Leading blocks of `keys` (chain order, from the first block) that every slot holds, by tier.

        Always the answer of a linear walk over the keys. With `predicted`, a block counts as held while it is only
        expected, and is reported as such.
        """
        if not keys:
            return Matched(0)
        for _ in range(2):
            withdrawals, dense = self._withdrawals, self._dense
            runs = self._runs(keys, dense, predicted)
            if withdrawals == self._withdrawals:
                return Matched(len(keys), tuple(runs))
        # Slots keep losing their density while we look: believe nobody.
        return Matched(len(keys), tuple(self._runs(keys, 0, predicted)))

    def lost(self, slot: int) -> int:
        """Keys of `slot` that the index dropped on its own, by either limit, since the slot was last cleared."""
        return self._lost.get(slot, 0)

    def stats(self) -> Stats:
        return Stats(
            keys=sum(len(shard.holders) for shard in self._shards),
            entries=sum(shard.entries for shard in self._shards),
            evicted_keys=sum(shard.evicted_keys for shard in self._shards),
            evicted_holders=sum(shard.evicted_holders for shard in self._shards),
        )

    def youngest(self, keys: int) -> Iterator[tuple[int, PerTier]]:
        """About `keys` of the most recently used keys, each with one bitset of slots per tier. For dumps: it copies the
        order of a shard under its lock, so ask on a thread that may wait."""
        share = -(-keys // len(self._shards))
        for shard in self._shards:
            with shard.lock:
                found = [
                    (key, held, shard.tiers.get(key)) for key, held in islice(reversed(shard.holders.items()), share)
                ]
            yield from ((key, per_tier or (held, 0, 0)) for key, held, per_tier in found)

    def __len__(self) -> int:
        return sum(len(shard.holders) for shard in self._shards)

    # Matching

    def _runs(self, keys: Sequence[int], dense: int, predicted: Predicted | None) -> list[Run]:
        expected = predicted.peek if predicted else None
        awaited = (expected(keys[0]) or 0) if expected is not None else 0
        first, mixed = self.holders(keys[0]), self._mixed
        cuts = bisected(keys, first & dense, self.holders) if first & dense else []
        runs = self._located(keys, cuts, mixed, None)
        if expected is not None:
            # A dense slot holds nothing beyond its run, so only expected blocks can prolong it.
            for slots, held in [*cuts, (awaited & dense & ~first, 0)]:
                runs += [(PREDICTED, longer, more) for longer, more in prolonged(keys, slots, held, expected)]
        if holed := (first | awaited) & ~dense:
            cuts, reliant = walked(keys, holed, self._table, expected)
            runs += self._located(keys, cuts, mixed | reliant, expected)
        return runs

    def _located(self, keys: Sequence[int], cuts: list[Cut], scattered: int, expected: Peek | None) -> list[Run]:
        runs = [(tiers.GPU, slots & ~scattered, blocks) for slots, blocks in cuts if slots & ~scattered]
        if rest := [(slots & scattered, blocks) for slots, blocks in cuts if slots & scattered]:
            runs += itemised(keys, rest, self._table, expected)
        return runs

    # Slot flags

    def _lose(self, lost: Sequence[int]) -> None:
        # Called by a shard before it drops entries, with the bitset of every key concerned.
        with self._flags:
            for bits in lost:
                self._holed |= bits
                for slot in slots_of(bits):
                    self._lost[slot] = self._lost.get(slot, 0) + 1
            self._dense = self._claimed & ~self._holed
            self._withdrawals += 1

    def _withdraw(self, bit: int) -> None:
        with self._flags:
            self._holed |= bit
            self._dense = self._claimed & ~self._holed
            self._withdrawals += 1

    def _bit(self, slot: int, tier: int) -> int:
        bit = self._bits.get(slot)
        if bit is None:
            if not 0 <= slot < MAX_SLOTS:
                raise ValueError(f"slot must be 0..{MAX_SLOTS - 1}, got {slot}")
            bit = self._bits.setdefault(slot, 1 << slot)
        if not 0 <= tier < len(tiers.NAMES):
            raise ValueError(f"tier must be 0..{len(tiers.NAMES) - 1} ({', '.join(tiers.NAMES)}), got {tier}")
        return bit
