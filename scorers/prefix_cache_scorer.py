from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request


class PrefixCacheScorer(Scorer, type="prefix-cache-scorer"):
    """Prefer endpoints that hold more of the prompt's beginning in their KV cache.

    The affinity scorer of every cache-aware profile; combine it with a load scorer, or a popular prefix queues behind itself.
    Reads: the match of `prefixMatchInfoProducerName`, tokens weighted by cache tier, in whole blocks.
    Score: w * min(1, matched tokens / scale)^2 + (1 - w) * matched blocks / blocks of the prompt, w = `matchLengthWeight`;
    0 without a match. It is a share of the prompt, not relative to other endpoints: a block that all prompts have in common
    is worth little, and traffic does not collapse onto the endpoint that stored it first.
    Source: llm-d-router prefix-cache-scorer, same formula.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None
        match_length_weight: Annotated[float, Meta(ge=0, le=1, description="Weight of the absolute match length.")] = (
            0.0
        )
        match_length_scale_tokens: Annotated[int, Meta(description="Matched tokens that count as a full match.")] = 8192

        def __post_init__(self) -> None:
            if self.match_length_weight > 0 and self.match_length_scale_tokens <= 0:
                raise ValueError("matchLengthScaleTokens must be positive where matchLengthWeight is not 0")

    parameters: Parameters

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        match = request.match(self.parameters.prefix_match_info_producer_name)
        if match is None or match.total_tokens <= 0:
            return np.zeros(len(candidates))
        # Whole blocks after weighting; the small addend keeps 3 * 0.8 + ... from losing a block to rounding.
        blocks = np.floor(match.tokens_at(candidates, weighted=True) / match.block_tokens + 1e-9)
        # Divided, not multiplied by a reciprocal: all of the prompt is exactly 1, and equal to the full score of others.
        share: Vector = blocks / (match.total_tokens / match.block_tokens)
        weight = self.parameters.match_length_weight
        if weight:
            length = np.minimum(1.0, blocks * match.block_tokens / self.parameters.match_length_scale_tokens)
            share = weight * length * length + (1.0 - weight) * share
        return share
