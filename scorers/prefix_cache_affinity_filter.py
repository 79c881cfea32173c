import random
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Filter, Lookup
from fleet.request import Request
from scorers.inflight_load_producer import bound, default


class PrefixCacheAffinityFilter(Filter, type="prefix-cache-affinity-filter"):
    """Stick to endpoints that hold most of the prompt, unless waiting for them costs too much.

    Keeps the endpoints whose match is at least `affinityThreshold` of the prompt; all, where nobody has that much, with
    probability `explorationProbability`, or where the freest of them would start `maxTTFTPenaltyMs` later than the freest
    of the others (tokens in flight / `peakPrefillThroughput`).
    Source: llm-d-router prefix-cache-affinity-filter; the latency predictor is not available.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        affinity_threshold: Annotated[
            float, Meta(ge=0, le=1, description="Share of the prompt that makes it stick.")
        ] = 0.80
        exploration_probability: Annotated[float, Meta(ge=0, le=1, description="How often all are kept.")] = 0.0
        max_ttft_penalty_ms: Annotated[
            float, Meta(ge=0, description="Longest extra wait to accept, ms; 0: always stick.")
        ] = msgspec.field(name="maxTTFTPenaltyMs", default=18000.0)
        ttft_source: Annotated[
            Literal["prefillThroughput", "latencyPredictor"], Meta(description="Only prefillThroughput is available.")
        ] = "prefillThroughput"
        peak_prefill_throughput: Annotated[float, Meta(gt=0, description="Tokens per second.")] = 15928.0
        prefix_match_info_producer_name: Annotated[str | None, Meta(description="Whose match to read.")] = None
        latency_prediction_info_producer_name: Annotated[str | None, Meta(description="Accepted and not used.")] = None
        in_flight_load_producer_name: Annotated[str | None, Meta(description="How tokens are counted.")] = None

        def __post_init__(self) -> None:
            if self.ttft_source == "latencyPredictor":
                raise ValueError("ttftSource: latencyPredictor is not available; use prefillThroughput")

    parameters: Parameters

    def __init__(self, name: str, parameters: plugin.Parameters, rng: random.Random | None = None) -> None:
        super().__init__(name, parameters)
        self._rng = rng or random.Random()
        self._load = default()

    def bind(self, lookup: "Lookup[Any]") -> None:
        self._load = bound(lookup, self.parameters.in_flight_load_producer_name)

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        everyone = np.ones(len(candidates), np.bool_)
        settings = self.parameters
        match = request.match(settings.prefix_match_info_producer_name)
        if match is None or match.total_tokens <= 0:
            return everyone
        if settings.exploration_probability and self._rng.random() < settings.exploration_probability:
            return everyone
        sticky: Mask = match.tokens_at(candidates) / match.total_tokens >= settings.affinity_threshold
        if not sticky.any() or sticky.all():
            return everyone
        if settings.max_ttft_penalty_ms > 0:
            wait_ms = self._load.tokens(candidates, fleet) / settings.peak_prefill_throughput * 1000.0
            if wait_ms[sticky].min() - wait_ms[~sticky].min() > settings.max_ttft_penalty_ms:
                return everyone
        return sticky
