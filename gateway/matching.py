"""From token ids to how much every endpoint holds: block keys, the index, and what the streams' trust makes of it.

Keys are computed once per block size that the fleet's streams use, continuing the chains of earlier turns; the index
answers leading blocks per slot; a stream that is not exact counts at a discount (`indexer.trust`). Engines with several kinds
of attention are cut to what all their cache groups can use (`gateway.hybrid_matching`). Blocks that were just sent somewhere
count in full where predictions are on (`indexer.predicted`): they are our own knowledge, no stream has to vouch for them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from event_ingest.dynamo_stream import request_keys
from fleet.fleet import Fleet, Slots, Vector
from fleet.request import Match
from gateway.hybrid_matching import Layout, cut_to_usable, tail_keys
from gateway.served_models import Served
from indexer.block_key import block_keys, media_extras, root_key
from indexer.index import Index
from indexer.matched import DEFAULT_WEIGHTS
from indexer.predicted import Predicted
from indexer.trust import Trust
from tokenization.encoders import Ids
from tokenization.segments import KeyChainCache
from tokenization.tokenized import Tokenized

FALLBACK_BLOCK_TOKENS = 16
"""vLLM's block size, until an engine has told its own."""


class Streams(Protocol):
    """What matching needs to know of the event streams."""

    def block_tokens(self, slot: int) -> int:
        """Tokens per block key of this slot's entries; 0 while nothing has been learned."""
        ...

    def trust(self, slot: int) -> Trust:
        """What can be claimed about this slot's entries."""
        ...


class Chain(msgspec.Struct, frozen=True):
    """One chain of keys of a prompt."""

    keys: Sequence[int]
    block_tokens: int
    slots: Slots
    """Whose entries are under these keys."""


NO_CHAIN = Chain((), FALLBACK_BLOCK_TOKENS, np.empty(0, np.intp))


class Keys(msgspec.Struct, frozen=True):
    """One prompt's block keys at every block size in use."""

    by_block: dict[int, Sequence[int]]
    """Tokens per block -> keys of the full blocks."""
    block_of: dict[int, int]
    """Slot -> its block size."""
    prompt_tokens: int
    own: Mapping[int, Sequence[int]] = {}
    """Slot -> keys, where its entries are under other keys than the router's (Dynamo's hashes)."""

    def for_slot(self, slot: int) -> Sequence[int]:
        return self.own[slot] if slot in self.own else self.by_block[self.block_of[slot]]

    def chains(self) -> list[Chain]:
        """Every chain of keys that is in use."""
        ordinary: Mapping[int, int] = self.block_of
        if self.own:
            ordinary = {slot: block for slot, block in ordinary.items() if slot not in self.own}
        slots = np.fromiter(ordinary.keys(), np.intp, len(ordinary))
        sizes = np.fromiter(ordinary.values(), np.intp, len(ordinary))
        found = [
            Chain(self.by_block[block], block, slots[sizes == block]) for block in dict.fromkeys(ordinary.values())
        ]
        other: dict[int, list[int]] = {}
        for slot in self.block_of if self.own else ():
            if slot in self.own:
                other.setdefault(id(self.own[slot]), []).append(slot)
        for alike in other.values():
            found.append(Chain(self.own[alike[0]], self.block_of[alike[0]], np.array(alike, np.intp)))
        return found


