from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.plugin import Filter, Lookup
from fleet.request import Request
from scorers.inflight_load_producer import bound


class Condition(plugin.Parameters, frozen=True, kw_only=True):
    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: float


class UtilizationFilter(Filter, type="utilization-filter"):
    """Keep endpoints whose load is under a limit, whatever the scores say.

    Use it as a guard before affinity: nobody queues behind an endpoint that is already full.
    Reads: active-requests from the books; running-requests, waiting-queue, kv-cache-utilization (0..1) as last scraped. What
    was never scraped counts as 0.
    Source: llm-d-router utilization-filter.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        conditions: Annotated[
            tuple[Condition, ...], Meta(min_length=1, description="All must hold: metric <= maxValue.")
        ]
        fallback_on_empty: Annotated[bool, Meta(description="Keep all where none would be left.")] = False
        in_flight_load_producer_name: Annotated[str | None, Meta(description="Must exist where it is given.")] = None

    parameters: Parameters

    def bind(self, lookup: "Lookup[Any]") -> None:
        bound(lookup, self.parameters.in_flight_load_producer_name)

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        mask = np.ones(len(candidates), np.bool_)
        columns: dict[str, Vector] = {
            "active-requests": fleet.in_flight,
            "running-requests": fleet.running,
            "waiting-queue": fleet.waiting,
            "kv-cache-utilization": fleet.kv_usage,
        }
        for condition in self.parameters.conditions:
            mask &= columns[condition.metric][candidates] <= condition.max_value
        if self.parameters.fallback_on_empty and not mask.any():
            return np.ones(len(candidates), np.bool_)
        return mask
