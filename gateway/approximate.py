"""The approximate picture: what this router has sent where, for engines that publish no events.

Per endpoint a least-recently-used set of block keys, bounded like the engine's own cache. It assumes that an engine keeps
what it was sent; nothing confirms it. Source of the idea and its parameters: llm-d's approx-prefix-cache-producer.
"""

from collections import OrderedDict
from collections.abc import Sequence

from fleet.fleet import Fleet
from fleet.request import Match
from indexer.index import Index
from indexer.tier import GPU


class ApproximateCache:
    """Block keys sent per slot. One block size at a time. The event loop's thread owns it."""

    def __init__(
        self,
        fleet: Fleet,
        block_tokens: int,
        capacity_per_slot: int,
        max_tokens: int | None,
        *,
        follows_engines: bool = False,
    ) -> None:
        """`follows_engines`: block size and capacity are those that the engines report, the given ones while they do not."""
        self._fleet = fleet
        self._block_tokens, self._capacity, self._max_tokens = block_tokens, capacity_per_slot, max_tokens
        self._follows_engines = follows_engines
        self._index = Index()
        self._sent: dict[int, OrderedDict[int, None]] = {}
        fleet.tell_of_released(self.forget)

    def is_like(self, other: "ApproximateCache") -> bool:
        """Whether both would remember the same."""
        fields = ("_block_tokens", "_capacity", "_max_tokens", "_follows_engines")
        return all(getattr(self, name) == getattr(other, name) for name in fields)

    @property
    def block_tokens(self) -> int:
        """The first endpoint's where engines are followed. What was sent at another size is forgotten in its time."""
        slots = self._fleet.slots()
        if self._follows_engines and len(slots) and (reported := int(self._fleet.block_tokens[slots[0]])):
            return reported
        return self._block_tokens

    def _capacity_of(self, slot: int) -> int:
        tokens = self._fleet.kv_capacity_tokens[slot]
        return max(1, int(tokens) // self.block_tokens) if self._follows_engines and tokens > 0 else self._capacity

    @property
    def _max_blocks(self) -> int | None:
        return self._max_tokens // self.block_tokens if self._max_tokens else None

    def match(self, keys: Sequence[int]) -> Match:
        """Leading tokens that each endpoint was sent before."""
        keys = keys[: self._max_blocks]
        matched = self._index.match(keys)
        tokens = matched.tokens(self._fleet.capacity, self.block_tokens)
        return Match(
            tokens=tokens,
            weighted_tokens=tokens,
            total_tokens=len(keys) * self.block_tokens,
            block_tokens=self.block_tokens,
            keys=keys,
        )

    def sent(self, slot: int, keys: Sequence[int]) -> None:
        """Remember that a prompt with these keys went to `slot`; the oldest go where there are too many."""
        held = self._sent.setdefault(slot, OrderedDict())
        keys = keys[: self._max_blocks]
        for key in reversed(keys):  # the tail becomes the oldest: it is the first to go, as in the engine
            held.pop(key, None)
            held[key] = None
        self._index.add(slot, GPU, keys)
        dropped = [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity_of(slot))]
        if dropped:
            self._index.remove(slot, GPU, dropped)

    def forget(self, slot: int) -> None:
        """The slot is about to mean another endpoint."""
        self._index.clear(slot, self._sent.pop(slot, {}))
