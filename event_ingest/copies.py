"""How many copies of each block an engine holds, where, and in which tiers that makes a block present.

An engine keeps several physical copies of one block and announces the end of each, so a copy is counted per *place*: a cache
group and a medium. Almost all engines have one place only, the first; it has a field of its own in a block (`first`), the
others share a dict (`others`).

    one full-attention group        a block is present in the tiers of its places
    several of them                 in the tiers common to all; where there are none, in the slowest of each one's fastest
    window and Mamba groups         say nothing about that: what they hold is a mask of its own (`tail_mask`)

After batches were lost no count can be believed (`distrust`). A block that is held from before is a *suspect*: it counts in
the tier with the smallest claim, whatever its places, until a store, a removal or a report of the engine decides. In the
blocks that is a number: `epoch` is that of the last loss before they were certain.

Tiers are bits of a mask. This file counts; who is told of it, the ledger decides.
"""

from event_ingest.chain import Block
from event_ingest.events import BlockStored
from event_ingest.operations import meet
from indexer import tier as tiers
from indexer.hybrid import Group, Rule, group_of

SUSPECT = tiers.DISK
"""Blocks that may be gone count like the tier with the smallest claim, whatever medium they were in."""

_TAIL_RULES = (Rule.SLIDING_WINDOW, Rule.MAMBA)


class Copies:
    """The cache groups and places of one engine, and the counts in its blocks.

    counted   whether the wire announces every copy of a block; otherwise the first removal ends it
    """

    def __init__(self, *, counted: bool) -> None:
        self.groups: dict[int, Group] = {}
        self.hybrid = False
        """Whether any group is not full attention; asked for every request, so it is kept."""
        self.tail_groups: tuple[int, ...] = ()
        """The groups whose blocks count at the end of a hit only."""
        self._counted = counted
        self._full = 0  # full-attention groups known
        self._places: dict[tuple[int, str], int] = {}  # (group, medium) -> number
        self._place_rows: list[tuple[int, int]] = []  # number -> (group, tier)
        self._epoch = 0

    def forget(self) -> None:
        """Another engine: nothing is known of its groups."""
        self.groups.clear()
        self.hybrid = False
        self.tail_groups = ()
        self._full = 0
        self._places.clear()
        self._place_rows.clear()

    # -------------------------------------------------------------------------------------------------- groups, places

    def learn(self, event: BlockStored) -> bool:
        """Know the event's group from here on; returns whether that may change where the blocks known so far are present."""
        self.groups[event.group] = group_of(event.group, event.kind, event.window)
        known = self.groups.values()
        self.hybrid = any(group.rule is not Rule.FULL for group in known)
        self.tail_groups = tuple(group.number for group in known if group.rule in _TAIL_RULES)
        before, self._full = self._full, sum(group.rule is Rule.FULL for group in known)
        return self._full != before

    def place(self, group: int, medium: str) -> int:
        """The number of a place, a new one where it is."""
        place = self._places.get((group, medium))
        if place is None:
            place = self._places[group, medium] = len(self._place_rows)
            self._place_rows.append((group, tiers.tier_of(medium)))
        return place

    def known_place(self, group: int, medium: str) -> int | None:
        """The number of a place that something was stored in, None for others."""
        return self._places.get((group, medium))

    # ---------------------------------------------------------------------------------------------------------- counts

    def add(self, block: Block, place: int) -> bool:
        """One more copy; returns whether there was one before (in any place)."""
        again = block.present
        if block.epoch != self._epoch:  # whatever was counted before is uncertain; this copy is not
            block.epoch, block.first, block.others = self._epoch, 0, None
            again = False
        if place == 0:
            block.first += 1
        else:
            others = block.others = block.others or {}
            others[place] = others.get(place, 0) + 1
        return again

    def remove(self, block: Block, place: int) -> bool:
        """One copy less, or none any more where counts mean nothing; returns False where there was none."""
        held = block.first if place == 0 else (block.others or {}).get(place, 0)
        if not held:
            return False
        left = held - 1 if self._counted and block.epoch == self._epoch else 0
        if place == 0:
            block.first = left
        elif block.others is not None:
            if left:
                block.others[place] = left
            else:
                del block.others[place]
                block.others = block.others or None
        return True

    # ----------------------------------------------------------------------------------------------------------- tiers

    def mask(self, block: Block) -> int:
        """The tiers in which every full-attention group holds a block; for suspects the suspects' tier."""
        if not block.present:
            return 0
        if block.others is None and self._full == 1 and not self.tail_groups:  # one group, one medium: almost always
            return 1 << SUSPECT if block.epoch != self._epoch else 1 << self._place_rows[0][1]
        per_group: dict[int, int] = {}
        for place in _places_of(block):
            group, tier = self._place_rows[place]
            if self.groups[group].rule is Rule.FULL:
                per_group[group] = per_group.get(group, 0) | 1 << tier
        if len(per_group) < self._full or not per_group:
            return 0
        if block.epoch != self._epoch:
            return 1 << SUSPECT
        return meet(list(per_group.values()))

    def tail_mask(self, block: Block, group: int) -> int:
        """The tiers in which one of `tail_groups` holds a block; for suspects the suspects' tier."""
        mask = 0
        for place in _places_of(block):
            of, tier = self._place_rows[place]
            if of == group:
                mask |= 1 << tier
        return 1 << SUSPECT if mask and block.epoch != self._epoch else mask

    # -------------------------------------------------------------------------------------------------------- suspects

    def distrust(self) -> None:
        """Batches were lost: every block held now is a suspect."""
        self._epoch += 1

    def is_suspect(self, block: Block) -> bool:
        return block.present and block.epoch != self._epoch

    def confirm(self, block: Block, from_end: int, engine_block_tokens: int) -> None:
        """A hit has reached over a suspect, the `from_end`-th block before its end (1 is the last): what it needed is there.

        One copy in every place that the hit needed: counting fewer than there are may drop a block early, never keep it.
        """
        block.epoch = self._epoch
        needed = [place for place in _places_of(block) if self._needs(place, from_end, engine_block_tokens)]
        block.first = int(0 in needed)
        block.others = {place: 1 for place in needed if place} or None

    def disprove(self, block: Block) -> None:
        """The engine has shown that it does not hold a suspect."""
        block.first, block.others = 0, None

    def _needs(self, place: int, from_end: int, engine_block_tokens: int) -> bool:
        """Whether a hit needs the copy in a place: other groups than full attention have to hold its last blocks only."""
        group = self.groups[self._place_rows[place][0]]
        return group.rule is Rule.FULL or from_end <= group.tail_blocks(engine_block_tokens)


def _places_of(block: Block) -> list[int]:
    places = list(block.others or ())
    if block.first:
        places.append(0)
    return places
