from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Lookup, Scorer
from fleet.request import Request
from scorers.inflight_load_producer import bound, default


class TokenLoadScorer(Scorer, type="token-load-scorer"):
    """Prefer endpoints with fewer tokens of this router's in flight, this request's own included.

    Use it where prompts differ much in length: ten short prompts weigh less than one long one.
    Reads: the books' tokens in flight, the match (for what of this prompt would be uncached).
    Score: 1 - min(tokens in flight + this request's, threshold) / threshold.
    Source: llm-d-router token-load-scorer, same formula.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        queue_threshold_tokens: Annotated[int, Meta(description="Tokens that score 0; 0 or less means 4194304.")] = (
            4194304
        )
        in_flight_load_producer_name: Annotated[
            str | None, Meta(description="How tokens are counted; without it `inflight-load-producer`.")
        ] = None

    parameters: Parameters

    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self._load = default()

    def bind(self, lookup: "Lookup[Any]") -> None:
        self._load = bound(lookup, self.parameters.in_flight_load_producer_name)

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        threshold = float(self.parameters.queue_threshold_tokens)
        if threshold <= 0:
            threshold = 4194304.0
        tokens = self._load.tokens(candidates, fleet) + self._load.own_tokens(request, candidates)
        score: Vector = 1.0 - np.minimum(tokens, threshold) / threshold
        return score
