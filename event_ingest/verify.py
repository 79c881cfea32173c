"""Does an engine hash its blocks as it is configured to?

Events carry tokens and hashes, so the hashes can be recomputed. Routing does not need that (keys come from tokens), but a
mismatch tells that a seed or an algorithm differs from what somebody believes, which matters where engines share a cache
or where a stream carries hashes only. When the configured pair does not fit, the others are tried, to name the likely one.

A block that cannot be recomputed is `unverifiable`, not wrong: xxhash with a random seed, an adapter whose path is not known,
a parent that was announced before we listened, prompt embeddings.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from event_ingest.chain import split
from event_ingest.events import BlockStored, Extra
from indexer.engine_hash import Algorithm, UnknownSeedError, block_hash, none_hash, wire
from indexer.extra_keys import ExtraKeys

COMMON_SEEDS: tuple[str | None, ...] = (None, "0", "42", "1")
SGLANG = "sglang"


class Hashes(msgspec.Struct):
    """Blocks whose hash was recomputed (and how many of those differ), and blocks for which that is impossible."""

    checked: int = 0
    wrong: int = 0
    unverifiable: int = 0


class Verifier:
    """Checks the first `limit` stored blocks of a stream (None: all of them).

    `algorithm` and `seed` are the engine's settings (`--prefix-caching-hash-algo`, `PYTHONHASHSEED`; seed None = unset).
    With algorithm None the first block decides among the known ones. `lora_paths` maps adapter names to paths, as
    `/v1/models` lists them under `root`.
    """

    def __init__(
        self,
        algorithm: Algorithm | str | None,
        seed: str | None,
        *,
        lora_paths: Mapping[str, str] | None = None,
        limit: int | None = 64,
    ) -> None:
        self.counts = Hashes()
        self.mismatch = ""
        """What to tell the operator when hashes do not fit; empty while they do."""
        self._algorithm = Algorithm(algorithm) if algorithm is not None else None
        self._seed = seed
        self._lora_paths = dict(lora_paths or {})
        self._limit = limit
        self._digests: dict[int, bytes] = {}
        self._before = 0  # blocks looked at in earlier incarnations

    @property
    def done(self) -> bool:
        return self._limit is not None and self._sum() - self._before >= self._limit

    def restart(self) -> None:
        """Another incarnation of the engine: its hashes may be others."""
        self._digests.clear()
        self._before = self._sum()
        self.mismatch = ""

    def _sum(self) -> int:
        return self.counts.checked + self.counts.unverifiable

    def check(self, event: BlockStored) -> None:
        """Recompute the hashes of one event, if it has tokens for them."""
        if self.done or not event.hashes or not event.tokens or not event.block_tokens:
            return
        if len(event.tokens) != 4 * len(event.hashes) * event.block_tokens:
            return  # masked: the same blocks are named by the full-attention group
        blocks = [
            np.frombuffer(part, "<u4").tolist() for part in split(event.tokens, len(event.hashes), event.block_tokens)
        ]
        if self._algorithm is None:
            self._guess(event, blocks[0])
        parent = self._parent(event)
        for number, hash_ in enumerate(event.hashes):
            keys = self._extra_keys(event, event.extras[number] if event.extras else None)
            if parent is None or isinstance(keys, _Unknown) or self._algorithm is None:
                self.counts.unverifiable += len(event.hashes) - number
                return
            digest = block_hash(self._algorithm, parent, blocks[number], keys)
            self.counts.checked += 1
            if wire(digest) != hash_:
                self.counts.wrong += 1
                if not self.mismatch:
                    self.mismatch = self._explain(event, blocks, number)
                self.counts.unverifiable += len(event.hashes) - number - 1  # they chain on a digest we do not have
                return
            self._digests[hash_] = parent = digest

    def _parent(self, event: BlockStored) -> bytes | None:
        if event.parent is not None:
            return self._digests.get(event.parent)
        if self._algorithm is None:
            return None
        try:
            return none_hash(self._algorithm, self._seed)
        except UnknownSeedError:
            return None

    def _extra_keys(self, event: BlockStored, extra: Extra | None) -> "ExtraKeys | _Unknown | None":
        path = self._lora_paths.get(event.lora) if event.lora is not None else None
        if (event.lora is not None and path is None) or (extra is not None and extra.embeds):
            return _UNKNOWN
        lora = (event.lora, path) if event.lora is not None and path is not None else None
        if lora is None and extra is None:
            return None
        extra = extra or Extra()
        return ExtraKeys(lora=lora, media=tuple((i.identifier, i.offset) for i in extra.items), salt=extra.salt)

    def _guess(self, event: BlockStored, tokens: Sequence[int]) -> None:
        if event.parent is not None:
            return
        found = self._likely(event, tokens)
        if isinstance(found, tuple):
            self._algorithm, self._seed = found

    def _likely(self, event: BlockStored, tokens: Sequence[int]) -> tuple[Algorithm, str | None] | str | None:
        """Which known way of hashing gives the first root block's hash."""
        keys = self._extra_keys(event, event.extras[0] if event.extras else None)
        if isinstance(keys, _Unknown):
            return None
        for algorithm in Algorithm:
            for seed in dict.fromkeys((self._seed, *COMMON_SEEDS)):
                try:
                    root = none_hash(algorithm, seed)
                except UnknownSeedError:
                    continue
                if wire(block_hash(algorithm, root, tokens, keys)) == event.hashes[0]:
                    return algorithm, seed
        digest = hashlib.sha256(np.array(tokens, "<u4").tobytes()).digest()
        return SGLANG if int.from_bytes(digest[:8], "big") == event.hashes[0] else None

    def _explain(self, event: BlockStored, blocks: Sequence[Sequence[int]], number: int) -> str:
        configured = f"{self._algorithm}, PYTHONHASHSEED {'unset' if self._seed is None else self._seed}"
        if event.parent is not None or number:
            return f"a block's hash is not {configured} although its parent's is"
        found = self._likely(event, blocks[0])
        if found is None:
            return f"hashes are not {configured}, nor any other known pair; set PYTHONHASHSEED alike on all engines"
        if isinstance(found, str):
            return f"hashes are {found}'s, not {configured}"
        return f"hashes are {found[0]}, PYTHONHASHSEED {'unset' if found[1] is None else found[1]}; configured: {configured}"


class _Unknown:
    """Extra keys that the event does not carry in full."""


_UNKNOWN = _Unknown()
