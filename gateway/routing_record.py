"""What is recorded of every routed request: how much was cached where, why it went there, and the last few of them.

All numbers are undiscounted: what the index holds, whatever the streams' trust makes of it. `best` looks at the endpoints
of the chosen one's role only, since a decode endpoint cannot use what a prefill endpoint holds. The match metrics are about
the endpoint that computes the prompt (the prefill endpoint of a hand-off), decisions about the one that answers.
"""

import collections
import time
from collections.abc import Callable

import msgspec
import numpy as np

from fleet.fleet import Fleet
from fleet.request import Request
from gateway.cycle import Decision
from gateway.decision_reason import reason_of
from gateway.matching import Found, Keys
from gateway.metrics import Metrics

KEPT = 64


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """One decision for people; tokens are -1 where nothing was matched."""

    at: float
    """Unix seconds."""
    request_id: str
    model: str
    endpoint: str
    rank: int
    prefill: str | None
    """The endpoint that computes the prompt for it."""
    prompt_tokens: int
    best_tokens: int
    chosen_tokens: int
    reason: str
    verdicts: dict[str, str]
    """Profile -> what its decider said."""


class RoutingRecord:
    """Counts decisions and keeps the last. The event loop's thread owns it."""

    def __init__(self, fleet: Fleet, metrics: Metrics, kept: int = KEPT) -> None:
        self._fleet, self._metrics = fleet, metrics
        self._last: collections.deque[Routed] = collections.deque(maxlen=kept)
        self.on_matched: Callable[[int, int, int, int], None] | None = None
        """Also told of every matched request: slot, prompt tokens, best and chosen match in tokens. Twice where the prompt is
        computed elsewhere: for the destination, and for the prefill endpoint."""

    def add(self, request: Request, decision: Decision, found: Found | None, keys: Keys | None) -> None:
        """A request goes where `decision` says; `found` and `keys` are what was matched, None where nothing was."""
        slot = decision.slots[0]
        endpoint = self._fleet.endpoint(slot)
        best: int | None = None
        chosen = 0
        if found is not None and keys is not None and request.prompt_tokens:
            best, chosen = self._matched(slot, found, keys, request)
            if decision.prefill is None or decision.prefill == slot:
                self._observe(endpoint.address, best, chosen, request.prompt_tokens)
            else:  # what the prefill endpoint holds is what is not computed again
                there = self._matched(decision.prefill, found, keys, request)
                self._observe(self._fleet.endpoint(decision.prefill).address, *there, request.prompt_tokens)
        reason = reason_of(len(decision.runs[decision.primary].candidates), best, chosen)
        self._metrics.decisions.labels(endpoint.address, reason).inc()
        self._last.append(
            Routed(
                at=time.time(),
                request_id=request.id,
                model=request.target_model,
                endpoint=endpoint.name,
                rank=endpoint.rank,
                prefill=None if decision.prefill is None else self._fleet.endpoint(decision.prefill).name,
                prompt_tokens=request.prompt_tokens,
                best_tokens=-1 if best is None else best,
                chosen_tokens=-1 if best is None else chosen,
                reason=reason,
                verdicts={name: verdict.reason for name, (_, verdict) in decision.verdicts.items()},
            )
        )

    def _matched(self, slot: int, found: Found, keys: Keys, request: Request) -> tuple[int, int]:
        """Tokens of the best endpoint of this one's role, and its own."""
        same = self._fleet.role_mask({self._fleet.endpoint(slot).role})
        chosen = found.predicted(slot, keys)
        holds_most = int(np.where(same, found.raw_tokens, -1.0).argmax())
        best = max(chosen, found.predicted(holds_most, keys))
        if self.on_matched is not None:
            self.on_matched(slot, request.prompt_tokens, best, chosen)
        return best, chosen

    def _observe(self, address: str, best: int, chosen: int, prompt_tokens: int) -> None:
        for which, tokens in (("best", best), ("chosen", chosen)):
            self._metrics.match_tokens.labels(which).observe(tokens)
            self._metrics.match_fraction.labels(address, which).observe(tokens / prompt_tokens)

    def last(self) -> list[Routed]:
        """The newest first."""
        return list(reversed(self._last))
