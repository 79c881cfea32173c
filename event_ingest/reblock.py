"""The ledger of one stream: which blocks the engine holds, how many copies, and which router keys follow from that.

A copy is counted per (group, medium, engine hash), because engines keep several physical copies of a block and announce
the end of each. A block is *present* in a tier while a copy is; a router key is held in a tier while every engine block
under it is present there. Where the parts are in different tiers the key counts in the slowest of them.

Rules
1. Events are applied in order; what comes out is a list of operations on the index, in order.
2. Engine hashes only find blocks. Keys are computed from tokens, adapter, salt and media items (see `chain`).
3. The router's block size is the engine's, learned from the first stored block, unless one is given.
4. Groups. Full-attention kinds (and engines that do not say) decide about prefixes and have the plain keys; where a model has
   several such groups a block counts when all of them hold it. Other groups (sliding window, Mamba) announce only the blocks
   they keep: their hashes are placed by the full-attention event that names the same hashes, before or after, and entered
   under `group_key` for the hit rule of `indexer.hybrid`. That rule counts in engine blocks, so engines with such groups
   are always indexed at their own block size, whatever is configured.
5. After batches were lost (`distrust`) no count can be believed. Every block held then becomes a *suspect*: it moves to the
   tier with the smallest claim. A store makes it certain again (one copy), a removal ends it, and the engine's own
   `cached_tokens` confirm or drop it (`confirm`). Counting one copy may drop a block early, never keep it too long.
"""

from collections.abc import Callable, Sequence

import msgspec

from event_ingest.chain import Block, Chain, Key, Span, split
from event_ingest.claims import Claims
from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Extra, Reason, Skipped
from event_ingest.operations import Operation
from indexer import tier as tiers
from indexer.block_key import TOKEN_BYTES
from indexer.hybrid import Group, Rule, group_key, group_of

SUSPECT = tiers.DISK
"""Blocks that may be gone count like the tier with the smallest claim, whatever medium they were in."""

_TAIL_RULES = (Rule.SLIDING_WINDOW, Rule.MAMBA)


class LedgerCounters(msgspec.Struct):
    """Metric labels and their values since the stream began."""

    unknown_removals: int = 0
    """Removals of blocks that were never announced (to us): normal after a late start."""
    second_copies: int = 0
    confirmed: int = 0
    disproved: int = 0


