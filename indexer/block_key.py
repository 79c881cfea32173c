"""The router's own block keys: chained 64-bit names for the content of a block and of everything before it.

    root      = XXH3-64(model, LoRA adapter, cache salt), each field framed by its length
    key[i]    = XXH3-64(tokens of block i as u32 little-endian, seed = key[i-1])            text
    key[i]    = XXH3-64(the same, seed = XXH3-64(extra, seed = key[i-1]))                   with an extra

The parent is the seed, not a prefix of the data: nothing has to be concatenated, and the parent stays out of the
hashed bytes, so a chunk can never be mistaken for "parent + shorter chunk". Two keys are equal when everything that
decides whether an engine may share the block is equal: model, adapter, salt, media, all earlier tokens, these tokens.

Keys are names, not seals. XXH3 is not cryptographic: whoever crafts a collision can make the router expect a prefix
hit that the engine, which has its own hash, then does not give. It costs that request a prefill and nobody their data.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]

TOKEN_BYTES = 4

_xxh3_64: Callable[[bytes, int], int] = xxhash.xxh3_64_intdigest
_NO_EXTRAS: Mapping[int, bytes] = {}


def root_key(model: str, *, lora: str | None = None, salt: str | None = None) -> int:
    """The parent key of a first block.

    `model` is the base model; an adapter is named by `lora`, so that `lora="x"` and a model called `x` differ.
    An absent field and an empty one differ as well.
    """
    return _xxh3_64(b"".join(_framed(field) for field in (model, lora, salt)), 0)


def _framed(field: str | None) -> bytes:
    if field is None:
        return b"\x00"
    raw = field.encode()
    return b"\x01" + len(raw).to_bytes(8, "little") + raw


def pack_tokens(token_ids: Tokens) -> bytes:
    """Token ids as one buffer of u32 little-endian, the form in which blocks are hashed.

    Raises ValueError for an id outside 0 .. 2^32-1: a key of a wrapped id would name another prompt.
    """
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype == np.dtype("<u4"):
            return token_ids.tobytes()
        if token_ids.size and (token_ids.min() < 0 or token_ids.max() > 0xFFFF_FFFF):
            raise ValueError(f"token ids must be 0..2^32-1, got {int(token_ids.min())}..{int(token_ids.max())}")
        return token_ids.astype("<u4").tobytes()
    try:
        packed = array("I", token_ids)  # twice as fast as numpy for a list
    except OverflowError as error:
        raise ValueError(f"token ids must be 0..2^32-1, got {min(token_ids)}..{max(token_ids)}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def next_key(parent: int, chunk: bytes, extra: bytes = b"") -> int:
    """The key of the block `chunk` (packed tokens) after `parent`, a block key or a root key."""
    return _xxh3_64(chunk, _xxh3_64(extra, parent) if extra else parent)


def block_keys(
    root: int, token_ids: Tokens | bytes, block_tokens: int, extras: Mapping[int, bytes] | None = None
) -> list[int]:
    """Keys of all full blocks of `token_ids`, in order; an unfinished last block has no key.

    `root` is a root key, or the key of the block just before `token_ids` when a known chain is continued: for any cut
    at a block border, keys(a + b) == keys(a) + keys(b, root=keys(a)[-1]). `token_ids` may be packed already.
    `extras` maps a block's number within `token_ids` to its extra (see `media_extras`).
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, got {block_tokens}")
    packed = token_ids if isinstance(token_ids, bytes) else pack_tokens(token_ids)
    chunk_bytes = block_tokens * TOKEN_BYTES
    whole = len(packed) - len(packed) % chunk_bytes
    # One C loop cuts the buffer; slicing in Python costs a third more (docs/index.md has the figures).
    chunks = Struct(f"{chunk_bytes}s").iter_unpack(packed if whole == len(packed) else memoryview(packed)[:whole])
    key, digest = root, _xxh3_64
    if not extras:
        return [key := digest(chunk, key) for (chunk,) in chunks]
    return [key := next_key(key, chunk, extras.get(number, b"")) for number, (chunk,) in enumerate(chunks)]


def media_extra(items: Iterable[tuple[str, int]]) -> bytes:
    """The extra of one block, from (identifier, offset in the block) of the media items that begin in it.

    Only items that begin in the block count; those that merely continue (negative offset, as engines announce them)
    are skipped, because the chain already carries them. This is what makes keys independent of the engine's block
    size: where an item ends need not be known. Order does not matter. Empty when nothing begins here.
    """
    begun = sorted((offset, identifier) for identifier, offset in items if offset >= 0)
    return b"".join(offset.to_bytes(4, "little") + _framed(identifier) for offset, identifier in begun)


def media_extras(items: Iterable[tuple[str, int]], block_tokens: int) -> dict[int, bytes]:
    """`extras` for `block_keys`, from (identifier, offset in the token sequence) of a request's media items."""
    blocks: dict[int, list[tuple[str, int]]] = {}
    for identifier, offset in items:
        if offset < 0:
            raise ValueError(f"media item {identifier!r} begins at token {offset}, before the sequence")
        number, within = divmod(offset, block_tokens)
        blocks.setdefault(number, []).append((identifier, within))
    return {number: media_extra(begun) for number, begun in blocks.items()}
