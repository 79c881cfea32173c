"""Which router keys are held in which tiers, and what the index has to be told of it.

A block claims the keys that lie in it alone in the tiers in which it is present, a span the key over several blocks where
all of them are. So several may claim a key: copies of one content under different engine hashes, or blocks that begin alike. A
key is held in a tier while anything claims it there; only the first claim and the end of the last one change the index.

A held key whose parent is not held is a *hole*: no prefix reaches it. While there are none the index may search by halves
(`Dense`), so they are counted, and the index is told before the first one and after the last.
"""

from collections.abc import Iterable

from event_ingest.chain import Block, Key
from event_ingest.operations import Changes, Clear, Dense, Operation, bits, meet
from indexer.hybrid import group_key

_BITS = 32  # per tier in a number of claims
_COUNT = (1 << _BITS) - 1


class Claims:
    """The claims of one stream. Masks are bits of tiers: what a block, or all blocks under a key, are present in."""

    def __init__(self) -> None:
        self.held = 0
        """Keys held in any tier; those of groups without a chain of their own are not counted."""
        self.holes = 0
        """Held keys whose parent is not held."""
        self._group_keys: dict[int, int] = {}  # keys of groups that have no chain of their own -> claims
        self._changes = Changes()
        self._dense = True
        self._holed = False  # whether there was a hole since the last `take`

    def present(self, block: Block, mask: int) -> None:
        """A block is present in other tiers than before: so are the keys in it, and perhaps those over it."""
        old, block.mask = block.mask, mask
        for key in block.keys:
            self.change(key, old, mask)
        for span in block.spans or ():
            joint = meet([part.mask for part in span.parts])
            if joint != span.mask:
                self.change(span.key, span.mask, joint)
                span.mask = joint

    def present_in_group(self, block: Block, group: int, mask: int) -> None:
        """The same for a group whose blocks count at the end of a hit only."""
        masks = block.tails or {}
        old = masks.get(group, 0)
        if mask == old:
            return
        masks[group] = mask
        block.tails = masks
        for key in block.keys:
            self.change_group_key(group_key(key.key, group), old, mask)
        for span in block.spans or ():
            joint = meet([(part.tails or {}).get(group, 0) for part in span.parts])
            before = (span.tails or {}).get(group, 0)
            if joint != before:
                self.change_group_key(group_key(span.key.key, group), before, joint)
                span.tails = {**(span.tails or {}), group: joint}

    def change(self, key: Key, old: int, new: int) -> None:
        """Somebody who claimed a key in the tiers `old` claims it in `new` from here on."""
        was_held = key.claims != 0
        if not old and not was_held and new & (new - 1) == 0:  # the first claim, in one tier: almost always
            tier = new.bit_length() - 1
            key.claims = 1 << tier * _BITS
            self._changes.note(key.key, tier, held=True)
            self._count_held(key, 1)
            return
        key.claims = self._changed(key.key, key.claims, old, new)
        if (key.claims != 0) != was_held:
            self._count_held(key, -1 if was_held else 1)

    def change_group_key(self, key: int, old: int, new: int) -> None:
        """The same for a key that has no parent: `indexer.hybrid.group_key`."""
        claims = self._changed(key, self._group_keys.get(key, 0), old, new)
        if claims:
            self._group_keys[key] = claims
        else:
            self._group_keys.pop(key, None)

    def take(self) -> list[Operation]:
        """What the index has to be told since the last time, in order."""
        operations = self._changes.take()
        holed, self._holed = self._holed or self.holes > 0, False
        if holed and self._dense:
            operations.insert(0, Dense(False))
            self._dense = False
        if not self._dense and not self.holes:
            operations.append(Dense(True))
            self._dense = True
        return operations

    def clear(self, keys: Iterable[Key]) -> list[Operation]:
        """Nothing is held any more; `keys` are all there are."""
        held = (*(key.key for key in keys if key.claims), *self._group_keys)
        self._group_keys.clear()
        self._changes = Changes()
        self.held = 0
        self.holes, self._holed = 0, False
        was_dense, self._dense = self._dense, True
        return [Clear(held)] if was_dense else [Clear(held), Dense(True)]

    def _changed(self, key: int, claims: int, old: int, new: int) -> int:
        for tier in bits(old & ~new):
            claims -= 1 << tier * _BITS
            if not claims >> tier * _BITS & _COUNT:
                self._changes.note(key, tier, held=False)
        for tier in bits(new & ~old):
            if not claims >> tier * _BITS & _COUNT:
                self._changes.note(key, tier, held=True)
            claims += 1 << tier * _BITS
        return claims

    def _count_held(self, key: Key, step: int) -> None:
        self.held += step
        parent = key.parent
        if parent is not None:
            parent.held_children += step
            if not parent.claims:
                self.holes += step
        self.holes -= step * key.held_children
        self._holed = self._holed or self.holes > 0
