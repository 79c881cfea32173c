"""Expected work before a request's first token, in seconds.

For endpoint i, a prompt with h tokens cached there (or on their way there) and n not:

    w  = a*n + q*n*(h + n/2)                              own work
    B  = sum of w over our requests on i without a first token - progress of the oldest of them
    K0 = B + (1 + b0 + b1 * min over the candidates of B) * w

With a decode factor s >= 1 per endpoint (running decodes slow a prefill down) both B and w are multiplied by it. An endpoint
with speed factor f needs 1/f of the time.
"""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.endpoint import Endpoint
from fleet.extremes import largest, smallest
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Scorer
from fleet.request import Request
from fleet.reservation import Leg
from fleet.work import PrefillCost, Progress, cached_tokens

TIE_IN_FLIGHT_S = 1e-6
"""Added per request in flight: breaks ties and is too small to overrule work."""
TIE_RECENCY_S = 1e-9
"""Range over which candidates are spread from the least to the most recently chosen; smaller than the tie above."""
_ONE, _TIE_IN_FLIGHT_S = np.array(1.0), np.array(TIE_IN_FLIGHT_S)
"""As arrays: on a few endpoints turning a float into one costs as much as the arithmetic."""


class DecodeFactor(plugin.Parameters, frozen=True, kw_only=True):
    """How much the decodes that run on an endpoint slow a prefill there; times of one engine step, in milliseconds."""

    fixed_ms: Annotated[float, Meta(ge=0, description="Any decode at all.")] = 0.57
    per_context_token_ms: Annotated[float, Meta(ge=0, description="Per prompt token of the decoding requests.")] = (
        4.15e-5
    )
    per_request_ms: Annotated[float, Meta(ge=0, description="Per decoding request.")] = 0.0041
    overhead_ms: Annotated[float, Meta(ge=0, description="Every step.")] = 1.16
    full_step_ms: Annotated[float, Meta(gt=0, description="Linear layers of a step of 8,192 tokens.")] = 154.0

    def __call__(self, fleet: Fleet, candidates: Slots) -> Vector:
        decoding = fleet.decoding[candidates]
        decode_ms = self.fixed_ms * (decoding > 0) + self.per_request_ms * decoding
        decode_ms += self.per_context_token_ms * fleet.decode_tokens[candidates] + self.overhead_ms
        share: Vector = (1.0 + 0.5 * decode_ms / self.full_step_ms) * (8192.0 / (8192.0 - np.minimum(decoding, 256.0)))
        return share


class Work(msgspec.Struct, frozen=True):
    """What the score was made of, per candidate; seconds but for `cached`. For the queue and for explaining a decision."""

    cached: Vector
    """Tokens of the prompt that are there or on their way."""
    own: Vector
    """w: this request's own prefill."""
    backlog: Vector
    """B: what is owed to others first; without decode factor."""
    expected: Vector
    """K0 with tie-breaks: the smallest is best."""


def ties(slots: Slots, fleet: Fleet) -> Vector:
    """What is added to expected work so that equal endpoints differ: requests in flight, then how recently it was chosen."""
    chosen = fleet.chosen_at[slots]
    oldest = smallest(chosen)
    recency = TIE_RECENCY_S / (largest(chosen) - oldest + 1.0)
    added: Vector = _TIE_IN_FLIGHT_S * fleet.in_flight[slots] + recency * (chosen - oldest)
    return added


