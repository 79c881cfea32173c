from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request


class KVCacheUtilizationScorer(Scorer, type="kv-cache-utilization-scorer"):
    """Prefer endpoints with more free KV memory.

    Use it to keep long contexts from preempting each other. It sees blocks in use by requests; cached but free blocks do
    not count, so it can read 0 on an endpoint whose cache is full.
    Reads: `fleet.kv_usage`, 0..1, as last scraped.
    Score: 1 - usage.
    Source: llm-d-router kv-cache-utilization-scorer, same formula.
    """

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        free: Vector = 1.0 - fleet.kv_usage[candidates]
        return free
