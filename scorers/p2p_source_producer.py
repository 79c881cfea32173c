from collections.abc import Mapping
from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Hint, Producer
from fleet.request import Request

CACHE_SOURCE = "x-kv-cache-source-host-port"
_NOBODY: Slots = np.empty(0, np.intp)


class P2PSourceProducer(Producer, type="p2p-source-producer"):
    """Name an endpoint that holds more of the prompt than the one that computes it, so that its KV blocks can be pulled.

    Use it where the engines or their sidecars read the header `x-kv-cache-source-host-port` and can load KV blocks from each
    other: load may then overrule affinity without the prefix being computed again. Where a request goes is decided before;
    scores, books and the queue count its prompt as uncached there.

    The computing endpoint is the first pick of `prefillProfileName`, or the destination where that profile picked nobody.
    A source is any other address among the endpoints that the request could have gone to: they serve its model, a subset
    hint allows them, they are healthy, their breaker is closed and they are not draining. Filters of profiles do not matter,
    since a decode endpoint may well feed a prefill endpoint. Of a source only those tokens count that an exact event stream
    has announced, because a degraded stream's or a merely predicted block may not be there to be pulled; of an approximate
    producer, which has no streams, all do. Tiers are not weighed. Of the sources that hold at least `minCachedTokenDelta`
    tokens more than the computing endpoint, those within one block of the best are drawn from, each with weight
    1 / (1 + waiting requests).

    The header is absent where nobody holds enough more. A client can never set it. It stays right when Envoy goes on to a
    fallback endpoint, unless that is the source itself, which is then told to pull from itself. With
    `warmroute.handoff.mode: gateway` it goes to the prefill leg and not to the decode leg. The cached tokens that an engine
    reports for such a request include what it pulled, so they are not compared with the prediction.
    Outcomes, in `warmroute_request_hints_total` and in explain: named, no_better, no_match (the prompt was not matched).
    Source: llm-d-router p2p-source-producer; which sources are trusted is ours.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None
        min_cached_token_delta: Annotated[
            int, Meta(ge=1, description="Tokens that a source must hold beyond the computing endpoint.")
        ] = 1
        prefill_profile_name: Annotated[
            str,
            Meta(min_length=1, description="Profile whose pick computes the prompt, where there is such a profile."),
        ] = "prefill"

    parameters: Parameters

    def __init__(self, name: str, parameters: Parameters) -> None:
        super().__init__(name, parameters)
        self.rng = np.random.default_rng()

    def request_headers(
        self, request: Request, picks: Mapping[str, Slots], primary: str, candidates: Slots, fleet: Fleet
    ) -> Hint:
        match = request.match(self.parameters.prefix_match_info_producer_name)
        if match is None:
            return Hint(outcome="no_match")
        prefill = picks.get(self.parameters.prefill_profile_name, _NOBODY)
        computing = (prefill if len(prefill) else picks[primary])[:1]
        held = float(match.tokens_at(computing)[0])

        sources = candidates[self._usable(candidates, int(computing[0]), fleet)]
        tokens = match.announced_at(sources)
        most = float(tokens.max(initial=0.0))
        if most < held + self.parameters.min_cached_token_delta:
            return Hint(outcome="no_better", numbers={"computing_tokens": held, "best_tokens": most})

        near = tokens >= max(held + self.parameters.min_cached_token_delta, most - match.block_tokens)
        sources, tokens = sources[near], tokens[near]
        weights = 1.0 / (1.0 + fleet.waiting[sources])
        chosen = int(self.rng.choice(len(sources), p=weights / weights.sum()))
        slot = int(sources[chosen])
        return Hint(
            outcome="named",
            headers={CACHE_SOURCE: fleet.endpoint(slot).address},
            endpoint=slot,
            numbers={
                "computing_tokens": held,
                "source_tokens": float(tokens[chosen]),
                "waiting": float(fleet.waiting[slot]),
                "sources": float(len(sources)),
            },
        )

    @staticmethod
    def _usable(candidates: Slots, computing: int, fleet: Fleet) -> Mask:
        """Per candidate whether it can feed the computing endpoint."""
        # The header names an address: another rank at the same one cannot be told from the computing endpoint.
        address = fleet.endpoint(computing).address
        same = fleet.mask_of(("address", address), lambda endpoint: endpoint.address == address)
        # Where nobody is healthy the candidates are everybody.
        able = fleet.healthy & ~fleet.tripped & ~fleet.draining & ~same
        usable: Mask = able[candidates]
        return usable
