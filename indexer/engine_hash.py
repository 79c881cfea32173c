"""vLLM's own block hashes, byte for byte: four algorithms, the seed rule, extra keys and the wire form.

    none_hash = H(seed)                                                    the parent of a first block
    digest    = H((parent digest, (token, ...), extra keys or None))
    wire      = low 64 bits of the digest

| algorithm | serialised with | digest |
|---|---|---|
| sha256 | pickle, protocol 5 | SHA-256, 32 bytes |
| sha256_cbor | canonical CBOR | SHA-256, 32 bytes |
| xxhash | pickle, protocol 5 | XXH3-128, 16 bytes |
| xxhash_cbor | canonical CBOR | XXH3-128, 16 bytes |

A chain continues from the full digest, never from the 64-bit wire value. The router needs none of this to route; it
serves to verify how an engine is configured, to read events that carry hashes only, and to simulate an engine.

The pickle trap. Pickle writes a string that is the *same object* as an earlier one as a back reference, and an equal
but separate string in full. In the engine, tags such as "mm" are constants of its program (one object, the second use
is a reference) while names, paths, identifiers and salts arrive one by one over its process boundary (separate
objects, written in full even when they are equal to each other or to a tag). `block_hash` builds its input in just
that form, whatever objects the caller passes. Canonical CBOR has no such trap.
"""

import hashlib
import pickle
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import cbor2
import numpy as np
import xxhash

from indexer.block_key import Tokens
from indexer.extra_keys import ExtraKeys

DEFAULT_SEED = "vllm-none-hash"

_MASK64 = (1 << 64) - 1
_xxh3_128: Callable[[bytes], bytes] = xxhash.xxh3_128_digest


class Algorithm(StrEnum):
    """The values of vLLM's --prefix-caching-hash-algo."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


class UnknownSeedError(ValueError):
    """An xxhash engine without PYTHONHASHSEED draws a random seed: nobody can recompute its hashes."""


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name. Raises ValueError that lists the right ones."""
    try:
        return Algorithm(name)
    except ValueError as error:
        raise ValueError(f"no hash algorithm named {name!r}; one of {', '.join(Algorithm)}") from error


def none_hash(algo: Algorithm | str, seed: str | None) -> bytes:
    """The digest that stands for "no parent".

    `seed` is the engine's PYTHONHASHSEED, None when it is unset: the sha256 family then has a fixed default, the
    xxhash family a random one, which raises UnknownSeedError.
    """
    algo = algorithm(algo)
    if seed is None:
        if algo in (Algorithm.XXHASH, Algorithm.XXHASH_CBOR):
            raise UnknownSeedError(
                f"{algo} without PYTHONHASHSEED uses a random seed; set PYTHONHASHSEED on the engine"
            )
        seed = DEFAULT_SEED
    return _DIGEST[algo](_separate(seed))


def block_hash(algo: Algorithm | str, parent: bytes, tokens: Tokens, extra_keys: ExtraKeys | None = None) -> bytes:
    """The full digest of one block; `parent` is a full digest or `none_hash`, `extra_keys` come from ExtraKeys."""
    ids = tuple(tokens.tolist()) if isinstance(tokens, np.ndarray) else tuple(tokens)
    tagged = extra_keys.tagged(_separate) if extra_keys is not None else None
    return _DIGEST[algorithm(algo)]((parent, ids, tagged))


def block_hashes(
    algo: Algorithm | str,
    parent: bytes,
    tokens: Tokens,
    block_tokens: int,
    extra_keys: Sequence[ExtraKeys | None] | None = None,
) -> list[bytes]:
    """Full digests of all full blocks of `tokens`, chained from `parent`; `extra_keys` has one entry per block."""
    ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    digests: list[bytes] = []
    for number in range(len(ids) // block_tokens):
        extra = extra_keys[number] if extra_keys else None
        parent = block_hash(algo, parent, ids[number * block_tokens : (number + 1) * block_tokens], extra)
        digests.append(parent)
    return digests


def wire(digest: bytes) -> int:
    """What the engine puts on the wire for a digest: its low 64 bits as an unsigned int."""
    return int.from_bytes(digest[-8:], "big")


def normalise(value: int | bytes) -> int:
    """A block hash as any engine sends it, as an unsigned 64-bit int.

    vLLM sends unsigned ints, or full digests as bytes when told to; SGLang sends signed 64-bit ints.
    Raises ValueError for bytes shorter than 8 and ints of more than 64 bits.
    """
    if isinstance(value, bytes):
        if len(value) < 8:
            raise ValueError(f"a block hash of {len(value)} bytes: at least 8 are needed")
        return int.from_bytes(value[-8:], "big")
    if 0 <= value <= _MASK64:
        return value
    if -(1 << 63) <= value < 0:
        return value & _MASK64
    raise ValueError(f"block hash {value} does not fit 64 bits")


def unsigned(hashes: Iterable[int]) -> list[int]:
    """Signed 64-bit block hashes as unsigned ones."""
    return [value & _MASK64 for value in hashes]


def _pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _canonical_cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _separate(text: str) -> str:
    """An equal string that is an object of its own (CPython shares strings of length 0 and 1, here and in the engine)."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


_DIGEST: dict[Algorithm, Callable[[object], bytes]] = {
    Algorithm.SHA256: lambda value: hashlib.sha256(_pickled(value)).digest(),
    Algorithm.SHA256_CBOR: lambda value: hashlib.sha256(_canonical_cbor(value)).digest(),
    Algorithm.XXHASH: lambda value: _xxh3_128(_pickled(value)),
    Algorithm.XXHASH_CBOR: lambda value: _xxh3_128(_canonical_cbor(value)),
}
