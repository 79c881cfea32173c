"""An engine's blocks, linked into chains, and the router's block keys over them.

Engines cut a sequence into blocks of their size B, the router into blocks of its size R. A block that has a known parent
is *placed*: what stands before it is known, so the router keys that end inside it can be computed. What is left over behind
the last of them, the *tail*, is kept at the block and completed by whatever child comes later, so a reply that is announced
one engine block at a time ends up under the same keys as a prompt that contains it.

    engine blocks, B = 16   |--0--|--1--|--2--|--3--|--4--|     each keeps the tokens behind the last router border
    router blocks, R = 24   |----0----|----1----|----2---       key 0 ends in block 1 and has the parts (0, 1)

Rules
1. A block whose parent is not known yet is not thrown away: a placeholder stands for the parent, and the block waits at it,
   with its tokens, until the parent arrives (in one step for whole subtrees). At most `max_waiting` blocks wait; beyond
   that the longest-waiting subtree is dropped and counted.
2. Removed blocks stay linked while they have children, and for a while after: children that come late still find them.
   Beyond `max_absent` of them, those without children are forgotten, the oldest first.
3. Keys exist once per content, whoever completes them: two engine blocks that begin alike share the keys of that beginning
   where R < B.
4. Blocks and keys are out of the garbage collector's sight (`gc=False`): there are millions of them, and a look at each stops
   the whole process for seconds. So they may not form cycles once the chain has forgotten them, nor hang on each other in a
   line of a hundred thousand, which ends the process when the last is freed: `clear` unties them.
This file knows nothing of who holds what; `Block.present` is set by its caller.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import msgspec

from event_ingest.events import Extra, Item
from indexer.block_key import TOKEN_BYTES, media_extra, next_key, root_key


class Key(msgspec.Struct, gc=False, eq=False):
    """One router block key: its parent, and (for re-blocking) how often it is claimed in each tier."""

    key: int
    parent: "Key | None"
    users: int = 0
    """Blocks and spans that refer to it."""
    claims: int = 0
    """Claims per tier, 32 bits each."""
    held_children: int = 0


class Span(msgspec.Struct, gc=False, eq=False):
    """A router block that lies over several engine blocks: held only where all of them are."""

    key: Key
    parts: "tuple[Block, ...]"
    mask: int = 0
    tails: dict[int, int] | None = None


class Block(msgspec.Struct, gc=False, eq=False):
    """One engine block, known by its engine hash."""

    hash: int
    parent: "Block | None" = None
    root: int | None = None
    """Root key, for blocks without a parent."""
    children: int = 0
    placed: bool = False
    present: bool = False
    left: bool = False
    """Had copies, has none."""
    # Content: only while it waits for its parent, except the size.
    size: int = 0
    content: bytes | int | None = None
    extra: Extra | None = None
    waiting: "list[Block] | None" = None
    # Where it stands in the router's blocks; valid once placed.
    last: Key | None = None
    """The last key that is complete at the end of this block."""
    keys: tuple[Key, ...] = ()
    """Keys that lie in this block alone."""
    spans: list[Span] | None = None
    """Router blocks over this and other blocks."""
    tail: bytes = b""
    tail_items: tuple[Item, ...] = ()
    tail_before: "tuple[Block, ...]" = ()
    """The blocks before this one that the tail begins in; empty where it begins in this one."""
    # Copies, for re-blocking: in the first place, in others, since which epoch; and what was made of them.
    first: int = 0
    others: dict[int, int] | None = None
    epoch: int = 0
    mask: int = 0
    tails: dict[int, int] | None = None


class Chain:
    """The blocks of one stream. `block_tokens` is the router's block size."""

    def __init__(
        self,
        *,
        model: str,
        block_tokens: int,
        on_placed: Callable[[Block], None],
        sequence_key: Callable[[int | None, int], int] | None = None,
        max_waiting: int = 16_384,
        max_absent: int = 8_192,
    ) -> None:
        self.block_tokens = block_tokens
        self.keys: dict[int, Key] = {}
        self.dropped = 0
        self.resolved = 0
        self._model = model
        self._chunk = block_tokens * TOKEN_BYTES
        self._on_placed = on_placed
        self._sequence_key = sequence_key
        self._max_waiting = max_waiting
        self._max_absent = max_absent
        self._blocks: dict[int, Block] = {}
        self._unplaced: OrderedDict[int, Block] = OrderedDict()
        self._absent: OrderedDict[int, Block] = OrderedDict()  # those of the removed ones that have no children
        self._left = 0  # removed blocks still known
        self._roots: dict[tuple[str | None, str | None], int] = {}

    def __del__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(list(self._blocks.values()))

    @property
    def waiting(self) -> int:
        """Blocks that wait for a parent or for their content."""
        return len(self._unplaced)

    def find(self, hash_: int) -> Block | None:
        return self._blocks.get(hash_)

    def find_or_expect(self, hash_: int) -> Block:
        """The block of that hash; an unknown one is entered without content and waits for it."""
        block = self._blocks.get(hash_)
        if block is None:
            block = self._blocks[hash_] = Block(hash_)
            self._unplaced[hash_] = block
        return block

    def root(self, lora: str | None, salt: str | None) -> int:
        key = self._roots.get((lora, salt))
        if key is None:
            if len(self._roots) > 4096:
                self._roots.clear()
            key = self._roots[lora, salt] = root_key(self._model, lora=lora, salt=salt)
        return key

    def describe(
        self, block: Block, parent: Block | None, root: int | None, content: bytes | int, size: int, extra: Extra | None
    ) -> None:
        """Say what a block holds and what it follows, and place it (and all that waited for it) if that is possible."""
        if block.content is not None:
            return  # announced again while it waits
        block.content, block.size, block.extra, block.root = content, size, extra, root
        if parent is not None and block.parent is None:
            block.parent = parent
            parent.children += 1
            self._absent.pop(parent.hash, None)
        if parent is None or parent.placed:
            self._place(block)
        else:
            parent.waiting = parent.waiting or []
            parent.waiting.append(block)

    def agrees(
        self, block: Block, parent: Block | None, root: int | None, content: bytes | int, size: int, extra: Extra | None
    ) -> bool:
        """Whether a placed block is where, and what, an event says it is."""
        if block.size != size or (parent is not None and not parent.placed):
            return block.size == size
        last, _, tail, _ = self._cut(parent, root, content, extra)
        return last == (block.last.key if block.last is not None else block.root) and tail == block.tail

    def leave(self, block: Block) -> None:
        """The last copy of a block is gone."""
        if not block.placed:
            if block.children == 0:
                self._forget(block)
            return
        block.left = True
        self._left += 1
        if block.children == 0:
            self._absent[block.hash] = block
        while self._left > self._max_absent and self._absent:
            self._forget(self._absent.popitem(last=False)[1])

    def arrive(self, block: Block) -> None:
        """A block that had no copies has one."""
        if block.left:
            block.left = False
            self._left -= 1
            self._absent.pop(block.hash, None)

    def clear(self) -> None:
        """Forget everything. Blocks and keys that were handed out are no longer good for anything."""
        for block in self._blocks.values():
            block.parent = block.last = block.waiting = block.spans = None
            block.keys = block.tail_before = ()
        for key in self.keys.values():
            key.parent = None
        for known in (self._blocks, self._unplaced, self._absent, self.keys):
            known.clear()
        self._left = 0

    def trim(self) -> list[Block]:
        """Drop what has waited longest beyond the bound; returns the blocks dropped, which nothing refers to any more."""
        dropped: list[Block] = []
        while len(self._unplaced) > self._max_waiting:
            stack = [next(iter(self._unplaced.values()))]
            while stack:
                block = stack.pop()
                if self._unplaced.pop(block.hash, None) is None:
                    continue
                stack.extend(block.waiting or ())
                block.waiting = None
                self._blocks.pop(block.hash, None)
                if block.parent is not None:
                    block.parent.children -= 1
                    if block.parent.waiting and block in block.parent.waiting:
                        block.parent.waiting.remove(block)
                if block.content is not None or block.present:
                    dropped.append(block)
        self.dropped += len(dropped)
        return dropped

    # ------------------------------------------------------------------------------------------------------ placing

    def _place(self, block: Block) -> None:
        stack = [block]
        while stack:
            block = stack.pop()
            assert block.content is not None
            if self._unplaced.pop(block.hash, None) is not None and block.parent is not None and block.present:
                self.resolved += 1
            parent = block.parent
            root = self.root(None, None) if block.root is None else block.root
            _, numbers, tail, tail_items = self._cut(parent, root, block.content, block.extra)
            before = (*parent.tail_before, parent) if parent is not None and parent.tail else ()
            last = parent.last if parent is not None else None
            own: list[Key] = []
            for position, number in enumerate(numbers):
                last = self._key(number, last)
                last.users += 1
                if position == 0 and before:
                    span = Span(last, (*before, block))
                    for part in span.parts:
                        part.spans = part.spans or []
                        part.spans.append(span)
                else:
                    own.append(last)
            block.keys = tuple(own)
            block.last = last
            block.root = parent.root if parent is not None else root
            block.tail, block.tail_items = tail, tail_items
            if tail and not numbers:
                block.tail_before = before
            block.content = block.extra = None
            block.placed = True
            self._on_placed(block)
            waiting, block.waiting = block.waiting, None
            stack.extend(waiting or ())

    def _cut(
        self, parent: Block | None, root: int | None, content: bytes | int, extra: Extra | None
    ) -> tuple[int | None, list[int], bytes, tuple[Item, ...]]:
        """The last complete key, the keys that end in a block, and the tail (tokens, items) behind them."""
        key = (parent.last.key if parent.last is not None else parent.root) if parent is not None else root
        if isinstance(content, int):
            assert self._sequence_key is not None
            number = self._sequence_key(parent.last.key if parent is not None and parent.last else None, content)
            return number, [number], b"", ()
        assert key is not None
        tokens = content
        items: tuple[Item, ...] = ()
        before = 0
        if parent is not None and parent.tail:
            tokens = parent.tail + content
            items = parent.tail_items
            before = len(parent.tail) // TOKEN_BYTES
        embeds = b""
        if extra is not None:
            items = (*items, *(Item(i.identifier, i.offset + before) for i in extra.items if i.offset >= 0))
            embeds = extra.embeds
        numbers: list[int] = []
        position = 0
        while len(tokens) - position >= self._chunk:
            added = b""
            if items or embeds:
                start = position // TOKEN_BYTES
                end = start + self.block_tokens
                added = media_extra((i.identifier, i.offset - start) for i in items if start <= i.offset < end)
                items = tuple(i for i in items if i.offset >= end)
                if embeds:  # a digest of this engine block's embeddings: no request computes one
                    added, embeds = added + b"\xffembeds" + embeds, b""
            key = next_key(key, tokens[position : position + self._chunk], added)
            numbers.append(key)
            position += self._chunk
        start = position // TOKEN_BYTES
        left = tuple(Item(i.identifier, i.offset - start) for i in items)
        if embeds:
            left = (*left, Item("\xffembeds" + embeds.hex(), 0))
        return key, numbers, tokens[position:], left

    def _key(self, number: int, parent: Key | None) -> Key:
        key = self.keys.get(number)
        if key is None:
            key = self.keys[number] = Key(number, parent)
        return key

    # --------------------------------------------------------------------------------------------------- forgetting

    def _forget(self, block: Block) -> None:
        """Forget an absent block without children, and its absent ancestors once nothing follows them."""
        gone: Block | None = block
        while gone is not None:  # no recursion: those that wait for a parent may stand in a line of thousands
            gone = self._forget_one(gone)

    def _forget_one(self, block: Block) -> Block | None:
        """Returns its parent where that is to be forgotten next."""
        self._blocks.pop(block.hash, None)
        self._unplaced.pop(block.hash, None)
        self._absent.pop(block.hash, None)
        self._left -= block.left
        for key in block.keys:
            self._drop_user(key)
        for span in block.spans or ():
            for part in span.parts:
                if part is not block and part.spans is not None:
                    part.spans.remove(span)
            self._drop_user(span.key)
        block.spans = None
        parent = block.parent
        if parent is None:
            return None
        parent.children -= 1
        if parent.waiting and block in parent.waiting:
            parent.waiting.remove(block)
        if parent.children or parent.present:
            return None
        if parent.placed:
            self._absent[parent.hash] = parent
            return None
        return parent

    def _drop_user(self, key: Key) -> None:
        key.users -= 1
        if key.users == 0 and self.keys.get(key.key) is key:
            del self.keys[key.key]


def split(tokens: bytes, count: int, block_tokens: int) -> Sequence[bytes]:
    """The packed tokens of `count` consecutive blocks."""
    size = block_tokens * TOKEN_BYTES
    return [tokens[number * size : (number + 1) * size] for number in range(count)]
