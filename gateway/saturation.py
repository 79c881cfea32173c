"""Saturation detectors: how full the fleet is, and (as filters) which endpoints are not.

A saturation of 1 or more turns away requests of negative priority before they are scheduled. As in llm-d, what cannot be
known counts as full.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Filter
from fleet.request import Request, Vector
from gateway.config_decode import Duration

PUNCTUAL = 3
"""Scrape intervals within which a number is not late."""


class SaturationDetector(Filter):
    """What `flowControl.saturationDetector` can name."""

    def saturation(self, candidates: Slots, fleet: Fleet, now: float) -> float:
        """0 = idle, 1 = full; above 1 where the limits are exceeded. `now` is monotonic seconds."""
        raise NotImplementedError(self.type)


class UtilizationDetector(SaturationDetector, type="utilization-detector"):
    """Full is an endpoint whose queue or KV cache is past a threshold, as last scraped.

    Saturation: mean over endpoints of max(waiting / queueDepthThreshold, usage / kvCacheUtilThreshold); an endpoint whose
    metrics are older than `metricsStalenessThreshold` counts as 1, and so does an empty fleet. Where a large fleet is
    scraped less often than that, three intervals count instead.
    As a filter: keeps endpoints below both thresholds (each raised by `headroom`), all of them where none is.
    Source: llm-d-router utilization-detector.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        queue_depth_threshold: Annotated[int, Meta(gt=0, description="Waiting requests that fill an endpoint.")] = 5
        kv_cache_util_threshold: Annotated[float, Meta(gt=0, le=1, description="KV usage that fills it, 0..1.")] = 0.8
        metrics_staleness_threshold: Annotated[Duration, Meta(description="Older metrics count as full.")] = 0.2
        headroom: Annotated[float, Meta(ge=0, description="By what share the filter's thresholds are higher.")] = 0.0

    parameters: Parameters

    def saturation(self, candidates: Slots, fleet: Fleet, now: float) -> float:
        if not len(candidates):
            return 1.0
        limits = self.parameters
        full = np.maximum(
            fleet.waiting[candidates] / limits.queue_depth_threshold,
            fleet.kv_usage[candidates] / limits.kv_cache_util_threshold,
        )
        limit = max(limits.metrics_staleness_threshold, PUNCTUAL * fleet.scrape_interval_s)
        stale = fleet.age(candidates, now) > limit
        return float(np.where(stale, 1.0, full).mean())

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        limits = self.parameters
        room = 1 + limits.headroom
        mask: Mask = (fleet.waiting[candidates] < limits.queue_depth_threshold * room) & (
            fleet.kv_usage[candidates] < limits.kv_cache_util_threshold * room
        )
        return mask if mask.any() else np.ones(len(candidates), np.bool_)


class ConcurrencyDetector(SaturationDetector, type="concurrency-detector"):
    """Full is an endpoint that this router has sent as much as it can take, by the router's own books.

    Saturation: what is in flight over what all endpoints take; `hybrid` is the mean over endpoints of the fuller of both.
    As a filter: keeps endpoints below their limit (raised by `headroom`), and none where all are full.
    Source: llm-d-router concurrency-detector.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        max_concurrency: Annotated[int, Meta(gt=0, description="Requests that fill an endpoint.")] = 100
        headroom: Annotated[float, Meta(ge=0, description="By what share the filter's limits are higher.")] = 0.0
        concurrency_mode: Annotated[Literal["requests", "tokens", "hybrid"], Meta(description="What is counted.")] = (
            "requests"
        )
        max_token_concurrency: Annotated[int, Meta(gt=0, description="Uncached tokens that fill an endpoint.")] = (
            1000000
        )
        in_flight_load_producer_name: Annotated[
            str | None, Meta(description="Whose count; there is one, the books.")
        ] = None

    parameters: Parameters

    def _full(self, candidates: Slots, fleet: Fleet) -> Vector:
        requests = fleet.in_flight[candidates] / self.parameters.max_concurrency
        tokens = fleet.in_flight_tokens[candidates] / self.parameters.max_token_concurrency
        match self.parameters.concurrency_mode:
            case "requests":
                return requests
            case "tokens":
                return tokens
            case "hybrid":
                return np.maximum(requests, tokens)

    def saturation(self, candidates: Slots, fleet: Fleet, now: float) -> float:
        return float(self._full(candidates, fleet).mean()) if len(candidates) else 1.0

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        return self._full(candidates, fleet) < 1 + self.parameters.headroom
