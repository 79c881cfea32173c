"""SGLang's block hash: SHA-256 over the previous full digest and the tokens, no seed, no serialiser.

    digest[i] = SHA-256(digest[i-1] + tokens as u32 little-endian)      a first block has no prefix
    wire[i]   = first 8 bytes of the digest, big-endian, as a *signed* 64-bit int

Here the wire value is unsigned, as everywhere in the router; `engine_hash.normalise` makes the announced ones so.
From the source of SGLang's radix cache; no SGLang engine was run against it.
"""

import hashlib

from indexer.block_key import TOKEN_BYTES, Tokens, pack_tokens


def page_hash(parent: bytes | None, tokens: Tokens) -> bytes:
    """The full digest of one page; `parent` is the digest before it, None for a first page."""
    return hashlib.sha256((parent or b"") + pack_tokens(tokens)).digest()


def page_hashes(tokens: Tokens, page_tokens: int, parent: bytes | None = None) -> list[bytes]:
    """Full digests of all full pages, chained from `parent`."""
    packed, size = pack_tokens(tokens), page_tokens * TOKEN_BYTES
    digests: list[bytes] = []
    previous = parent or b""
    for start in range(0, len(packed) - size + 1, size):
        previous = hashlib.sha256(previous + packed[start : start + size]).digest()
        digests.append(previous)
    return digests


def wire(digest: bytes) -> int:
    """The announced value of a digest, unsigned."""
    return int.from_bytes(digest[:8], "big")
