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
    """Block keys sent per slot. One block size. The event loop's thread owns it."""

    def __init__(self, fleet: Fleet, block_tokens: int, capacity_per_slot: int, max_tokens: int | None) -> None:
        self.block_tokens = block_tokens
        self._fleet = fleet
        self._capacity = capacity_per_slot
        self._max_blocks = max_tokens // block_tokens if max_tokens else None
        self._index = Index()
        self._sent: dict[int, OrderedDict[int, None]] = {}
        fleet.when_released.append(self.forget)

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
        dropped = [held.popitem(last=False)[0] for _ in range(len(held) - self._capacity)]
        if dropped:
            self._index.remove(slot, GPU, dropped)

    def forget(self, slot: int) -> None:
        """The slot is about to mean another endpoint."""
        self._index.clear(slot, self._sent.pop(slot, {}))
