"""Text -> token ids, without special tokens of the post-processor: two libraries behind one call.

fastokens is 20-30 times faster than `tokenizers` and gives the same ids for the models it supports; because that
"for the models it supports" is nobody's promise, it is used only after a self-check at load. The fallback is
`tokenizers.encode_batch_fast`, which releases the GIL (`encode` holds it for a third of a second on a long prompt).
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import fastokens
import numpy as np
import tokenizers
from numpy.typing import NDArray

from tokenization.errors import refuse

Ids = NDArray[np.uint32]

log = logging.getLogger(__name__)


class Encoder(Protocol):
    """Encodes texts independently; thread-safe; holds the GIL for the results only."""

    name: str

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """One array of ids per text, special tokens in the text parsed. Raises `TokenizationError` (400) for text that
        is no Unicode (lone surrogates): the engine refuses it."""


class FastokensEncoder:
    """fastokens. Raises `ValueError` where it does not support the model."""

    name = "fastokens"

    def __init__(self, spec: str) -> None:
        self._tokenizer: Any = fastokens.Tokenizer.from_json_str(spec)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        try:
            ids, offsets = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise _no_unicode(error) from error
        flat = np.frombuffer(ids, dtype="<u4").astype(np.uint32, copy=False)
        ends = np.frombuffer(offsets, dtype="<u8").tolist()
        return [flat[start:end] for start, end in pairwise(ends)]


class ReferenceEncoder:
    """`tokenizers`, what the engines themselves use."""

    name = "tokenizers"

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise _no_unicode(error) from error
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def choose_encoder(spec: str, reference: tokenizers.Tokenizer, *, extra_texts: Iterable[str] = ()) -> Encoder:
    """fastokens if it loads `spec` (the text of tokenizer.json) and agrees with `reference` on the self-check texts, else
    `tokenizers`. Takes about a second of CPU, and leaves the encoder warm."""
    slow = ReferenceEncoder(reference)
    try:
        fast = FastokensEncoder(spec)
    # The library raises whatever its parser or its regex engine raises; the reason is logged and the fallback works.
    except Exception as error:  # noqa: BLE001
        log.warning("encoder_unsupported encoder=fastokens fallback=tokenizers error=%r", str(error))
        return slow
    texts = [*_check_texts(reference), *extra_texts]
    for text, got, want in zip(texts, fast.encode(texts), slow.encode(texts), strict=True):
        if not np.array_equal(got, want):
            log.warning("encoder_differs encoder=fastokens fallback=tokenizers text=%r", text[:80])
            return slow
    return fast


def _check_texts(reference: tokenizers.Tokenizer) -> list[str]:
    """Texts that tell tokenizers apart: white space, normalization, digits, scripts, and every kind of added token."""
    added = [token.content for _, token in sorted(reference.get_added_tokens_decoder().items())][:64]
    plain = [
        "",
        " ",
        "\n\n \t\r\n  x",
        "The cache's blocks don't move; 3.14159 and 1234567890 do.",
        'def f(x: int = 0) -> str:\n    return {"a": [1, 2.5e-3, None]}\n',
        "e\u0301 \u00e9 \u1100\u1161\u11a8 \ufb01 >\u0338 \ufeff\u200b\u00a0\u3000\u2028",
        "中文模型 日本語 한국어 русский عربي",
        "\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd",
        "\x00\x01\x7f <| |> <|im_ \u0120 \u2581 </",
        "a" * 2000 + "\n" * 300 + "-" * 700 + " " * 500,
    ]
    return [*plain, *(f"x{token} y" for token in added), " ".join(added), "".join(added)]


def _no_unicode(error: Exception) -> Exception:
    return refuse(f"the prompt is not valid Unicode (lone surrogate): {error}", "lone_surrogate")
