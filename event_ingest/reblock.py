"""The ledger of one stream: which blocks the engine holds, how many copies, and which router keys follow from that.

A copy is counted per (group, medium, engine hash), because engines keep several physical copies of a block and announce
the end of each. A block is *present* in a tier while a copy is; a router key is held in a tier while every engine block
under it is present there. Where the parts are in different tiers the key counts in the slowest of them.

    event --> chain     which block it is, what stands before it, the router keys in and over it
          --> copies    how many of it there are, in which groups and media; so in which tiers it is present
          --> claims    which keys are held because of that, and what the index has to be told
              suspects  what is held on the word of events from before a loss only

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

from event_ingest.chain import Block, Chain, Key, split
from event_ingest.claims import Claims
from event_ingest.copies import Copies
from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, Reason, Skipped
from event_ingest.operations import Operation
from event_ingest.suspects import Suspects
from indexer.block_key import TOKEN_BYTES
from indexer.hybrid import Group, Rule


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
        self.skipped: list[Skipped] = []
        self._model = model
        self._configured = block_tokens
        self._block_tokens = block_tokens
        self._max_waiting = max_waiting
        self._max_absent = max_absent
        self._sequence_key = sequence_key
        self._chain: Chain | None = None  # None until the size of its blocks is known
        self._copies = Copies(counted=counted)
        self._claims = Claims()
        self._suspects = Suspects(self._copies.is_suspect)

    # ---------------------------------------------------------------------------------------------------- questions

    @property
    def block_tokens(self) -> int | None:
        """The size of router blocks, None until it is learned."""
        return self._block_tokens

    @property
    def groups(self) -> dict[int, Group]:
        """The engine's cache groups by number, as far as announced."""
        return self._copies.groups

    @property
    def hybrid(self) -> bool:
        """Whether any group is not full attention."""
        return self._copies.hybrid

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
        return len(self._suspects.owners)

    # ------------------------------------------------------------------------------------------------------- events

    def learn(self, events: Sequence[Event]) -> None:
        """Look at a batch before its events are applied: which cache groups there are decides about the block size."""
        for event in events:
            if isinstance(event, BlockStored):
                self._learn(event)

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
            self._copies.forget()
            self._block_tokens = self._configured
        return told

    def distrust(self) -> list[Operation]:
        """Batches were lost: make a suspect of every block that is held now (rule 5)."""
        if self._chain is None:
            return []
        self._copies.distrust()
        self._suspects.clear()
        for block in self._chain:
            if block.present:
                self._refresh(block)
                self._suspects.enter(block)
        return self._claims.take()

    def confirm(self, keys: Sequence[int], cached_tokens: int) -> list[Operation]:
        """What the engine reported for a request with these keys (all of its prompt's, in order) judges its suspects.

        Keys within `cached_tokens` were right: their blocks count in full again. Keys beyond were wrong, where the engine
        could have used them: pass only keys it could (`(prompt tokens - 1) // engine block` whole blocks).
        """
        if not self._suspects.owners or self._chain is None:
            return []
        for block, from_end in self._suspects.judge(keys, self._chain.block_tokens, cached_tokens):
            if not self._copies.is_suspect(block):
                continue
            if from_end > 0:
                self._copies.confirm(block, from_end, self.engine_block_tokens or 1)
                self.counters.confirmed += 1
            else:
                self._copies.disprove(block)
                self.counters.disproved += 1
            self._refresh_presence(block)
        return self._claims.take()

    # ------------------------------------------------------------------------------------------------------ storing

    def _stored(self, event: BlockStored) -> None:
        group = self._learn(event)
        if not self._is_modelled(event, group):
            return
        masked = group.rule is not Rule.FULL
        tokens = len(event.tokens) // TOKEN_BYTES
        fits = bool(event.contents) or tokens == len(event.hashes) * event.block_tokens
        if self._chain is None and event.block_tokens and (tokens or event.contents) and (fits or masked):
            self._begin(event.block_tokens)  # never at the size of an event that contradicts itself
        chain = self._chain
        if chain is None:
            if event.hashes:  # nothing can be placed before a block with tokens has told the size
                self._skip_misfit(event, ", before any that fit")
            return
        place = self._copies.place(event.group, event.medium)
        if event.contents:
            self._store_run(chain, event, place, event.contents)
        elif tokens and event.block_tokens and fits:
            self._store_run(chain, event, place, split(event.tokens, len(event.hashes), event.block_tokens))
        elif not tokens or masked:  # locations only; which blocks they are, the event with their tokens says
            for hash_ in event.hashes:
                self._hold(chain, chain.find_or_expect(hash_), place)
        else:
            self._skip_misfit(event)
        for _ in chain.trim():
            self._skip(Reason.ORPHANS_FULL, f"more than {self._max_waiting} blocks wait for their parent", "stores")

    def _learn(self, event: BlockStored) -> Group:
        """The event's group; a new one may change where all blocks are present."""
        group = self._copies.groups.get(event.group)
        if group is None or group.rule is Rule.UNKNOWN:
            if self._copies.learn(event):
                for block in self._chain or ():
                    self._refresh(block)
            group = self._copies.groups[event.group]
        return group

    def _is_modelled(self, event: BlockStored, group: Group) -> bool:
        """Whether there is a rule for what the event stores; says so where there is none."""
        if group.rule is Rule.UNKNOWN:
            detail = f"group {event.group} is {event.kind or 'of no kind'}, window {event.window}"
            self._skip(Reason.UNSUPPORTED_CACHE_KIND, detail, "nothing")
            return False
        if event.contents and self._sequence_key is None:
            self._skip(Reason.TOKENS_DO_NOT_FIT, "content hashes on a stream that has token ids", "stores")
            return False
        return True

    def _begin(self, engine_block_tokens: int) -> None:
        self.engine_block_tokens = engine_block_tokens
        if self._block_tokens is None or self._copies.tail_groups:
            self._block_tokens = engine_block_tokens
        self._chain = Chain(
            model=self._model,
            block_tokens=self._block_tokens,
            on_placed=self._placed,
            sequence_key=self._sequence_key,
            max_waiting=self._max_waiting,
            max_absent=self._max_absent,
        )

    def _store_run(self, chain: Chain, event: BlockStored, place: int, contents: Sequence[bytes | int]) -> None:
        """Consecutive blocks with their contents: each follows the one before."""
        parent = None if event.parent is None else chain.find_or_expect(event.parent)
        for number, hash_ in enumerate(event.hashes):
            extra = event.extras[number] if event.extras else None
            root = chain.root(event.lora, extra.salt if extra is not None else None) if parent is None else None
            block = chain.find_or_expect(hash_)
            content = contents[number]
            if not block.placed:
                chain.describe(block, parent, root, content, event.block_tokens, extra)
            elif not chain.agrees(block, parent, root, content, event.block_tokens, extra):
                self._skip_conflict(event, block)
                return
            self._hold(chain, block, place)
            parent = block

    def _hold(self, chain: Chain, block: Block, place: int) -> None:
        if self._copies.add(block, place):
            self.counters.second_copies += 1
        if not block.present:
            block.present = True
            chain.arrive(block)
        self._refresh(block)

    def _placed(self, block: Block) -> None:
        if block.present:
            self._refresh(block)

    # ----------------------------------------------------------------------------------------------------- removing

    def _removed(self, event: BlockRemoved) -> None:
        place = self._copies.known_place(event.group, event.medium)
        for hash_ in event.hashes:
            block = self._chain.find(hash_) if self._chain is not None else None
            if block is None or not block.present or place is None or not self._copies.remove(block, place):
                self.counters.unknown_removals += 1
            else:
                self._refresh_presence(block)

    def _refresh_presence(self, block: Block) -> None:
        """There are fewer copies of a block that was present, or none."""
        block.present = bool(block.first or block.others)
        self._refresh(block)
        if not block.present and self._chain is not None:
            self._chain.leave(block)

    def _refresh(self, block: Block) -> None:
        """Bring the claims on the keys in and over a block in line with its copies."""
        copies, claims = self._copies, self._claims
        mask = copies.mask(block) if block.placed else 0
        if self._suspects.owners:
            self._suspects.review(block)
        for group in copies.tail_groups:
            claims.present_in_group(block, group, copies.tail_mask(block, group) if block.placed else 0)
        if mask != block.mask:
            claims.present(block, mask)

    # ----------------------------------------------------------------------------------------------------- skipping

    def _skip_misfit(self, event: BlockStored, when: str = "") -> None:
        tokens = len(event.tokens) // TOKEN_BYTES
        detail = f"{len(event.hashes)} hashes of {event.block_tokens} tokens for {tokens} tokens{when}"
        self._skip(Reason.TOKENS_DO_NOT_FIT, detail, "stores")

    def _skip_conflict(self, event: BlockStored, block: Block) -> None:
        if block.size != event.block_tokens:
            detail = f"hash {block.hash} with {block.size} and with {event.block_tokens} tokens"
            self._skip(Reason.BLOCK_SIZE_CONFLICT, detail, "stores")
        else:
            self._skip(Reason.CONTENT_CONFLICT, f"hash {block.hash} names two different blocks", "removals")

    def _skip(self, reason: Reason, detail: str, loses: str) -> None:
        self.skipped.append(Skipped(reason, detail, loses=loses))

    def _keys(self) -> dict[int, Key]:
        return self._chain.keys if self._chain is not None else {}
