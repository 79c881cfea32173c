"""llm-d's block keys, for fleets whose tooling compares them: cbor-fnv (FNV-1a 64 over CBOR) and xxh64.

    cbor-fnv   start  = FNV-1a(hash seed)
               root   = FNV-1a(CBOR [start, null, model])
               key[i] = FNV-1a(CBOR [key[i-1], [token, ...], null or [{"Hash": extra}, ...]])
    xxh64      start  = XXH64(hash seed)
               root   = XXH64(le64(start), le64(len(model)), model)
               key[i] = XXH64(le64(key[i-1]), le32 tokens, then le64(len) and bytes of each extra)

The adapter's name takes the model's place for a LoRA request. Only full blocks have keys, as here. CBOR is canonical:
ints in their shortest form.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from struct import Struct

import cbor2
import numpy as np
import xxhash

from indexer.block_key import TOKEN_BYTES, Tokens, pack_tokens

_FNV_OFFSET = 14695981039346656037
_FNV_PRIME = 1099511628211
_MASK64 = (1 << 64) - 1

_U64 = Struct("<Q").pack
_xxh64: Callable[[bytes], int] = xxhash.xxh64_intdigest


class Algorithm(StrEnum):
    CBOR_FNV = "cbor-fnv"
    XXH64 = "xxh64"


def fnv1a64(data: bytes) -> int:
    """FNV-1a, 64 bits."""
    value = _FNV_OFFSET
    for byte in data:
        value = (value ^ byte) * _FNV_PRIME & _MASK64
    return value


def root_key(algorithm: Algorithm | str, model: str, hash_seed: str = "") -> int:
    """The parent key of a first block: `model` is the model's or the adapter's name, `hash_seed` as llm-d's setting."""
    if Algorithm(algorithm) is Algorithm.CBOR_FNV:
        return fnv1a64(cbor2.dumps([fnv1a64(hash_seed.encode()), None, model], canonical=True))
    return _xxh64(_U64(_xxh64(hash_seed.encode())) + _framed(model))


def block_keys(
    algorithm: Algorithm | str,
    root: int,
    tokens: Tokens,
    block_tokens: int,
    extras: Sequence[Sequence[str] | None] | None = None,
) -> list[int]:
    """Keys of all full blocks, chained from `root` or from the key of the block before.

    `extras` has one entry per block: None for text, else the hashes of its media (and its salt) in llm-d's order.
    """
    next_key = _cbor_fnv_key if Algorithm(algorithm) is Algorithm.CBOR_FNV else _xxh64_key
    packed, size = pack_tokens(tokens), block_tokens * TOKEN_BYTES
    keys: list[int] = []
    for start in range(0, len(packed) - size + 1, size):
        extra = extras[len(keys)] if extras else None
        root = next_key(root, packed[start : start + size], extra)
        keys.append(root)
    return keys


def _cbor_fnv_key(parent: int, chunk: bytes, extra: Sequence[str] | None) -> int:
    tagged = None if extra is None else [{"Hash": value} for value in extra]
    return fnv1a64(cbor2.dumps([parent, np.frombuffer(chunk, dtype="<u4").tolist(), tagged], canonical=True))


def _xxh64_key(parent: int, chunk: bytes, extra: Sequence[str] | None) -> int:
    return _xxh64(_U64(parent) + chunk + b"".join(map(_framed, extra or ())))


def _framed(text: str) -> bytes:
    raw = text.encode()
    return _U64(len(raw)) + raw
