"""What is recorded of every routed request: how much was cached where, why it went there, and the last few of them.

All numbers are undiscounted: what the index holds, whatever the streams' trust makes of it. `best` looks at the endpoints
of the chosen one's role only, since a decode endpoint cannot use what a prefill endpoint holds.
"""

import collections
import time

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

    def add(self, request: Request, decision: Decision, found: Found | None, keys: Keys | None) -> None:
        """A request goes where `decision` says; `found` and `keys` are what was matched, None where nothing was."""
        slot = decision.slots[0]
        endpoint = self._fleet.endpoint(slot)
        best: int | None = None
        chosen = 0
        if found is not None and keys is not None and request.prompt_tokens:
            same = self._fleet.role_mask({endpoint.role})
            chosen = found.predicted(slot, keys)
            best = max(chosen, found.predicted(int(np.where(same, found.raw_tokens, 0.0).argmax()), keys))
            fraction = self._metrics.match_fraction
            self._metrics.match_tokens.labels("best").observe(best)
            self._metrics.match_tokens.labels("chosen").observe(chosen)
            fraction.labels(endpoint.address, "best").observe(best / request.prompt_tokens)
            fraction.labels(endpoint.address, "chosen").observe(chosen / request.prompt_tokens)
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

    def last(self) -> list[Routed]:
        """The newest first."""
        return list(reversed(self._last))