class ExpectedWorkScorer(Scorer, type="expected-work-scorer"):
    """Send a request where the least work stands before its first token.

    Each prompt is priced in seconds of prefill: what an endpoint still owes on prompts this router gave it, plus the part of
    this prompt that is neither cached there nor already being computed there. A prompt's own work counts one and a half
    times, and three times more for every second that even the freest candidate is behind: with room to spare traffic
    spreads, without it traffic stays where its cache is. No other scorer is needed beside it.
    Reads: the books, the prompts on their way, the match of `prefixMatchInfoProducerName`.
    Score: 1 / (1 + K - min K), K in seconds as at the top of this module: the smallest work scores 1, one second more 0.5,
    and the order is K's own. Ties go to fewer requests in flight, then to the endpoint chosen longest ago.
    `a` and `q` belong to model and hardware: the defaults are an 8B model on an H100, `models` overrides them by model name;
    a factor of two off costs a few percent. `progress: clock` assumes that no other router uses the endpoints; use `none`
    where several do without exchanging books, `events` where `a` and `q` are guesses.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        a: Annotated[float, Meta(gt=0, description="Seconds of prefill per uncached token.")] = 18.8e-6
        q: Annotated[float, Meta(ge=0, description="Seconds of prefill per pair of tokens (attention).")] = 8.74e-10
        b0: Annotated[float, Meta(ge=0, description="Extra weight of a request's own work.")] = 0.5
        b1: Annotated[float, Meta(ge=0, description="More of it per second that the freest candidate is behind.")] = 3.0
        progress: Annotated[Progress, Meta(description="How the running prefill's progress is known.")] = "clock"
        decode_factor: Annotated[
            DecodeFactor | None,
            Meta(description="Let running decodes make prefill dearer; off unless given ({} for 8B)."),
        ] = None
        speed_factors: Annotated[
            dict[str, float], Meta(description="Endpoint name or ip:port -> speed; 0.5 is half as fast.")
        ] = msgspec.field(default_factory=dict)
        models: Annotated[dict[str, PrefillCost], Meta(description="Model name -> its own a and q.")] = msgspec.field(
            default_factory=dict
        )
        prefix_match_info_producer_name: Annotated[
            str | None, Meta(description="Whose match to read; without it the default producer's.")
        ] = None

        def __post_init__(self) -> None:
            for name, factor in self.speed_factors.items():
                if not factor > 0:
                    raise ValueError(f"speedFactors[{name!r}]: expected a number above 0, got {factor:g}")

    parameters: Parameters

    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self._cost = PrefillCost(a=self.parameters.a, q=self.parameters.q)

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        expected = self.work(request, candidates, fleet).expected
        score: Vector = _ONE / (_ONE + (expected - smallest(expected)))
        return score

    def work(self, request: Request, candidates: Slots, fleet: Fleet) -> Work:
        """K0 and its parts. `candidates` must not be empty."""
        settings = self.parameters
        now = fleet.clock()
        cached = cached_tokens(request, candidates, fleet, settings.prefix_match_info_producer_name)
        own = self.own(request, cached, candidates, fleet)
        backlog = first = self.backlog(request.target_model, candidates, fleet, now)
        mine = own
        if settings.decode_factor is not None:
            factor = settings.decode_factor(fleet, candidates)
            first, mine = backlog * factor, own * factor
        expected = first + (1.0 + settings.b0 + settings.b1 * smallest(first)) * mine
        expected += ties(candidates, fleet)
        if fleet.kept is not None and not (kept := fleet.kept[candidates]).all():
            expected[kept] = np.inf
        return Work(cached, own, backlog, expected)

    def own(self, request: Request, cached: Vector, slots: Slots, fleet: Fleet) -> Vector:
        """w: seconds of prefill that the request costs on each of `slots`, given the tokens it finds cached there."""
        own = self.cost(request.target_model).of_prompt(float(request.prompt_tokens), cached)
        return own * self._slowness_of(slots, fleet) if self.parameters.speed_factors else own

    def backlog(self, model: str, slots: Slots, fleet: Fleet, now: float) -> Vector:
        """B: seconds of prefill owed to requests sent before, without decode factor."""
        slowness = fleet.vector_of(self, self._slowness) if self.parameters.speed_factors else None
        return self.cost(model).backlog(fleet, slots, now, self.parameters.progress, slowness)

    def prefill_s(self, leg: Leg, fleet: Fleet) -> float:
        """How long a reservation's prefill takes where it is."""
        took = self.cost(leg.model).seconds(np.array([leg.uncached]), np.array([leg.cached]))
        if self.parameters.speed_factors:
            took *= self._slowness_of(np.array([leg.slot]), fleet)
        return float(took[0])

    def cost(self, model: str) -> PrefillCost:
        """The constants for a model."""
        return self.parameters.models.get(model, self._cost)

    def _slowness_of(self, slots: Slots, fleet: Fleet) -> Vector:
        return fleet.vector_of(self, self._slowness)[slots]

    def _slowness(self, endpoint: Endpoint) -> float:
        factors = self.parameters.speed_factors
        return 1.0 / factors.get(endpoint.name, factors.get(endpoint.address, 1.0))
