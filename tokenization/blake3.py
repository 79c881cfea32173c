"""BLAKE3 over whole buffers, in NumPy: the digest with which engines name images.

A buffer is cut into chunks of 1024 bytes; a chunk is 16 blocks of 64 bytes, compressed one after the other into 8 words (its
chaining value); chaining values are compressed in pairs, level by level, until one is left, and an odd one moves up unchanged.
Chunks do not depend on each other, so every step is done for all of them at once: an array axis is what SIMD lanes are
in the usual implementations. About 50 MB/s, and 5 ms for the smallest input.

Source: the BLAKE3 specification (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020), sections 2.1 to 2.5. Hash mode only.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint32]

_IV = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], dtype=np.uint32
)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_ROUNDS = 7
_BLOCK_BYTES, _CHUNK_BLOCKS = 64, 16
_CHUNK_BYTES = _BLOCK_BYTES * _CHUNK_BLOCKS
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_BATCH_CHUNKS = 2048
"""Chunks compressed at once: 2 MiB of input, whose working set stays in the processor's cache."""


def blake3_hex(data: bytes) -> str:
    """The 32-byte BLAKE3 digest of `data`, as 64 hexadecimal digits."""
    chunks = max(1, -(-len(data) // _CHUNK_BYTES))
    parts = [
        _chunk_values(memoryview(data)[first * _CHUNK_BYTES : (first + _BATCH_CHUNKS) * _CHUNK_BYTES], first, chunks)
        for first in range(0, chunks, _BATCH_CHUNKS)
    ]
    values = np.concatenate(parts, axis=1)
    while values.shape[1] > 1:
        values = _parents(values)
    return values[:, 0].astype("<u4").tobytes().hex()


def _chunk_values(data: memoryview, first: int, total: int) -> Words:
    """Chaining values (8, chunks) of the chunks in `data`, which begins with chunk number `first` of `total`."""
    count = max(1, -(-len(data) // _CHUNK_BYTES))
    padded = np.zeros(count * _CHUNK_BYTES, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    blocks = padded.view("<u4").reshape(count, _CHUNK_BLOCKS, 16).transpose(1, 2, 0).astype(np.uint32, order="C")
    numbers = np.arange(first, first + count, dtype=np.uint64)
    tail = np.empty((4, count), np.uint32)
    tail[0], tail[1] = numbers & np.uint64(0xFFFF_FFFF), numbers >> np.uint64(32)
    # The last chunk may end early: its value is taken where it ends, whatever the others still have to go through.
    rest = len(data) - (count - 1) * _CHUNK_BYTES
    end = max(0, -(-rest // _BLOCK_BYTES) - 1)
    values, last = np.repeat(_IV[:, None], count, axis=1), _IV
    for number in range(_CHUNK_BLOCKS):
        flags = (_CHUNK_START if number == 0 else 0) | (_CHUNK_END if number == _CHUNK_BLOCKS - 1 else 0)
        tail[2], tail[3] = _BLOCK_BYTES, flags
        if number == end:
            tail[2, -1] = rest - end * _BLOCK_BYTES
            tail[3, -1] = flags | _CHUNK_END | (_ROOT if total == 1 else 0)
        values = _compress(values, blocks[number], tail)
        if number == end:
            last = values[:, -1].copy()
            if count == 1:
                break
    values[:, -1] = last
    return values


def _parents(values: Words) -> Words:
    """The next level of the tree."""
    pairs = values.shape[1] // 2
    words = np.concatenate([values[:, 0 : 2 * pairs : 2], values[:, 1 : 2 * pairs : 2]])
    tail = np.zeros((4, pairs), np.uint32)
    tail[2] = _BLOCK_BYTES
    tail[3] = _PARENT | (_ROOT if values.shape[1] == 2 else 0)
    joined = _compress(np.repeat(_IV[:, None], pairs, axis=1), words, tail)
    return joined if values.shape[1] % 2 == 0 else np.concatenate([joined, values[:, -1:]], axis=1)


def _schedule() -> list[tuple[list[int], ...]]:
    """Per round the message words of the column step (x, y) and of the diagonal step (x, y)."""
    order = list(range(16))
    rounds: list[tuple[list[int], ...]] = []
    for _ in range(_ROUNDS):
        rounds.append((order[0:8:2], order[1:8:2], order[8:16:2], order[9:16:2]))
        order = [order[at] for at in _PERMUTATION]
    return rounds


_SCHEDULE = _schedule()
_TURN = {step: [(row + step) % 4 for row in range(4)] for step in (1, 2, 3)}


def _compress(values: Words, block: Words, tail: Words) -> Words:
    """Compress one block (16, n) into each of n chaining values (8, n). `tail` (4, n): counter low and high, bytes in the
    block, flags."""
    a, b = values[:4].copy(), values[4:].copy()
    c, d = np.repeat(_IV[:4, None], values.shape[1], axis=1), tail.copy()
    spare = np.empty_like(a)
    for columns_x, columns_y, diagonals_x, diagonals_y in _SCHEDULE:
        _mix(a, b, c, d, block[columns_x], block[columns_y], spare)
        # Diagonals are columns once the rows are turned against each other.
        b, c, d = b[_TURN[1]], c[_TURN[2]], d[_TURN[3]]
        _mix(a, b, c, d, block[diagonals_x], block[diagonals_y], spare)
        b, c, d = b[_TURN[3]], c[_TURN[2]], d[_TURN[1]]
    return np.concatenate([a ^ c, b ^ d])


def _mix(a: Words, b: Words, c: Words, d: Words, x: Words, y: Words, spare: Words) -> None:
    """The quarter rounds of all four columns, in place."""
    for words, turn_d, turn_b in ((x, 16, 12), (y, 8, 7)):
        a += b
        a += words
        d ^= a
        _rotate(d, turn_d, spare)
        c += d
        b ^= c
        _rotate(b, turn_b, spare)


def _rotate(words: Words, bits: int, spare: Words) -> None:
    """Rotate every word to the right, in place."""
    np.right_shift(words, bits, out=spare)
    np.left_shift(words, 32 - bits, out=words)
    np.bitwise_or(words, spare, out=words)
