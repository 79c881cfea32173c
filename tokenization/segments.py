"""Tokenize a conversation for the price of its new text.

The rendered prompt is cut before every turn (`cuts`), and the ids of each piece are remembered by its text. Turns repeat
verbatim from request to request, so a long chat costs look-ups plus one short encode. Each boundary also gets an
identity, a digest of everything before it, under which callers keep what they derived from that prefix: the chain of
block keys (`KeyChainCache`).
"""

import hashlib
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from tokenization.cuts import split_before
from tokenization.encoders import Encoder, Ids

ENTRY_OVERHEAD_BYTES = 400
"""What an entry costs beside its text and ids: dict slot, links, headers. Measured once with tracemalloc, rounded up."""
LINK_OVERHEAD_BYTES = 320
"""What a link of a key chain costs beside its keys, measured in the same way: forty times a key."""
KEY_BYTES = 8


class Boundary(msgspec.Struct, frozen=True):
    """A place in a prompt where everything before it is known by one name."""

    tokens: int
    """Number of token ids before the boundary."""
    identity: bytes
    """16 bytes; equal for equal texts before the boundary, whatever follows."""


class _Segment(msgspec.Struct, frozen=True):
    ids: Ids
    digest: bytes
    size: int


class CacheStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since start, and what is held now."""

    hits: int
    misses: int
    hit_tokens: int
    miss_tokens: int
    evicted: int
    entries: int
    bytes: int
    max_bytes: int


class SegmentCache:
    """Least recently used segments, bounded in bytes. Thread-safe; encoding happens outside of the lock."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Segment] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = self._hit_tokens = self._miss_tokens = self._evicted = 0

    def encode(self, segments: Sequence[str], encoder: Encoder) -> list[_Segment]:
        """The segments' ids, from the cache or from `encoder` (one call for all that miss)."""
        with self._lock:
            found = [self._get(text) for text in segments]
        missing = list(dict.fromkeys(text for text, entry in zip(segments, found, strict=True) if entry is None))
        if not missing:
            return [entry for entry in found if entry is not None]
        fresh = {
            text: _Segment(
                ids, hashlib.blake2b(text.encode(), digest_size=16).digest(), sys.getsizeof(text) + ids.nbytes
            )
            for text, ids in zip(missing, encoder.encode(missing), strict=True)
        }
        with self._lock:
            for text, entry in fresh.items():
                self._put(text, entry)
        return [entry or fresh[text] for text, entry in zip(segments, found, strict=True)]

    def stats(self) -> CacheStats:
        """Counters and sizes, for metrics."""
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                hit_tokens=self._hit_tokens,
                miss_tokens=self._miss_tokens,
                evicted=self._evicted,
                entries=len(self._entries),
                bytes=self._bytes,
                max_bytes=self._max_bytes,
            )

    def _get(self, text: str) -> _Segment | None:
        entry = self._entries.get(text)
        if entry is None:
            self._misses += 1
            return None
        self._entries.move_to_end(text)
        self._hits += 1
        self._hit_tokens += len(entry.ids)
        return entry

    def _put(self, text: str, entry: _Segment) -> None:
        self._miss_tokens += len(entry.ids)
        size = entry.size + ENTRY_OVERHEAD_BYTES
        if text in self._entries or size > self._max_bytes:
            return
        # The encoder returns slices of one buffer for all misses; keeping a slice would keep the whole buffer alive.
        self._entries[text] = _Segment(entry.ids.copy(), entry.digest, entry.size)
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._bytes -= oldest.size + ENTRY_OVERHEAD_BYTES
            self._evicted += 1


