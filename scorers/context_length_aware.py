import re
from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.plugin import Filter, Scorer
from fleet.request import Request

UNLABELLED, BAD = -1.0, -2.0
"""Lower bounds that stand for the absence of a range."""


class ContextLengthAware(Filter, Scorer, type="context-length-aware"):
    """Send prompts to endpoints that are set up for their length.

    Use it where some engines are tuned for long contexts: a label says from how many to how many tokens an endpoint is
    meant for. As a filter (with `enableFiltering`) it keeps endpoints whose range holds the prompt, and unlabelled ones.
    Reads: the label `min-max`, the prompt's tokens. A prompt of unknown length scores 0.5 everywhere and filters nothing.
    Score: in range 0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * (max - tokens) / width), 1 for a width of 0: narrow
    ranges first, and room above. Out of range 0.3 / (1 + distance / 1000). Without the label 0.5, with a malformed one 0.
    Source: llm-d-router context-length-aware, same formula.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        label: Annotated[str, Meta(min_length=1, description="Label with the range.")] = "llm-d.ai/context-length-range"
        enable_filtering: Annotated[bool, Meta(description="Filter too, where the profile names it.")] = False

    parameters: Parameters

    def _ranges(self, candidates: Slots, fleet: Fleet) -> tuple[Vector, Vector]:
        label = self.parameters.label
        low = fleet.vector_of((self, "low"), lambda endpoint: _range(endpoint.labels.get(label))[0])
        high = fleet.vector_of((self, "high"), lambda endpoint: _range(endpoint.labels.get(label))[1])
        return low[candidates], high[candidates]

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        if not self.parameters.enable_filtering or not request.prompt_tokens:
            return np.ones(len(candidates), np.bool_)
        low, high = self._ranges(candidates, fleet)
        tokens = request.prompt_tokens
        mask: Mask = (low == UNLABELLED) | ((low >= 0) & (low <= tokens) & (tokens <= high))
        return mask

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        if not request.prompt_tokens:
            return np.full(len(candidates), 0.5)
        low, high = self._ranges(candidates, fleet)
        tokens = float(request.prompt_tokens)
        width = np.maximum(high - low, 1.0)
        inside = 0.3 + 0.7 * (0.7 / (1.0 + width / 10000.0) + 0.3 * (high - tokens) / width)
        inside = np.where(high == low, 1.0, inside)
        outside = 0.3 / (1.0 + np.maximum(0.0, np.maximum(low - tokens, tokens - high)) / 1000.0)
        score: Vector = np.where((low <= tokens) & (tokens <= high), inside, outside)
        score = np.where(low == UNLABELLED, 0.5, score)
        return np.where(low == BAD, 0.0, score)


def _range(text: str | None) -> tuple[float, float]:
    if text is None:
        return UNLABELLED, UNLABELLED
    found = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if found is None or int(found[1]) > int(found[2]):
        return BAD, BAD
    return float(found[1]), float(found[2])
