"""How many leading blocks of a chain each slot holds: bisected where that is sound, walked where it is not.

    dense slot   it holds no block whose parent it lacks, so "holds block i" implies "holds all before": bisect
    any other    a run may end and blocks be held again further on: one AND per block until nobody is left

Both take bitsets of slots and serve all slots at once. For dense slots, d distinct lengths in a chain of n blocks cost
about d * log2(n / d) look-ups in place of n.

A bisection that races with a writer still lies between the answers before and after: a probe that finds a block saw
a state with at least that prefix, and one that does not saw a state without it.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

Holders: TypeAlias = Callable[[int], int]  # key -> bitset of slots, 0 for none
Peek: TypeAlias = Callable[[int], int | None]  # the same without the last word: None is "not found just now"
PerTier: TypeAlias = tuple[int, ...]  # one bitset per tier, fastest first
Cut: TypeAlias = tuple[int, int]  # bitset of slots, the leading blocks each of them has
Run: TypeAlias = tuple[int, int, int]  # row of Matched.blocks, bitset of slots, blocks


class Table:
    """How to look keys up in an index of 2^n shards by a key's top bits, without a call per key."""

    __slots__ = ("holders", "peeks", "shift", "tiers")

    def __init__(
        self, peeks: Sequence[Peek], tiers: Sequence[Callable[[int], PerTier | None]], shift: int, holders: Holders
    ) -> None:
        self.peeks = peeks
        self.tiers = tiers
        self.shift = shift
        self.holders = holders


def bisected(keys: Sequence[int], active: int, holders: Holders) -> list[Cut]:
    """Cuts of the dense slots `active`, all of which hold keys[0]."""
    count = len(keys)
    if count == 1:
        return [(active, 1)]
    # The last block first: a full hit is common and then costs one look-up.
    full = holders(keys[-1]) & active
    cuts: list[Cut] = [(full, count)] if full else []
    # (low, high, slots): the leading run of each of these slots has low..high blocks.
    undecided = [(1, count - 1, active ^ full)] if full != active else []
    while undecided:
        low, high, slots = undecided.pop()
        if low == high:
            cuts.append((slots, low))
            continue
        middle = (low + high) // 2
        longer = holders(keys[middle]) & slots
        if longer:
            undecided.append((middle + 1, high, longer))
        if longer != slots:
            undecided.append((low, middle, slots ^ longer))
    return cuts


def walked(keys: Sequence[int], active: int, table: Table, expected: Peek | None) -> tuple[list[Cut], int]:
    """Cuts of the slots `active` by a look at every block, and the slots whose run needed an expected block."""
    peeks, shift, cuts, reliant = table.peeks, table.shift, list[Cut](), 0
    for position, key in enumerate(keys):
        held = peeks[key >> shift](key)
        if held is None:
            held = table.holders(key)
        if expected is not None and (awaited := expected(key)):
            reliant |= awaited & active & ~held
            held |= awaited
        still = held & active
        if still != active:
            if position:
                cuts.append((active ^ still, position))
            if not still:
                return cuts, reliant
            active = still
    cuts.append((active, len(keys)))
    return cuts, reliant


def prolonged(keys: Sequence[int], active: int, start: int, expected: Peek) -> list[Cut]:
    """How many of the blocks from `start` on are expected on the slots `active`; those with none are left out."""
    cuts: list[Cut] = []
    if not active or start == len(keys):
        return cuts
    for position in range(start, len(keys)):
        still = (expected(keys[position]) or 0) & active
        if still != active:
            if position > start:
                cuts.append((active ^ still, position - start))
            if not still:
                return cuts
            active = still
    cuts.append((active, len(keys) - start))
    return cuts


def itemised(keys: Sequence[int], cuts: list[Cut], table: Table, expected: Peek | None) -> list[Run]:
    """The blocks of `cuts` by row: a look at every block, for slots whose blocks may live anywhere.

    Neighbours mostly live in the same places, so a run is closed only where that changes.
    """
    tiers, shift = table.tiers, table.shift
    cuts = sorted(cuts, key=lambda cut: cut[1])
    active = 0
    for slots, _ in cuts:
        active |= slots
    runs: list[Run] = []
    begin, since = 0, 0
    for ending, end in cuts:
        where: PerTier | None = None
        awaited = 0
        split: tuple[int, ...] = (active,)
        for position in range(begin, end):
            key = keys[position]
            here = tiers[key >> shift](key)
            if expected is not None and (soon := expected(key) or 0):
                here = here or (table.holders(key),)
            else:
                soon = 0
            if here != where or soon != awaited:
                runs += [
                    (row, slots, position - since) for row, slots in enumerate(split) if slots and position > since
                ]
                where, awaited, since = here, soon, position
                split = _split(active, here, soon)
        runs += [(row, slots, end - since) for row, slots in enumerate(split) if slots and end > since]
        active &= ~ending
        begin = since = end
    return runs


def _split(active: int, where: PerTier | None, awaited: int) -> tuple[int, ...]:
    if where is None:
        return (active,)
    rows = [0, 0, 0, 0]
    for row, held in enumerate(where):
        rows[row] = held & active
        active &= ~held
    rows[3] = awaited & active
    rows[2] |= active & ~awaited  # removed since the cuts were made; the slowest tier is the smallest claim
    return tuple(rows)