class SegmentedEncoder:
    """Encodes whole texts piece by piece. `cut_tokens` must be hard (`cuts.hard_tokens`); texts without a
    cut are not remembered, because a prompt that was seen once as a whole is hardly ever seen again."""

    def __init__(self, encoder: Encoder, cut_tokens: Sequence[str], max_bytes: int) -> None:
        self.encoder = encoder
        self.cut_tokens = tuple(cut_tokens)
        self.cache = SegmentCache(max_bytes)

    def encode(self, text: str, *, start: int = 0) -> tuple[Ids, tuple[Boundary, ...]]:
        """The ids of `text` and the boundaries in it (its end included), counted from token `start`."""
        if not self.cut_tokens or not text:
            return self.encoder.encode([text])[0], ()
        pieces = split_before(text, self.cut_tokens)
        if len(pieces) == 1:
            return self.encoder.encode(pieces)[0], ()
        segments = self.cache.encode(pieces, self.encoder)
        boundaries = []
        tokens, identity = start, start.to_bytes(4, "little")
        for segment in segments:
            tokens += len(segment.ids)
            identity = hashlib.blake2b(identity + segment.digest, digest_size=16).digest()
            boundaries.append(Boundary(tokens, identity))
        return np.concatenate([segment.ids for segment in segments]), tuple(boundaries)


NO_EXTRAS: Mapping[int, bytes] = {}

ExtendKeys = Callable[[int, Ids, int, Mapping[int, bytes]], Sequence[int]]
"""(parent key, token ids, block tokens, block number -> its extra) -> the keys of the full blocks in these ids, chained from
the parent."""


class KeyChainCache:
    """Block keys of known prefixes, so that a conversation's next turn hashes only its new blocks.

    A chain is kept as links, one per boundary, each with the keys of the blocks that end behind the boundary before it;
    conversations that share a beginning share links. Links are evicted least recently used, bounded in bytes: most links are
    of a short turn, and cost more than their keys. Thread-safe.
    """

    def __init__(self, extend: ExtendKeys, max_bytes: int = 128 * 1024 * 1024) -> None:
        self._extend = extend
        self._max_bytes = max_bytes
        self._links: OrderedDict[tuple[bytes, int, int], array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self._keys = 0
        self.hit_keys = self.computed_keys = 0
        """Keys taken from the cache, and keys hashed, since start."""

    def keys(
        self,
        ids: Ids,
        boundaries: Sequence[Boundary],
        root: int,
        block_tokens: int,
        extras: Mapping[int, bytes] = NO_EXTRAS,
    ) -> list[int]:
        """The keys of all full blocks of `ids` under `root`. Only what no known boundary covers is hashed.

        `extras`: block number -> what else decides over the block (images). A boundary's identity must stand for the extras
        before it, too (`placeholders.expand` sees to that).
        """
        keys: list[int] = []
        known = 0
        with self._lock:
            for boundary in boundaries:
                link = self._links.get(name := (boundary.identity, root, block_tokens))
                if link is None:
                    break
                self._links.move_to_end(name)
                keys.extend(link)
                known += 1
            self.hit_keys += len(keys)
        covered = len(keys) * block_tokens
        if extras and keys:
            extras = {number - len(keys): extra for number, extra in extras.items() if number >= len(keys)}
        new = self._extend(keys[-1] if keys else root, ids[covered:], block_tokens, extras)
        start = len(keys)
        keys.extend(new)
        with self._lock:
            self.computed_keys += len(new)
            for boundary in boundaries[known:]:
                end = boundary.tokens // block_tokens
                self._put((boundary.identity, root, block_tokens), array("Q", keys[start:end]))
                start = max(start, end)
        return keys

    def __len__(self) -> int:
        """Keys held."""
        with self._lock:
            return self._keys

    def _put(self, name: tuple[bytes, int, int], link: "array[int]") -> None:
        # A link of no keys (a turn shorter than a block) is kept too: the walk must be able to pass it.
        previous = self._links.pop(name, None)
        self._keys += len(link) - (len(previous) if previous is not None else 0)
        self._links[name] = link
        while self._keys * KEY_BYTES + len(self._links) * LINK_OVERHEAD_BYTES > self._max_bytes:
            _, oldest = self._links.popitem(last=False)
            self._keys -= len(oldest)