class Found(msgspec.Struct, frozen=True):
    """A match, and what it would be if every stream were exact."""

    match: Match
    raw_tokens: Vector
    """Leading tokens in the index per slot, undiscounted and not capped; predicted blocks are not in it."""
    engine_of: Mapping[int, int] = {}
    """Slot with a match -> its engine's block size, where that is not the size of its keys."""

    def predicted(self, slot: int, keys: Keys) -> int:
        """Cached tokens the engine on `slot` should report: whole blocks, and at least one token is always computed."""
        block = keys.block_of.get(slot, FALLBACK_BLOCK_TOKENS)
        engine = self.engine_of.get(slot, block)
        most = max(0, keys.prompt_tokens - 1) // engine * engine
        return int(min(self.raw_tokens[slot] // engine * engine, most))


def extend_keys(parent: int, ids: Ids, block_tokens: int, extras: Mapping[int, bytes]) -> Sequence[int]:
    """What `KeyChainCache` calls for blocks that no known prefix covers."""
    return block_keys(parent, ids, block_tokens, extras)


class Matcher:
    """Keys and matches over one index. `keys` may be called from any thread, the rest on the event loop's."""

    def __init__(
        self,
        fleet: Fleet,
        index: Index,
        streams: Streams,
        weights: Sequence[float] = DEFAULT_WEIGHTS,
        chains: KeyChainCache | None = None,
        *,
        layout_of: Callable[[int], Layout] | None = None,
        engine_block_of: Callable[[int], int] | None = None,
        dynamo: Mapping[int, int] | None = None,
        predicted: Predicted | None = None,
    ) -> None:
        """`layout_of`: the cache groups of a slot's engine, empty where it has full attention only. `engine_block_of`: the
        block size of a slot's engine, 0 where it is not known; left out where keys have that size anyway. `dynamo`: slots whose
        entries are under Dynamo's hashes, with their block size; looked at anew for every prompt."""
        self._fleet = fleet
        self._index = index
        self._streams = streams
        self._weights = tuple(weights)
        self._layout_of = layout_of
        self._layouts: set[Layout] = set()
        self._engine_block_of = engine_block_of
        self._dynamo = dynamo if dynamo is not None else {}
        self.predicted = predicted
        self.chains = chains or KeyChainCache(extend_keys)

    def keys(self, prompt: Tokenized, served: Served, also: Collection[int] = ()) -> Keys:
        """The prompt's block keys at every block size of the fleet, and at those of `also`."""
        block_of = {slot: self.block_tokens(slot) for slot in self._fleet.slots().tolist()}
        root = root_key(served.base, lora=served.lora, salt=prompt.salt)
        own = self._dynamo_keys(prompt, served, block_of) if self._dynamo else {}
        by_block: dict[int, Sequence[int]] = {}
        sizes = {size for slot, size in block_of.items() if slot not in own} if own else set(block_of.values())
        for block in {*sizes, *also}:
            extras = media_extras(((item.identifier, item.offset) for item in prompt.extras), block)
            by_block[block] = self.chains.keys(prompt.token_ids, prompt.boundaries, root, block, extras)
        return Keys(by_block, block_of, len(prompt.token_ids), own)

    def match(self, keys: Keys) -> Found:
        """Leading cached tokens per slot."""
        chains = keys.chains()
        raw, weighted = self._leading(keys, chains, None)
        trust = self._trust(raw)
        tokens, worth = raw * trust, weighted * trust
        if self.predicted:
            soon, soon_worth = self._leading(keys, chains, self.predicted)
            tokens += np.maximum(soon - raw, 0.0)
            worth += np.maximum(soon_worth - weighted, 0.0)
        finest = min(chains, key=lambda chain: chain.block_tokens, default=NO_CHAIN)
        match = Match(
            tokens=tokens,
            weighted_tokens=worth,
            total_tokens=max((len(chain.keys) * chain.block_tokens for chain in chains), default=0),
            block_tokens=finest.block_tokens,
            keys=finest.keys,
            announced_tokens=np.where(trust == 1.0, raw, 0.0),
        )
        return Found(match, raw, self._engine_blocks(keys, raw))

    def expect(self, slot: int, keys: Keys, now: float) -> int | None:
        """A request goes to `slot`: predict what it lacks there. A ticket for `Predicted.release`, None if all is held."""
        if self.predicted is None or slot not in keys.block_of:
            return None
        chain = keys.for_slot(slot)
        held = self._index.match(chain).by_slot().get(slot, 0)
        return self.predicted.predict(slot, chain[held:], now) if held < len(chain) else None

    def answered(self, tickets: Sequence[int | None], served: bool) -> None:
        """The request of these tickets is over. What was served is left to the engine's events, or to its time."""
        if self.predicted is not None and not served:
            for ticket in tickets:
                if ticket is not None:
                    self.predicted.release(ticket)

    def touch(self, keys: Sequence[int]) -> None:
        """Make a chosen prompt's blocks the most recently used; the event stream says nothing about hits."""
        for layout in self._layouts:
            self._index.touch(tail_keys(keys, layout))
        self._index.touch(keys)

    def block_tokens(self, slot: int) -> int:
        """Tokens per block key of prompts on this slot."""
        return self._streams.block_tokens(slot) or int(self._fleet.block_tokens[slot]) or FALLBACK_BLOCK_TOKENS

    def _leading(self, keys: Keys, chains: Sequence[Chain], predicted: Predicted | None) -> tuple[Vector, Vector]:
        """Leading tokens per slot, plain and weighted by tier."""
        capacity = self._fleet.capacity
        raw, weighted = np.zeros(capacity), np.zeros(capacity)
        for chain in chains:
            matched = self._index.match(chain.keys, predicted)
            if not matched.runs:
                continue
            here = chain.slots[chain.slots < capacity]
            raw[here] = matched.tokens(capacity, chain.block_tokens)[here]
            weighted[here] = matched.weighted_tokens(capacity, chain.block_tokens, self._weights)[here]
        for slot, engine in self._engine_blocks(keys, raw).items():
            if left := raw[slot] % engine:  # keys end inside an engine block, which is reused as a whole or not at all
                weighted[slot] *= 1 - left / raw[slot]
                raw[slot] -= left
        for block, layouts in self._hybrids(keys, raw).items():
            self._layouts.update(layouts.values())
            plain, prompt = keys.by_block[block], keys.prompt_tokens
            cut_to_usable(self._index, plain, block, prompt, layouts, self._weights, raw, weighted, predicted)
        return raw, weighted

    def _engine_blocks(self, keys: Keys, raw: Vector) -> dict[int, int]:
        """The engine's block size of slots with a match, where it is not the size of their keys."""
        if (engine_block_of := self._engine_block_of) is None:
            return {}
        engines = {slot: engine_block_of(slot) for slot in np.flatnonzero(raw).tolist()}
        return {slot: engine for slot, engine in engines.items() if engine and engine != keys.block_of[slot]}

    def _hybrids(self, keys: Keys, raw: Vector) -> dict[int, dict[int, Layout]]:
        """The slots with a match whose engines have more than full attention, by block size."""
        found: dict[int, dict[int, Layout]] = {}
        if (layout_of := self._layout_of) is not None:
            for slot in np.flatnonzero(raw).tolist():
                if layout := layout_of(slot):
                    found.setdefault(keys.block_of[slot], {})[slot] = layout
        return found

    def _dynamo_keys(self, prompt: Tokenized, served: Served, block_of: Mapping[int, int]) -> dict[int, Sequence[int]]:
        """The prompt's keys by Dynamo's hashes; none where these cannot say what the prompt is (a salt, media)."""
        slots = [slot for slot in dict(self._dynamo) if slot in block_of]
        if prompt.salt is not None or prompt.extras:
            nothing: Sequence[int] = ()
            return dict.fromkeys(slots, nothing)
        made: dict[int, Sequence[int]] = {
            block: request_keys(served.base, prompt.token_ids, block, lora=served.lora)
            for block in {block_of[slot] for slot in slots}
        }
        return {slot: made[block_of[slot]] for slot in slots}

    def _trust(self, raw: Vector) -> Vector:
        trust = np.ones(len(raw))
        held, trust_of = raw.nonzero()[0], self._streams.trust
        trust[held] = [trust_of(slot).weight for slot in held.tolist()]
        return trust
