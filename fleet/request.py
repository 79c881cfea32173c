"""One request as the scheduler sees it: numbers and names, no text."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt every endpoint holds. Vectors are indexed by slot and as long as the fleet's capacity."""

    tokens: Vector
    """Leading cached tokens, whatever tier they are in."""
    weighted_tokens: Vector
    """The same, every token weighted by its tier (GPU 1.0)."""
    total_tokens: int
    """Tokens of the prompt's full blocks: the most that can match."""
    block_tokens: int
    keys: Sequence[int] = ()
    """The prompt's block keys at this block size; what is on its way to an endpoint is counted by them."""
    announced_tokens: Vector | None = None
    """Leading tokens that an exact event stream says are held: 0 where the stream is not exact, and without blocks that are
    only predicted. None where no streams are behind the match and all of it is a guess."""

    def tokens_at(self, slots: NDArray[np.intp], *, weighted: bool = False) -> Vector:
        """Leading cached tokens of these slots; 0 for a slot that joined after the match was made."""
        vector = self.weighted_tokens if weighted else self.tokens
        try:
            return vector[slots]
        except IndexError:
            return np.where(slots < len(vector), vector[np.minimum(slots, len(vector) - 1)], 0.0)

    def announced_at(self, slots: NDArray[np.intp]) -> Vector:
        """Leading tokens of these slots that others can rely on: `announced_tokens`, or `tokens` without streams."""
        vector = self.tokens if self.announced_tokens is None else self.announced_tokens
        return np.where(slots < len(vector), vector[np.minimum(slots, len(vector) - 1)], 0.0)


class Request(msgspec.Struct, kw_only=True):
    """What filters, scorers, pickers and deciders read.

    Producers fill `matches` before the scheduling cycle; nothing in the cycle writes.
    """

    id: str
    model: str
    """The model the client named."""
    target_model: str
    """The model after rewriting; what the engines know."""
    path: str
    headers: Mapping[str, str] = {}
    """Lower-case names."""
    prompt_tokens: int = 0
    """0 where the prompt could not be tokenized."""
    expected_output_tokens: int = 0
    """What a producer expects of the reply; 0 where nobody expects anything."""
    output_limit: int = 0
    """The client's own limit on the reply's tokens; 0 without one."""
    priority: int = 0
    fairness_id: str = "default-flow"
    session_id: str | None = None
    attributes: Mapping[str, str] = {}
    """What header readers found, by attribute name."""
    multimodal: bool = False
    rewrites_history: bool | None = None
    """What the template probe found for this model; None where it is unknown."""
    candidates: NDArray[np.intp] | None = None
    """Every slot the request may go to, before any filter; set by the cycle."""
    peer: int | None = None
    """The slot that an earlier profile of the same request picked; what topology plugins measure from."""
    matches: dict[str, Match] = {}
    """Producer name -> what it found."""
    default_match: str = ""
    """The producer that is meant when a plugin names none."""

    def reply_tokens(self, usual: float) -> float:
        """Tokens of the reply: what is expected, else what is `usual`; a smaller limit of the client's counts instead."""
        expected = self.expected_output_tokens or usual
        return min(expected, self.output_limit) if self.output_limit else expected

    def match(self, producer: str | None = None) -> Match | None:
        """The match found by `producer` (None: the default one), or None where there is none."""
        return self.matches.get(producer or self.default_match)
