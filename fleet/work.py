"""What prefill costs, in seconds, from the token numbers in the books.

The columns hold tokens and token pairs; a model on its hardware turns them into seconds with two constants. Scorers, the
queue and deciders share this arithmetic, each with constants of its own.
"""

from functools import cached_property
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fleet.fleet import Fleet, Slots, Vector
from fleet.request import Request

Progress = Literal["clock", "events", "none"]
"""How the running prefill's progress is known: by time passed, by the blocks the engine has announced, or not at all."""

MOST_PROGRESS = 0.95
"""A prefill without a first token is never taken for finished, however long it runs."""

_MOST_PROGRESS, _NOTHING = np.array(MOST_PROGRESS), np.array(0.0)
"""As arrays: on a few endpoints turning a float into one costs as much as the arithmetic."""


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Seconds of prefill: a * n + q * n * (h + n/2) for n new tokens after h cached ones."""

    a: Annotated[float, Meta(gt=0, description="Seconds per new token: the linear layers.")] = 18.8e-6
    q: Annotated[float, Meta(ge=0, description="Seconds per pair of tokens: attention.")] = 8.74e-10

    @cached_property
    def _price(self) -> Vector:
        return np.array([self.a, self.q])

    def seconds(self, uncached: Vector, cached: Vector) -> Vector:
        """For `uncached` tokens after `cached` ones."""
        return uncached * (self.a + self.q * (cached + 0.5 * uncached))

    def of_prompt(self, tokens: float, cached: Vector) -> Vector:
        """For a prompt of so many tokens with the first `cached` there: the same, as n = p - h and h + n/2 = (p + h) / 2."""
        return (tokens - cached) * (self.a + 0.5 * self.q * tokens + 0.5 * self.q * cached)

    def backlog(
        self,
        fleet: Fleet,
        slots: Slots | None,
        now: float,
        progress: Progress = "clock",
        slowness: Vector | None = None,
    ) -> Vector:
        """Seconds of prefill that each of `slots` (None: of all there are) still owes on what the books say was sent there. Not
        negative. `slowness`: by how much longer each slot of the fleet takes."""
        # Over all slots: on the few columns that there are, reading out is dearer than arithmetic.
        seconds: Vector = self._price.dot(fleet.prefills)
        in_flight, oldest = seconds[: fleet.capacity], seconds[fleet.capacity :]
        if slowness is not None:
            in_flight *= slowness
            oldest *= slowness
        if progress == "none":
            return in_flight if slots is None else in_flight[slots]
        done = np.minimum(_MOST_PROGRESS * oldest, now - fleet.oldest_since)
        if progress == "events":
            left = self.a * fleet.oldest_left_tokens + self.q * fleet.oldest_left_square
            if slowness is not None:
                left *= slowness
            # Where nothing of the oldest has been announced yet the clock is the better guess.
            done = np.where(fleet.oldest_left_tokens < fleet.oldest_tokens, oldest - left, done)
        in_flight -= done
        np.maximum(in_flight, _NOTHING, out=in_flight)
        return in_flight if slots is None else in_flight[slots]


H100_8B = PrefillCost()
"""Llama 3.1 8B on one H100: LIN(8192)/8192 and 4 * 32 heads * 128 * 32 layers / 600e12."""
H100_70B_TP8 = PrefillCost(a=35.0e-6, q=5.46e-10)
"""Llama 3.1 70B on eight H100, all-reduce included."""


def cached_tokens(request: Request, slots: Slots | None, fleet: Fleet, producer: str | None = None) -> Vector:
    """Leading prompt tokens that each slot (None: every one there is) holds by the index or has on its way; at most the prompt
    less one token. Do not write into it.

    0 without a match. The last token is always computed, so a fully cached prompt still has one token of work.
    """
    match = request.match(producer)
    if match is None:
        return np.zeros(fleet.capacity if slots is None else len(slots))
    most = max(request.prompt_tokens - 1.0, 0.0)
    if slots is not None and not (match.keys and len(fleet.pending)):
        return np.minimum(match.tokens_at(slots), most)
    held = fleet.pending.held(match, fleet.capacity, most)
    return held if slots is None else held[slots]
