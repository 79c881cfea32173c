from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.extremes import largest
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Lookup, Scorer
from fleet.request import Request
from scorers.inflight_load_producer import bound


class ActiveRequestScorer(Scorer, type="active-request-scorer"):
    """Prefer endpoints to which this router has fewer requests in flight.

    The load scorer that is never stale: it counts at decision time, so a burst spreads even between two scrapes.
    Reads: `fleet.in_flight`, requests, from the books.
    Score: 1 up to `idleThreshold` requests, else (most - count) / most * `maxBusyScore`, most over the candidates.
    Source: llm-d-router active-request-scorer, same formula.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        idle_threshold: Annotated[
            int, Meta(description="Requests up to which an endpoint counts as idle; below 0 means 0.")
        ] = 0
        max_busy_score: Annotated[float, Meta(description="Best score of a busy endpoint; outside 0..1 means 1.")] = 1.0
        in_flight_load_producer_name: Annotated[str | None, Meta(description="Must exist where it is given.")] = None
        request_timeout: Annotated[str | None, Meta(description="Accepted and not used: the books have one.")] = None

    parameters: Parameters

    def bind(self, lookup: "Lookup[Any]") -> None:
        bound(lookup, self.parameters.in_flight_load_producer_name)

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        count = fleet.in_flight[candidates]
        most = largest(count)
        idle = max(self.parameters.idle_threshold, 0)
        if most <= idle:
            return np.ones(len(count))
        best = self.parameters.max_busy_score
        if not 0.0 <= best <= 1.0:
            best = 1.0
        busy: Vector = (most - count) / most
        if best != 1.0 or idle:  # else an idle endpoint has 1 by the formula
            busy *= best
            busy[count <= idle] = 1.0
        return busy
