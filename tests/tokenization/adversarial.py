"""Chats made to break tokenizers: specials and pieces of them, odd white space, marks that compose across boundaries."""

import random
from collections.abc import Sequence

_SPACE = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\u2028", "\0", "\ufeff"]
_MARKS = ["\u0301", "e\u0301", "\u00e9", "\u0338", ">\u0338", "<\u0338", "\u1100\u1161", "\uac00", "\u11a8", "\ufb01"]
_MARKS += ["\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea"]
_SIGNS = ["\u2581", "\u0120", "<", "|", "<|", "|>", "\uff5c", "\uff1c", "_", "</", ">"]
_TEXTS = [
    "The quick brown fox doesn't jump over 12345 lazy dogs, does it?",
    "def f(x: int = 0) -> str:\n    return {'a': [1, 2.5e-3, None]}[x]\n",
    '{"role": "user", "content": "a\\nb", "n": [1, 2, 3]}',
    "\u7f13\u5b58\u547d\u4e2d\u7387\u53d6\u51b3\u4e8e\u524d\u7f00\u662f\u5426\u5b8c\u5168\u76f8\u540c\u3002",
    "\U0001f44d\U0001f3fd\U0001f680 ok \U0001f600",
    "العربية עברית ไทย हिन्दी",
    "",
]


class Chats:
    """An endless, seeded source of rendered chats in the manner of one tokenizer."""

    def __init__(self, specials: Sequence[str], start: str, end: str, seed: int = 1) -> None:
        self._draw = random.Random(seed)
        self._specials = list(specials)
        self._start, self._end = start, end

    def take(self, count: int) -> list[str]:
        """`count` texts."""
        return [self._chat() for _ in range(count)]

    def _chat(self) -> str:
        draw = self._draw
        text = self._body() if draw.random() < 0.15 else ""
        for _ in range(draw.randint(1, 5)):
            role = draw.choice(["user", "assistant", "system", "tool", "wizard", ""])
            text += f"{self._start}{role}{draw.choice(['', chr(10), chr(10) * 2])}{self._body()}{self._end}"
            text += draw.choice(["\n", "", " "])
        if draw.random() < 0.8:
            text += f"{self._start}assistant\n"
        return text

    def _body(self) -> str:
        return "".join(self._piece() for _ in range(self._draw.randint(0, 8)))

    def _piece(self) -> str:
        draw = self._draw
        kind = draw.random()
        if kind < 0.3:
            special = draw.choice(self._specials)
            cut = draw.randint(0, len(special))
            return draw.choice([special, special[:cut], special[cut:], special.upper(), f" {special} "])
        if kind < 0.75:
            return draw.choice(draw.choice([_SPACE, _MARKS, _SIGNS]))
        text = draw.choice(_TEXTS)
        start = draw.randint(0, len(text))
        return text[start : draw.randint(start, len(text))]
