"""Nearness to the endpoint that another profile picked, so that a KV transfer stays short.

Endpoints tell where they are by labels; a topology-extractor names the labels. The peer is `request.peer`, the slot that the
cycle has picked before (decode, for a prefill profile).
"""

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.plugin import Filter, Lookup, Plugin, Scorer
from fleet.request import Request

LEVELS = ("host", "rack", "zone", "region")
"""Closest first."""
DEFAULT_LABELS = (
    "kubernetes.io/hostname",
    "topology.kubernetes.io/rack",
    "topology.kubernetes.io/zone",
    "topology.kubernetes.io/region",
)
SCORES = np.array([1.0, 0.20, 0.05, 0.02, 0.0])
FAR = len(LEVELS)


class _Topology(Plugin):
    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self.labels: tuple[str, ...] = DEFAULT_LABELS

    def bind(self, lookup: "Lookup[Any]") -> None:
        name: str | None = getattr(self.parameters, "topology_producer_name", None)
        try:
            extractor = lookup(name or "topology-extractor", Plugin)
        except LookupError:
            if name:
                raise
            return  # without one, the usual labels of Kubernetes nodes
        self.labels = tuple(
            getattr(extractor.parameters, field, usual)
            for field, usual in zip(("hostname", "rack", "zone", "region"), DEFAULT_LABELS, strict=True)
        )

    def distance(
        self, request: Request, candidates: Slots, fleet: Fleet
    ) -> "np.ndarray[Any, np.dtype[np.intp]] | None":
        """Per candidate the closest level it shares with the peer, 0 = host .. 4 = none; None without a peer."""
        if request.peer is None or request.peer not in fleet:
            return None
        near = np.full(len(candidates), FAR, np.intp)
        peer = fleet.endpoint(request.peer).labels
        for level in reversed(range(len(LEVELS))):
            place, label = peer.get(self.labels[level]), self.labels[level]
            if place:
                near[self._there(label, place, fleet)[candidates]] = level
        return near

    def _there(self, label: str, place: str, fleet: Fleet) -> Mask:
        return fleet.mask_of(("place", label, place), lambda endpoint: endpoint.labels.get(label) == place)


class TopologyAffinityScorer(_Topology, Scorer, type="topology-affinity-scorer"):
    """Prefer endpoints close to the one that another profile picked.

    Use it in the prefill profile, so that the KV cache travels a short way to the decode endpoint.
    Reads: host, rack, zone and region labels (of the `topology-extractor`, by default Kubernetes' own), the earlier pick.
    Score: 1 on the same host, 0.20 in the same rack, 0.05 in the zone, 0.02 in the region, else 0; 0 without a pick before.
    Source: llm-d-router topology-affinity-scorer.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        topology_producer_name: Annotated[str | None, Meta(description="The topology-extractor to use.")] = None

    parameters: Parameters

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        near = self.distance(request, candidates, fleet)
        return np.zeros(len(candidates)) if near is None else SCORES[near]


class TopologyAffinityFilter(_Topology, Filter, type="topology-affinity-filter"):
    """Keep endpoints at least as close as `minAffinity` to the one that another profile picked.

    Keeps all where there is no earlier pick or nobody is that close.
    Source: llm-d-router topology-affinity-filter.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        min_affinity: Annotated[Literal["host", "rack", "zone", "region"], Meta(description="How close.")] = "host"
        topology_producer_name: Annotated[str | None, Meta(description="The topology-extractor to use.")] = None

    parameters: Parameters

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        near = self.distance(request, candidates, fleet)
        if near is None:
            return np.ones(len(candidates), np.bool_)
        mask: Mask = near <= LEVELS.index(self.parameters.min_affinity)
        return mask if mask.any() else np.ones(len(candidates), np.bool_)
