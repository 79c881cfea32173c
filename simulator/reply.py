"""What a simulated engine says: words that depend on the prompt only, and that re-encode to the very tokens it sampled.

A reply that comes back as history then shares every token with what the engine holds, so that prefix reuse across turns
depends on the chat template and on nothing else. Words are single tokens of the tokenizer's own vocabulary: the first
without, the others with a leading space, kept only if their text encodes back to the one token.
"""

import hashlib
import random
from collections.abc import Sequence

import msgspec
import numpy as np

from simulator.sequence import FinishReason
from tokenization.local import LocalTokenizer

_SCANNED = range(256, 24_000)  # token ids looked at for words; frequent words have small ids in BPE vocabularies
_WANTED = 2_000
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "</s>")


class Reply(msgspec.Struct, frozen=True):
    """Sampled tokens, the stop token included when `finish` is "stop", and the text that each of them adds."""

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    finish: FinishReason


class ReplyWriter:
    """Writes replies with the words of one tokenizer."""

    def __init__(self, tokenizer: LocalTokenizer, typical_tokens: int = 64) -> None:
        """`typical_tokens`: replies end by themselves after half to one and a half times as many tokens."""
        self._typical = typical_tokens
        words = [(token, tokenizer.decode([token])) for token in _SCANNED]
        leading = [(t, w) for t, w in words if w.isascii() and w.isalpha() and w.istitle() and len(w) > 3]
        inner = [(t, w) for t, w in words if w[:1] == " " and w[1:].isascii() and w[1:].isalpha() and w[1:].islower()]
        self._leading = _stable(tokenizer, leading[:_WANTED])
        self._inner = _stable(tokenizer, [word for word in inner if len(word[1]) > 3][:_WANTED])
        if not self._leading or not self._inner:
            raise ValueError("the tokenizer has no single-token words to write replies with")
        self._end = self._end_token(tokenizer)

    def write(self, prompt: Sequence[int], max_tokens: int, *, ignore_end: bool = False) -> Reply:
        """The reply to `prompt`: at most `max_tokens` tokens, exactly so many with `ignore_end`."""
        digest = hashlib.blake2b(np.asarray(prompt, dtype="<u4").tobytes(), digest_size=8).digest()
        dice = random.Random(digest)
        own_length = dice.randint(max(1, self._typical // 2), max(1, self._typical * 3 // 2))
        ends = self._end is not None and not ignore_end and own_length < max_tokens
        words = [dice.choice(self._leading)]
        words += dice.choices(self._inner, k=(own_length if ends else max_tokens) - 1)
        if ends and self._end is not None:
            words.append((self._end, ""))
        return Reply(tuple(t for t, _ in words), tuple(w for _, w in words), "stop" if ends else "length")

    @staticmethod
    def _end_token(tokenizer: LocalTokenizer) -> int | None:
        for text in _END_TEXTS:
            ids = list(tokenizer.encode(text, add_special_tokens=False))
            if len(ids) == 1:
                return int(ids[0])
        return None


def _stable(tokenizer: LocalTokenizer, words: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return [(token, word) for token, word in words if [*tokenizer.encode(word, add_special_tokens=False)] == [token]]
