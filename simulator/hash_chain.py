"""The token ids of one sequence and the chained hashes of its full blocks, grown as tokens arrive."""

import secrets
from collections.abc import Iterable

import msgspec

from indexer import engine_hash
from indexer.extra_keys import ExtraKeys


class Lora(msgspec.Struct, frozen=True):
    """A LoRA adapter: `number` is the engine's own and means nothing elsewhere; `path` enters the block hash."""

    name: str
    path: str
    number: int


class HashRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine hashes its blocks. Engines share hashes only when all three fields agree."""

    algorithm: engine_hash.Algorithm = engine_hash.Algorithm.SHA256
    none_digest: bytes
    block_tokens: int = 16

    @classmethod
    def of(cls, algorithm: str, seed: str | None, block_tokens: int) -> "HashRecipe":
        """Build from the names an operator knows; raises ValueError for an unknown algorithm or a bad size.

        `seed` None is an unset PYTHONHASHSEED: the sha256 family has a fixed default, the xxhash family a random one.
        """
        if block_tokens < 1:
            raise ValueError(f"block size {block_tokens}: must be at least 1 token")
        known = engine_hash.algorithm(algorithm)
        try:
            none_digest = engine_hash.none_hash(known, seed)
        except engine_hash.UnknownSeedError:
            none_digest = engine_hash.none_hash(known, secrets.token_hex(32))
        return cls(algorithm=known, none_digest=none_digest, block_tokens=block_tokens)


class HashChain:
    """Grows block by block; a block's digest depends on every token before it, the salt and the adapter."""

    __slots__ = ("_recipe", "_salt", "digests", "lora", "tokens")

    def __init__(
        self, recipe: HashRecipe, tokens: Iterable[int] = (), *, lora: Lora | None = None, salt: str | None = None
    ) -> None:
        self._recipe = recipe
        self._salt = salt
        self.lora = lora
        self.tokens: list[int] = []
        self.digests: list[bytes] = []
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def block_tokens(self) -> int:
        return self._recipe.block_tokens

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens and hash every block that they complete."""
        self.tokens.extend(tokens)
        size = self._recipe.block_tokens
        for index in range(len(self.digests), len(self.tokens) // size):
            parent = self.digests[-1] if self.digests else self._recipe.none_digest
            chunk = tuple(self.tokens[index * size : (index + 1) * size])
            self.digests.append(engine_hash.block_hash(self._recipe.algorithm, parent, chunk, self.extra_keys(index)))

    def extra_keys(self, index: int) -> ExtraKeys | None:
        """What besides tokens enters the hash of block `index`: the adapter everywhere, the salt in block 0 only."""
        lora = (self.lora.name, self.lora.path) if self.lora is not None else None
        salt = self._salt if index == 0 else None
        return ExtraKeys(lora=lora, salt=salt) if lora or salt is not None else None
