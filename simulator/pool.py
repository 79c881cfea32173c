"""The block pool of a vLLM-like engine: one memory for running requests and for the prefix cache.

Rules, all taken from a real vLLM 0.32 (the recordings are replayed against this file in the tests)
1. A block is in use while references > 0. A free block that carries a hash is still cached: it waits in the free queue
   until somebody needs room, and a hit takes it out again.
2. The free queue is LRU: allocation takes from its head. Freed blocks go to the tail, the *last* block of a sequence
   first, so tails are evicted before heads; freed blocks without a hash go to the head (nothing is lost with them).
3. A hash can have several physical copies (a prompt of exactly k blocks may hit only k-1 and recomputes block k). Every
   copy that is evicted is announced on its own.
4. Block 0 is the null block: a pool of N blocks has N-1 usable ones.
5. Events collect here and leave with the next step: also the `Cleared` of a reset, which on an idle engine may be long.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from simulator.hash_chain import HashChain
from simulator.kv_events import Cleared, KvEvent, Removed, Stored


class Block:
    """One physical block. `digest` is set while its content is findable."""

    __slots__ = ("digest", "number", "references")

    def __init__(self, number: int) -> None:
        self.number = number
        self.references = 0
        self.digest: bytes | None = None


class BlockPool:
    """`blocks` counts the null block too, as `num_gpu_blocks` does."""

    def __init__(self, blocks: int, *, caching: bool = True) -> None:
        if blocks < 2:
            raise ValueError(f"{blocks} blocks: a pool needs at least 2, because block 0 is never used")
        self.usable = blocks - 1
        self._caching = caching
        self._free: OrderedDict[int, Block] = OrderedDict((n, Block(n)) for n in range(1, blocks))
        self._cached: dict[bytes, dict[int, Block]] = {}
        self._events: list[KvEvent] = []

    @property
    def free(self) -> int:
        """Blocks that an allocation could take now, cached ones included."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks held by requests."""
        return self.usable - len(self._free)

    @property
    def cached_digests(self) -> frozenset[bytes]:
        """Every digest of which at least one copy is findable."""
        return frozenset(self._cached)

    @property
    def copies(self) -> int:
        """Physical cached blocks, duplicates included."""
        return sum(len(copies) for copies in self._cached.values())

    def copies_of(self, digest: bytes) -> int:
        """Physical cached copies of one digest."""
        return len(self._cached.get(digest, ()))

    def match(self, digests: Sequence[bytes], limit: int) -> list[Block]:
        """The leading run of cached blocks, at most `limit`. Takes no reference: call `hold` before anything else."""
        found: list[Block] = []
        for digest in digests[:limit]:
            copies = self._cached.get(digest)
            if not copies:
                break
            found.append(next(iter(copies.values())))  # the oldest copy, as the engine does
        return found

    def needs(self, count: int, hits: Iterable[Block]) -> int:
        """Free blocks that `count` new blocks beside `hits` would take: a hit that nobody holds leaves the queue too."""
        return count + sum(block.references == 0 for block in hits)

    def hold(self, hits: Iterable[Block]) -> None:
        """Take one reference on each cached block of a hit."""
        for block in hits:
            if block.references == 0:
                del self._free[block.number]
            block.references += 1

    def allocate(self, count: int) -> list[Block]:
        """`count` blocks off the head of the free queue, evicting what they held. The caller has checked `free`."""
        if count > len(self._free):
            raise RuntimeError(f"allocating {count} blocks with {len(self._free)} free")
        taken: list[Block] = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            self._forget(block)
            block.references = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Give back one reference on each block of a sequence, in sequence order."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                self._free[block.number] = block
                if block.digest is None:
                    self._free.move_to_end(block.number, last=False)

    def store(
        self, chain: HashChain, blocks: Sequence[Block], start: int, stop: int, session_id: str | None = None
    ) -> None:
        """Make blocks `start`..`stop` of a sequence findable, and announce them as one event."""
        if not self._caching or stop <= start:
            return
        for index in range(start, stop):
            block, digest = blocks[index], chain.digests[index]
            block.digest = digest
            self._cached.setdefault(digest, {})[block.number] = block
        size, lora = chain.block_tokens, chain.lora
        self._events.append(
            Stored(
                digests=tuple(chain.digests[start:stop]),
                parent=chain.digests[start - 1] if start else None,
                token_ids=tuple(chain.tokens[start * size : stop * size]),
                block_tokens=size,
                extra_keys=tuple(chain.extra_keys(index) for index in range(start, stop)),
                lora_id=lora.number if lora else None,
                lora_name=lora.name if lora else None,
                session_id=session_id,
            )
        )

    def reset(self) -> bool:
        """Empty the prefix cache. False, and nothing happens, while any request holds a block."""
        if self.used:
            return False
        for copies in self._cached.values():
            for block in copies.values():
                block.digest = None
        self._cached.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[KvEvent]:
        """Everything since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _forget(self, block: Block) -> None:
        if block.digest is None:
            return
        copies = self._cached[block.digest]
        del copies[block.number]
        if not copies:
            del self._cached[block.digest]
        self._events.append(Removed(block.digest))
        block.digest = None
