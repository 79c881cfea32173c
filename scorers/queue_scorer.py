from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request
from scorers.scale import fewest_first


class QueueScorer(Scorer, type="queue-scorer"):
    """Prefer endpoints with fewer waiting requests.

    Use it with any affinity scorer, so that a popular prefix does not queue behind itself.
    Reads: `fleet.waiting`, requests, as last scraped (how old: `fleet.age`).
    Score: (most - waiting) / (most - fewest) over the candidates; 1 where all are equal.
    Source: llm-d-router queue-scorer, same formula.
    """

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        return fewest_first(fleet.waiting[candidates])
