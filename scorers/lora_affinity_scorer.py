import numpy as np

from fleet.fleet import Adapters, Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request


class LoraAffinityScorer(Scorer, type="lora-affinity-scorer"):
    """Prefer endpoints that already run the requested LoRA adapter.

    Loading an adapter costs time and may push another one out.
    Reads: the adapters each engine runs or waits for, as last scraped (`vllm:lora_requests_info`).
    Score: 1 where the adapter runs, 0.8 where there is room for one more, 0.6 where it already waits, else 0. An endpoint
    that reports no adapters scores 0.
    Source: llm-d-router lora-affinity-scorer, same values.
    """

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        wanted = request.target_model
        return np.fromiter(
            (_score(fleet.adapters[slot], wanted) for slot in candidates.tolist()), float, len(candidates)
        )


def _score(adapters: Adapters | None, wanted: str) -> float:
    if adapters is None:
        return 0.0
    if wanted in adapters.running:
        return 1.0
    if len(adapters.running) + len(adapters.waiting) < adapters.most:
        return 0.8
    return 0.6 if wanted in adapters.waiting else 0.0
