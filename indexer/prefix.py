"""How many leading blocks of a chain each slot holds: bisected where that is sound, walked where it is not.

    dense slot   it holds no block whose parent it lacks, so "holds block i" implies "holds all before": bisect
    any other    a run may end and blocks be held again further on: one AND per block until nobody is left

Both take bitsets of slots and serve all slots at once. For dense slots, d distinct lengths in a chain of n blocks cost
about d * log2(n / d) look-ups in place of n.

A bisection that races with a writer still lies between the answers before and after: a probe that finds a block saw
a state with at least that prefix, and one that does not saw a state without it.
"""

from collections.abc import Callable, Sequence

Lookup = Callable[[int], int]
Cut = tuple[int, int]  # bitset of slots, the leading blocks all of them hold


def bisected(keys: Sequence[int], active: int, holders: Lookup) -> list[Cut]:
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


def walked(keys: Sequence[int], active: int, holders: Lookup, start: int = 0) -> list[Cut]:
    """Cuts of the slots `active`, all of which hold the first `start` blocks: one look-up per block."""
    cuts: list[Cut] = []
    for position in range(start, len(keys)):
        still = holders(keys[position]) & active
        if still != active:
            if position:
                cuts.append((active ^ still, position))
            if not still:
                return cuts
            active = still
    if active and keys:
        cuts.append((active, len(keys)))
    return cuts
