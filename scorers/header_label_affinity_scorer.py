from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request


class HeaderLabelAffinityScorer(Scorer, type="header-label-affinity-scorer"):
    """Prefer endpoints whose label has the value that a request header has.

    Use it for soft placement that a client may ask for: a zone, a tier, a tenant's own endpoints.
    Score: 1 where the label's value equals the header's, else 0.
    Source: llm-d-router header-label-affinity-scorer.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        header_name: Annotated[str, Meta(min_length=1, description="The request header.")]
        label_key: Annotated[str, Meta(min_length=1, description="The endpoint label.")]

    parameters: Parameters

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        wanted = request.headers.get(self.parameters.header_name.lower())
        if not wanted:
            return np.zeros(len(candidates))
        key = self.parameters.label_key
        labels = (fleet.endpoint(slot).labels.get(key) == wanted for slot in candidates.tolist())
        return np.fromiter(labels, float, len(candidates))
