from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request


class LoadAwareScorer(Scorer, type="load-aware-scorer"):
    """Prefer endpoints with shorter queues, on a fixed scale.

    Unlike `queue-scorer` one waiting request more or less moves the score by the same small amount whatever the others
    have, so an affinity scorer is overruled only by real queues.
    Reads: `fleet.waiting`, requests, as last scraped.
    Score: 0.5 * (1 - min(waiting, threshold) / threshold); 0.5 with an empty queue.
    Source: llm-d-router load-aware-scorer, same formula.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        threshold: Annotated[int, Meta(description="Queue length that scores 0; 0 or less means 128.")] = 128

    parameters: Parameters

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        threshold = float(self.parameters.threshold if self.parameters.threshold > 0 else 128)
        score: Vector = 0.5 * (1.0 - np.minimum(fleet.waiting[candidates], threshold) / threshold)
        return score
