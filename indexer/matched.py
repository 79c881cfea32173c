"""The answer of a match: how many leading blocks each slot holds, and where they live."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from indexer import tier

# Rows of `Matched.blocks`: the tiers, then blocks that are not announced yet but expected (indexer.predicted).
PREDICTED: Final = len(tier.NAMES)
ROWS: Final = PREDICTED + 1

# A CPU or disk block spares the computation but not the transfer. An expected block counts in full: the engine that
# will compute it does so before it comes to the next request.
DEFAULT_WEIGHTS: Final = (1.0, 0.8, 0.5, 1.0)


class Matched(msgspec.Struct, frozen=True):
    """Leading blocks per slot. `runs` are (row, bitset of slots, blocks) and add up: one slot can be in several."""

    total_blocks: int  # how many blocks were asked for
    runs: tuple[tuple[int, int, int], ...] = ()

    def blocks(self, capacity: int) -> NDArray[np.int64]:
        """Leading blocks, shape (tiers + 1, capacity); each leading block counts once, in the fastest tier it has.

        Slots at or beyond `capacity` are left out: they are newer than the fleet the caller looks at.
        """
        counts = np.zeros((ROWS, capacity), dtype=np.int64)
        limit = (1 << capacity) - 1
        for row, bits, blocks in self.runs:
            inside = bits & limit
            if inside.bit_count() <= 8:
                for slot in slots_of(inside):
                    counts[row, slot] += blocks
            else:
                raw = np.frombuffer(inside.to_bytes((capacity + 7) // 8, "little"), dtype=np.uint8)
                counts[row] += np.unpackbits(raw, count=capacity, bitorder="little") * np.int64(blocks)
        return counts

    def tokens(self, capacity: int, block_tokens: int) -> NDArray[np.float64]:
        """Leading tokens per slot, shape (capacity,), all tiers alike."""
        leading: NDArray[np.float64] = self.blocks(capacity).sum(axis=0).astype(np.float64)
        leading *= block_tokens
        return leading

    def weighted_tokens(
        self, capacity: int, block_tokens: int, weights: Sequence[float] = DEFAULT_WEIGHTS
    ) -> NDArray[np.float64]:
        """Leading tokens per slot, each worth the weight of its tier.

        `weights` has one value per tier, fastest first, and may have one more for predicted blocks (1 if it has not).
        """
        if len(weights) not in (PREDICTED, ROWS):
            raise ValueError(f"weights: {len(weights)} values, expected {PREDICTED} (tiers) or {ROWS} (and predicted)")
        full = np.array([*weights, 1.0][:ROWS], dtype=np.float64)
        worth: NDArray[np.float64] = full @ self.blocks(capacity).astype(np.float64)
        worth *= block_tokens
        return worth

    def by_slot(self) -> dict[int, int]:
        """Leading blocks of every slot that holds at least the first."""
        counts: dict[int, int] = {}
        for _, bits, blocks in self.runs:
            for slot in slots_of(bits):
                counts[slot] = counts.get(slot, 0) + blocks
        return counts

    def by_tier(self, slot: int) -> tuple[int, ...]:
        """Leading blocks of one slot: one count per tier, then predicted ones."""
        counts = [0] * ROWS
        for row, bits, blocks in self.runs:
            if bits >> slot & 1:
                counts[row] += blocks
        return tuple(counts)


def slots_of(bits: int) -> Iterator[int]:
    """The slots in a bitset, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
