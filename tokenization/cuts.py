"""Where a text may be cut so that the pieces, encoded one by one, give the ids of the whole.

`tokenizers` first splits the raw text at its added tokens (leftmost, longest) and only then normalizes, pre-tokenizes
and merges each piece on its own. So the text can be cut immediately before a token T of that list if no other added
token can match across the cut, and nothing about T reaches outside of it. This module is that condition, checked once
against `tokenizer.json`; a token that satisfies it is called hard.

    a  T is an added token (and special tokens in text are parsed, which engines do)
    b  T is matched in the raw text: not `normalized`, or there is no normalizer
    c  T strips no white space (`lstrip`, `rstrip`) and asks for no word boundary (`single_word`); where another added
       token asks for one, T begins and ends with something that is no word character (underscores are)
    d  T is no part of another added token, shares no edge with one, and cannot overlap itself
    e  no truncation, padding or BPE dropout, which depend on the whole text
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_WORD = re.compile(r"\w")


def hard_tokens(spec: Mapping[str, Any]) -> frozenset[str]:
    """The added tokens of a parsed `tokenizer.json` before which text may be cut; empty where none is safe."""
    model = spec.get("model") or {}
    if spec.get("truncation") or spec.get("padding") or model.get("dropout"):
        return frozenset()
    added = [token for token in spec.get("added_tokens") or () if token.get("content")]
    normalizes = not _is_no_op(spec.get("normalizer"))
    own = [token["content"] for token in added if _keeps_to_itself(token, added, normalizes)]
    edges = _Edges([token["content"] for token in added])
    return frozenset(text for text in own if edges.clear_of(text))


def _is_no_op(normalizer: Any) -> bool:
    return normalizer is None or (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers"))


def _keeps_to_itself(token: Mapping[str, Any], added: Sequence[Mapping[str, Any]], normalizes: bool) -> bool:
    """Conditions b and c."""
    if normalizes and token.get("normalized", True):
        return False
    if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
        return False
    text = token["content"]
    others_want_words = any(other.get("single_word") for other in added if other is not token)
    return not (others_want_words and (_WORD.match(text[0]) or _WORD.match(text[-1])))


class _Edges:
    """Condition d against all added tokens at once: thousands of them (Gemma has 6,415) are compared by their prefixes
    and suffixes in sets, not pair by pair."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._joined = "\0".join(texts)
        self._prefixes: dict[str, int] = {}
        self._suffixes: dict[str, int] = {}
        for text in texts:
            for k in range(1, len(text)):
                self._prefixes[text[:k]] = self._prefixes.get(text[:k], 0) + 1
                self._suffixes[text[-k:]] = self._suffixes.get(text[-k:], 0) + 1

    def clear_of(self, text: str) -> bool:
        """Whether no added token contains `text` and none shares an edge with it; `text` itself is one of them."""
        if self._joined.count(text) > 1:
            return False
        # A proper suffix of T that is a proper prefix of any added token (T included: self-overlap), and the reverse.
        return not any(text[-k:] in self._prefixes or text[:k] in self._suffixes for k in range(1, len(text)))


def turn_token(hard: frozenset[str], rendered: str, repeats: int) -> str | None:
    """The hard token that starts a turn: the first one in `rendered`, a chat of several turns, that occurs at least
    `repeats` times (a BOS occurs once, and some templates mark the user's turns only).

    One cut per turn is enough: more cuts mean more look-ups and save nothing. None where no hard token qualifies.
    """
    candidates = [token for token in hard if rendered.count(token) >= repeats]
    return min(candidates, key=rendered.index, default=None)


def split_before(text: str, tokens: Sequence[str]) -> list[str]:
    """`text` cut immediately before every occurrence of any of `tokens`; the pieces concatenate to `text`."""
    if not tokens or not text:
        return [text] if text else []
    cuts = {0}
    for token in tokens:
        at = text.find(token)
        while at >= 0:
            cuts.add(at)
            at = text.find(token, at + len(token))
    ordered = sorted(cuts)
    return [text[start:end] for start, end in zip(ordered, [*ordered[1:], len(text)], strict=True)]
