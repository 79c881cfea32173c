from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request
from scorers.scale import fewest_first


class RunningRequestsSizeScorer(Scorer, type="running-requests-size-scorer"):
    """Prefer endpoints with fewer running requests.

    Use it where batches, not queues, make answers slow: short prompts, long answers.
    Reads: `fleet.running`, requests, as last scraped.
    Score: (most - running) / (most - fewest) over the candidates; 1 where all are equal.
    Source: llm-d-router running-requests-size-scorer, same formula.
    """

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        return fewest_first(fleet.running[candidates])
