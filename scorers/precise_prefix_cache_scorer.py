from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request
from scorers.prefix_cache_scorer import PrefixCacheScorer

PRODUCER = "precise-prefix-cache-producer"


class PrecisePrefixCacheScorer(Scorer, type="precise-prefix-cache-scorer"):
    """The older all-in-one form: index, event ingest and scorer in one plugin.

    Works as `prefix-cache-scorer` on the precise producer's match. Where the configuration has a producer of its own the
    parameters here are not used; where it has none, they describe the producer that is made for it. New configurations
    name `precise-prefix-cache-producer` and `prefix-cache-scorer`.
    Source: llm-d-router precise-prefix-cache-scorer.
    """

    deprecated = "use precise-prefix-cache-producer and prefix-cache-scorer with prefixMatchInfoProducerName"

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        token_processor_config: Annotated[dict[str, Any], Meta(description="As of the precise producer.")] = (
            msgspec.field(default_factory=dict)
        )
        indexer_config: Annotated[dict[str, Any], Meta(description="As of the precise producer.")] = msgspec.field(
            default_factory=dict
        )
        kv_events_config: Annotated[dict[str, Any], Meta(description="As of the precise producer.")] = msgspec.field(
            default_factory=dict
        )
        speculative_indexing: Annotated[bool, Meta(description="As of the precise producer.")] = False
        speculative_ttl: Annotated[str, Meta(description="As of the precise producer.")] = ""

    parameters: Parameters

    def __init__(self, name: str, parameters: plugin.Parameters, producer: str = PRODUCER) -> None:
        """`producer` is the name of the producer instance whose match is read."""
        super().__init__(name, parameters)
        self.producer = producer
        self._scorer = PrefixCacheScorer(name, PrefixCacheScorer.Parameters(prefix_match_info_producer_name=producer))
        self._default = PrefixCacheScorer(name, PrefixCacheScorer.Parameters())

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        if request.match(self.producer) is not None:
            return self._scorer.score(request, candidates, fleet)
        if request.match() is not None:
            return self._default.score(request, candidates, fleet)
        return np.zeros(len(candidates))
