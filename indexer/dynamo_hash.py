"""Dynamo's hashes of a block: a local one for its tokens alone, and a sequence hash that chains them.

    seed        = 1337, with a LoRA adapter (1337 + XXH3-64(adapter name)) mod 2^64
    local[i]    = XXH3-64(tokens as u32 little-endian, then media hashes as u64 little-endian, ascending; seed)
    sequence[0] = local[0]
    sequence[i] = XXH3-64(sequence[i-1] as u64 little-endian, local[i] as u64 little-endian; seed 1337)

Its events call them tokens_hash and block_hash. Not covered: EAGLE's windows of one token more, and the cache
namespace (salt), whose place in the hash has not been observed.
"""

from collections.abc import Callable, Iterable, Sequence
from struct import Struct

import xxhash

from indexer.block_key import TOKEN_BYTES, Tokens, pack_tokens

SEED = 1337

_U64 = Struct("<Q").pack
_xxh3_64: Callable[[bytes, int], int] = xxhash.xxh3_64_intdigest


def seed_of(lora: str | None = None) -> int:
    """The seed of local hashes, for the base model or an adapter."""
    return SEED if lora is None else (SEED + _xxh3_64(lora.encode(), 0)) % 2**64


def local_hash(tokens: Tokens, seed: int = SEED, media: Iterable[int] = ()) -> int:
    """The unchained hash of one block; `media` are the 64-bit hashes of the media items in it."""
    return _xxh3_64(pack_tokens(tokens) + b"".join(map(_U64, sorted(media))), seed)


def local_hashes(tokens: Tokens, block_tokens: int, seed: int = SEED) -> list[int]:
    """Local hashes of all full blocks; an unfinished last block is left out."""
    packed, size = pack_tokens(tokens), block_tokens * TOKEN_BYTES
    return [_xxh3_64(packed[start : start + size], seed) for start in range(0, len(packed) - size + 1, size)]


def sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """Chained hashes of consecutive blocks; `parent` is the sequence hash before the first, None at the start."""
    chained: list[int] = []
    for value in local:
        parent = value if parent is None else _xxh3_64(_U64(parent) + _U64(value), SEED)
        chained.append(parent)
    return chained