class Reblocker:
    """See the head of this file. `skipped` grows with what could not be used; the caller takes it away."""

    def __init__(
        self,
        *,
        model: str,
        block_tokens: int | None = None,
        max_waiting: int = 16_384,
        max_absent: int = 8_192,
        counted: bool = True,
        sequence_key: Callable[[int | None, int], int] | None = None,
    ) -> None:
        self.counters = LedgerCounters()
        self.engine_block_tokens: int | None = None
        self.groups: dict[int, Group] = {}
        self.hybrid = False
        """Whether any group is not full attention; asked for every request, so it is kept."""
        self.skipped: list[Skipped] = []
        self._model = model
        self._configured = block_tokens
        self._block_tokens = block_tokens
        self._max_waiting = max_waiting
        self._max_absent = max_absent
        self._counted = counted
        self._sequence_key = sequence_key
        self._chain: Chain | None = None
        self._claims = Claims()
        self._places: dict[tuple[int, str], int] = {}  # (group, medium) -> number
        self._place_rows: list[tuple[int, int]] = []  # number -> (group, tier)
        self._full = 0  # full-attention groups known
        self._tails: tuple[int, ...] = ()  # groups of other kinds
        self._epoch = 0
        self._suspects: dict[int, list[Block | Span]] = {}  # key -> what claims it

    # ---------------------------------------------------------------------------------------------------- questions

    @property
    def block_tokens(self) -> int | None:
        """The size of router blocks, None until it is learned."""
        return self._block_tokens

    @property
    def held_keys(self) -> int:
        """Router keys held in any tier."""
        return self._claims.held

    @property
    def blocks(self) -> int:
        """Engine blocks remembered: present, waiting, or kept for late children."""
        return len(self._chain) if self._chain is not None else 0

    @property
    def waiting(self) -> int:
        """Blocks that wait for their parent or their tokens."""
        return self._chain.waiting if self._chain is not None else 0

    @property
    def resolved(self) -> int:
        """Blocks that waited and then found their place."""
        return self._chain.resolved if self._chain is not None else 0

    @property
    def dropped(self) -> int:
        """Blocks that waited and were given up."""
        return self._chain.dropped if self._chain is not None else 0

    @property
    def holes(self) -> int:
        """Held keys whose parent is not held: no prefix reaches them."""
        return self._claims.holes

    @property
    def suspects(self) -> int:
        """Keys that are held only on the word of events from before a loss."""
        return len(self._suspects)

    # ------------------------------------------------------------------------------------------------------- events

    def learn(self, events: Sequence[Event]) -> None:
        """Look at a batch before its events are applied: which cache groups there are decides about the block size."""
        for event in events:
            if isinstance(event, BlockStored):
                self._group(event)

    def apply(self, event: Event) -> list[Operation]:
        """Apply one event; the operations are for the index, in order."""
        match event:
            case BlockStored():
                self._stored(event)
            case BlockRemoved():
                self._removed(event)
            case AllBlocksCleared():
                return self.clear()
        return self._claims.take()

    def clear(self, *, forget_groups: bool = False) -> list[Operation]:
        """Nothing is held any more: the engine said so, or it is another engine (`forget_groups`)."""
        told = self._claims.clear(self._keys().values())
        self._chain = None
        self._suspects.clear()
        if forget_groups:
            self.groups.clear()
            self.hybrid = False
            self._places.clear()
            self._place_rows.clear()
            self._full = 0
            self._tails = ()
            self._block_tokens = self._configured
        return told

    def distrust(self) -> list[Operation]:
        """Batches were lost: make a suspect of every block that is held now (rule 5)."""
        if self._chain is None:
            return []
        self._epoch += 1
        self._suspects.clear()
        for block in self._chain:
            if block.present:
                self._refresh(block)
                for key in block.keys:
                    self._suspects.setdefault(key.key, []).append(block)
                for span in block.spans or ():
                    if span.mask and span.parts[-1] is block:
                        self._suspects.setdefault(span.key.key, []).append(span)
        return self._claims.take()

    def confirm(self, keys: Sequence[int], cached_tokens: int) -> list[Operation]:
        """What the engine reported for a request with these keys (all of its prompt's, in order) judges its suspects.

        Keys within `cached_tokens` were right: their blocks count in full again. Keys beyond were wrong, where the engine
        could have used them: pass only keys it could (`(prompt tokens - 1) // engine block` whole blocks).
        """
        if not self._suspects or self._chain is None:
            return []
        size = self._chain.block_tokens
        for number, key in enumerate(keys):
            for owner in self._suspects.get(key, ()):
                if (number + 1) * size <= cached_tokens:
                    for block in self._proven(owner, key):
                        self._certain(block, cached_tokens // size - number)
                else:
                    self._disprove(owner if isinstance(owner, Block) else owner.parts[-1])
            if (number + 1) * size > cached_tokens:
                self._suspects.pop(key, None)
            else:
                self._prune(key)
        return self._claims.take()

    # ------------------------------------------------------------------------------------------------------ storing

    def _stored(self, event: BlockStored) -> None:
        group = self._group(event)
        if group.rule is Rule.UNKNOWN:
            detail = f"group {event.group} is {event.kind or 'of no kind'}, window {event.window}"
            self._skip(Reason.UNSUPPORTED_CACHE_KIND, detail, "nothing")
            return
        count = len(event.tokens) // TOKEN_BYTES
        if event.contents and self._sequence_key is None:
            self._skip(Reason.TOKENS_DO_NOT_FIT, "content hashes on a stream that has token ids", "stores")
            return
        fits = bool(event.contents) or count == len(event.hashes) * event.block_tokens
        if (
            event.block_tokens
            and (count or event.contents)
            and self._chain is None
            and (fits or group.rule is not Rule.FULL)
        ):
            self._begin(event.block_tokens)  # never at the size of an event that contradicts itself
        chain = self._chain
        if chain is None:
            if not event.hashes:
                return
            # Nothing can be placed before a block with tokens has told the size.
            detail = (
                f"{len(event.hashes)} hashes of {event.block_tokens} tokens for {count} tokens, before any that fit"
            )
            self._skip(Reason.TOKENS_DO_NOT_FIT, detail, "stores")
            return
        place = self._place(event.group, event.medium)
        if event.contents:
            self._store_run(event, place, event.contents)
        elif not count:
            for hash_ in event.hashes:
                self._hold(chain.find_or_expect(hash_), place)
        elif event.block_tokens and fits:
            self._store_run(event, place, split(event.tokens, len(event.hashes), event.block_tokens))
        elif group.rule is not Rule.FULL:
            for hash_ in event.hashes:  # masked: which blocks they are, the full-attention group says
                self._hold(chain.find_or_expect(hash_), place)
        else:
            detail = f"{len(event.hashes)} hashes of {event.block_tokens} tokens for {count} tokens"
            self._skip(Reason.TOKENS_DO_NOT_FIT, detail, "stores")
        for _ in chain.trim():
            self._skip(Reason.ORPHANS_FULL, f"more than {self._max_waiting} blocks wait for their parent", "stores")

    def _store_run(self, event: BlockStored, place: int, contents: Sequence[bytes | int]) -> None:
        chain = self._chain
        assert chain is not None
        parent = None if event.parent is None else chain.find_or_expect(event.parent)
        for number, hash_ in enumerate(event.hashes):
            extra: Extra | None = event.extras[number] if event.extras else None
            root = chain.root(event.lora, extra.salt if extra is not None else None) if parent is None else None
            block = chain.find_or_expect(hash_)
            content = contents[number]
            if not block.placed:
                chain.describe(block, parent, root, content, event.block_tokens, extra)
            elif not chain.agrees(block, parent, root, content, event.block_tokens, extra):
                if block.size != event.block_tokens:
                    detail = f"hash {hash_} with {block.size} and with {event.block_tokens} tokens"
                    self._skip(Reason.BLOCK_SIZE_CONFLICT, detail, "stores")
                else:
                    self._skip(Reason.CONTENT_CONFLICT, f"hash {hash_} names two different blocks", "removals")
                return
            self._hold(block, place)
            parent = block

    def _removed(self, event: BlockRemoved) -> None:
        place = self._places.get((event.group, event.medium))
        for hash_ in event.hashes:
            block = self._chain.find(hash_) if self._chain is not None else None
            if block is None or not block.present or place is None:
                self.counters.unknown_removals += 1
            else:
                self._release(block, place)

    def _begin(self, engine_block_tokens: int) -> None:
        self.engine_block_tokens = engine_block_tokens
        if self._block_tokens is None or self._tails:
            self._block_tokens = engine_block_tokens
        self._chain = Chain(
            model=self._model,
            block_tokens=self._block_tokens,
            on_placed=self._placed,
            sequence_key=self._sequence_key,
            max_waiting=self._max_waiting,
            max_absent=self._max_absent,
        )

    def _group(self, event: BlockStored) -> Group:
        group = self.groups.get(event.group)
        if group is None or group.rule is Rule.UNKNOWN:
            group = self.groups[event.group] = group_of(event.group, event.kind, event.window)
            self.hybrid = any(known.rule is not Rule.FULL for known in self.groups.values())
            self._tails = tuple(known.number for known in self.groups.values() if known.rule in _TAIL_RULES)
            full = sum(known.rule is Rule.FULL for known in self.groups.values())
            if full != self._full:
                self._full = full
                for block in self._chain or ():
                    self._refresh(block)
        return group

    def _place(self, group: int, medium: str) -> int:
        place = self._places.get((group, medium))
        if place is None:
            place = self._places[group, medium] = len(self._place_rows)
            self._place_rows.append((group, tiers.tier_of(medium)))
        return place

    # ------------------------------------------------------------------------------------------------------- copies

    def _hold(self, block: Block, place: int) -> None:
        chain = self._chain
        assert chain is not None
        if block.epoch != self._epoch:  # whatever was counted before is uncertain; this copy is not
            block.epoch, block.first, block.others = self._epoch, 0, None
        elif block.present:
            self.counters.second_copies += 1
        if not block.present:
            block.present = True
            chain.arrive(block)
        self._count(block, place, +1)
        self._refresh(block)

    def _release(self, block: Block, place: int) -> None:
        held = block.first if place == 0 else (block.others or {}).get(place, 0)
        if not held:
            self.counters.unknown_removals += 1
            return
        self._count(block, place, -1 if self._counted and block.epoch == self._epoch else -held)
        self._refresh_presence(block)

    def _count(self, block: Block, place: int, step: int) -> None:
        if place == 0:
            block.first += step
            return
        others = block.others = block.others or {}
        count = others.get(place, 0) + step
        if count:
            others[place] = count
        else:
            del others[place]
            block.others = others or None

    def _placed(self, block: Block) -> None:
        if block.present:
            self._refresh(block)

    def _refresh_presence(self, block: Block) -> None:
        present = bool(block.first or block.others)
        gone = block.present and not present
        block.present = present
        self._refresh(block)
        if gone and self._chain is not None:
            self._chain.leave(block)

    # --------------------------------------------------------------------------------------------------------- keys

    def _refresh(self, block: Block) -> None:
        """Bring the claims on the keys in and over a block in line with its copies."""
        mask = self._mask(block) if block.placed else 0
        if self._suspects:
            for key in (*block.keys, *(span.key for span in block.spans or ())):
                self._prune(key.key)
        if self._tails:
            self._refresh_tails(block)
        old = block.mask
        if mask == old:
            return
        block.mask = mask
        for key in block.keys:
            self._claims.change(key, old, mask)
        for span in block.spans or ():
            joint = _joint(span.parts)
            if joint != span.mask:
                self._claims.change(span.key, span.mask, joint)
                span.mask = joint

    def _mask(self, block: Block) -> int:
        """The tiers in which every full-attention group holds a block; for suspects the suspects' tier."""
        if not block.present:
            return 0
        if block.others is None and self._full == 1 and not self._tails:  # one group, one medium: almost always
            return 1 << SUSPECT if block.epoch != self._epoch else 1 << self._place_rows[0][1]
        per_group: dict[int, int] = {}
        places = list((block.others or {}).items())
        if block.first:
            places.append((0, block.first))
        for place, _ in places:
            group, tier = self._place_rows[place]
            if self.groups[group].rule is Rule.FULL:
                per_group[group] = per_group.get(group, 0) | 1 << tier
        if len(per_group) < self._full or not per_group:
            return 0
        if block.epoch != self._epoch:
            return 1 << SUSPECT
        return _meet(list(per_group.values()))

    def _refresh_tails(self, block: Block) -> None:
        """The same for the groups whose blocks count at the end of a hit only."""
        for group in self._tails:
            mask = self._tail_mask(block, group) if block.placed else 0
            masks = block.tails or {}
            old = masks.get(group, 0)
            if mask == old:
                continue
            masks[group] = mask
            block.tails = masks
            for key in block.keys:
                self._claims.change_group_key(group_key(key.key, group), old, mask)
            for span in block.spans or ():
                joint = _meet([(part.tails or {}).get(group, 0) for part in span.parts])
                before = (span.tails or {}).get(group, 0)
                if joint != before:
                    self._claims.change_group_key(group_key(span.key.key, group), before, joint)
                    span.tails = {**(span.tails or {}), group: joint}

    def _tail_mask(self, block: Block, group: int) -> int:
        mask = 0
        for place in (*(block.others or ()), *((0,) if block.first else ())):
            of, tier = self._place_rows[place]
            if of == group:
                mask |= 1 << tier
        return 1 << SUSPECT if mask and block.epoch != self._epoch else mask

    # ----------------------------------------------------------------------------------------------------- suspects

    def _proven(self, owner: "Block | Span", key: int) -> list[Block]:
        """The blocks that a hit on a key proves: those whose content the key decides to the last token."""
        if isinstance(owner, Block):
            whole = not owner.tail and bool(owner.keys) and owner.keys[-1].key == key
            return [owner] if whole else []
        return [part for part in owner.parts if part is not owner.parts[-1] or not part.tail]

    def _certain(self, block: Block, from_end: int) -> None:
        """A hit has reached over this block, which is the `from_end`-th block before its end (1 is the last)."""
        if block.present and block.epoch != self._epoch:
            block.epoch = self._epoch
            block.first = int(block.first > 0 and self._proves(0, from_end))
            block.others = {place: 1 for place in block.others or () if self._proves(place, from_end)} or None
            self.counters.confirmed += 1
            self._refresh_presence(block)

    def _proves(self, place: int, from_end: int) -> bool:
        """Whether a hit needed the copy in that place: other groups than full attention have to hold its last blocks only."""
        group = self.groups[self._place_rows[place][0]]
        return group.rule is Rule.FULL or from_end <= group.tail_blocks(self.engine_block_tokens or 1)

    def _disprove(self, block: Block) -> None:
        if block.present and block.epoch != self._epoch:
            block.first, block.others = 0, None
            self.counters.disproved += 1
            self._refresh_presence(block)

    def _prune(self, key: int) -> None:
        owners = self._suspects.get(key)
        if owners is not None and not any(self._is_suspect(owner) for owner in owners):
            del self._suspects[key]

    def _is_suspect(self, owner: "Block | Span") -> bool:
        parts = (owner,) if isinstance(owner, Block) else owner.parts
        return all(part.present for part in parts) and any(part.epoch != self._epoch for part in parts)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _keys(self) -> dict[int, Key]:
        return self._chain.keys if self._chain is not None else {}

    def _skip(self, reason: Reason, detail: str, loses: str) -> None:
        self.skipped.append(Skipped(reason, detail, loses=loses))


def _meet(masks: Sequence[int]) -> int:
    """Where all are: the common tiers, else the slowest of each one's fastest; 0 where one is nowhere."""
    common = masks[0]
    for mask in masks:
        common &= mask
    if common or not all(masks):
        return common
    return 1 << max((mask & -mask).bit_length() - 1 for mask in masks)


def _joint(parts: Sequence[Block]) -> int:
    return _meet([part.mask for part in parts])
