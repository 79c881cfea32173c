from typing import Annotated, Any

from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Producer
from fleet.request import Request

NAME = "inflight-load-producer"


class InFlightLoadProducer(Producer, type=NAME):
    """What this router has in flight: requests and tokens per endpoint.

    The books are kept anyway; this plugin says how tokens are counted. Without output estimates a request weighs its
    uncached prompt tokens until its first token; with them it weighs prompt and estimated answer until it ends.
    Reads: `fleet.in_flight`, `fleet.in_flight_tokens`, `fleet.reserved_tokens`.
    Source: llm-d-router inflight-load-producer. `syncCrossReplicaState` is accepted; what other routers feed into the books
    is always counted.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        add_estimated_output_tokens: Annotated[bool, Meta(description="Count the answer too, until it ends.")] = False
        output_ratio: Annotated[float, Meta(description="Estimated output tokens per prompt token.")] = 1.5
        max_estimated_output_tokens: Annotated[int | None, Meta(description="Upper limit of that estimate.")] = None
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match says what is uncached; without it the default producer's.")
        ] = None
        sync_cross_replica_state: Annotated[bool, Meta(description="Accepted; always on.")] = True

        def __post_init__(self) -> None:
            if self.output_ratio < 0:
                raise ValueError("outputRatio must not be negative")

    parameters: Parameters

    def produce(self, request: Request, fleet: Fleet) -> None:
        if self.parameters.add_estimated_output_tokens and not request.expected_output_tokens:
            estimate = int(request.prompt_tokens * self.parameters.output_ratio)
            most = self.parameters.max_estimated_output_tokens
            request.expected_output_tokens = estimate if most is None else min(estimate, most)

    def tokens(self, candidates: Slots, fleet: Fleet) -> Vector:
        """Tokens in flight on each candidate, counted as configured."""
        column = fleet.reserved_tokens if self.parameters.add_estimated_output_tokens else fleet.in_flight_tokens
        return column[candidates]

    def own_tokens(self, request: Request, candidates: Slots) -> Vector | float:
        """What this request would add on each candidate."""
        match = request.match(self.parameters.prefix_match_info_producer_name)
        own = float(request.prompt_tokens)
        if self.parameters.add_estimated_output_tokens:
            own += request.reply_tokens(0)
        return own if match is None else own - match.tokens_at(candidates)


def bound(lookup: "plugin.Lookup[Any]", name: str | None) -> InFlightLoadProducer:
    """The named instance (LookupError where there is none), or the default one, which exists even if nobody declared it."""
    if name:
        found: InFlightLoadProducer = lookup(name, InFlightLoadProducer)
        return found
    try:
        declared: InFlightLoadProducer = lookup(NAME, InFlightLoadProducer)
    except LookupError:
        return default()
    return declared


def default() -> InFlightLoadProducer:
    """An instance with no parameters set."""
    return InFlightLoadProducer(NAME, InFlightLoadProducer.Parameters())
