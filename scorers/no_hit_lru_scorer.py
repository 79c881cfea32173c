from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Plugin, Scorer
from fleet.request import Request


class NoHitLRUScorer(Scorer, type="no-hit-lru-scorer"):
    """Spread prompts that nobody has cached: the endpoint that got one longest ago is best.

    Cold prompts are what fills caches; without this they follow the load scorers and may all grow one endpoint's cache.
    Reads: the match of `prefixMatchInfoProducerName`; remembers which endpoints got cold prompts.
    Score: 0.5 for all where any candidate has a match. Else endpoints that never got one come first, then the others from
    the least recently used on, evenly spaced from 1 down to 0.
    Source: llm-d-router no-hit-lru-scorer, same formula.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        lru_size: Annotated[int, Meta(description="Endpoints remembered; 0 or less means 1024.")] = 1024
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None
        prefix_plugin_type: Annotated[str | None, Meta(description="Accepted and not used.")] = None
        prefix_plugin_name: Annotated[str | None, Meta(description="Accepted and not used.")] = None

    parameters: Parameters

    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self._used: OrderedDict[int, None] = OrderedDict()  # slots, least recently used first
        self._fleet: Fleet | None = None

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        count = len(candidates)
        if self._warm(request, candidates):
            return np.full(count, 0.5)
        if count == 1:
            return np.ones(1)
        slots = candidates.tolist()
        among = set(slots)
        order = [slot for slot in slots if slot not in self._used] + [slot for slot in self._used if slot in among]
        rank = {slot: position for position, slot in enumerate(order)}
        return np.maximum(0.0, 1.0 - np.array([rank[slot] for slot in slots]) / (count - 1))

    def picked(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> None:
        if fleet is not self._fleet:
            fleet.tell_of_released(self._forget)
            self._fleet = fleet
        if self._warm(request, fleet.slots()):
            return
        for profile, slots in picks.items():
            if profile != "encode" and len(slots):
                self._used[int(slots[0])] = None
                self._used.move_to_end(int(slots[0]))
        most = self.parameters.lru_size if self.parameters.lru_size > 0 else 1024
        while len(self._used) > most:
            self._used.popitem(last=False)

    def take_over(self, old: Plugin) -> None:
        if isinstance(old, NoHitLRUScorer) and old._fleet is not None:
            self._used, self._fleet = old._used, old._fleet
            self._fleet.tell_of_released(self._forget)

    def _forget(self, slot: int) -> None:
        self._used.pop(slot, None)

    def _warm(self, request: Request, slots: Slots) -> bool:
        match = request.match(self.parameters.prefix_match_info_producer_name)
        return match is not None and bool((match.tokens_at(slots) > 0).any())
