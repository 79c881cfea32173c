"""The last decisions, kept by reference: arrays as the cycle left them, turned into words only when somebody asks.

Bounded twice: by number, and by giving up what a decision does not need to be explained (a prompt's block keys).
"""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Request
from gateway.burst_room import Assigned
from gateway.cycle import Decision, Rejection
from gateway.explain import explain, header_text
from gateway.extproc.decision import Decided, Rejected
from gateway.matching import Found
from scorers.expected_work_scorer import ExpectedWorkScorer, Work

KEPT = 256
HEADER = "x-warmroute-explain"
IN_HEADER = 8
"""Candidates per profile in a response header."""
MOST_TRUSTED = 64
"""Endpoints with a match whose trust is remembered with a decision."""


class Names(msgspec.Struct, frozen=True):
    """The fleet of one generation; shared by all decisions made in it."""

    endpoints: dict[int, Endpoint]

    def endpoint(self, slot: int) -> Endpoint:
        return self.endpoints[slot]


class Kept(msgspec.Struct, frozen=True):
    """One decision, as it was made."""

    at: float
    """Unix seconds."""
    request: Request
    outcome: Decision | Rejection
    names: Names
    trust: Mapping[int, object]
    work: Mapping[str, Work]
    assigned: Mapping[str, Assigned] = {}

    def told(self, most: int | None = None) -> dict[str, Any]:
        """See `gateway.explain`."""
        return {"at": self.at} | explain(
            self.request,
            self.outcome,
            self.names,
            trust=self.trust,
            work=self.work,
            most=most,
            assigned=self.assigned,
        )


def with_explanation(headers: Mapping[str, str], kept: Kept, answer: Decided | Rejected) -> Decided | Rejected:
    """The answer, with the explanation in a response header where the client asked for it (`x-warmroute-explain: 1`)."""
    if headers.get(HEADER, "").strip() != "1":
        return answer
    added = {HEADER: header_text(kept.told(IN_HEADER))}
    if isinstance(answer, Rejected):
        return msgspec.structs.replace(answer, headers={**answer.headers, **added})
    return msgspec.structs.replace(answer, response_headers={**answer.response_headers, **added})


class DecisionLog:
    """Keeps decisions while `pricing` and the fleet are what they were. The event loop's thread owns it."""

    def __init__(self, fleet: Fleet, trust: Callable[[int], object], kept: int = KEPT) -> None:
        self.pricing: ExpectedWorkScorer | None = None
        """Whose work is remembered; set again when the configuration changes."""
        self._fleet, self._trust = fleet, trust
        self._kept: collections.deque[Kept] = collections.deque(maxlen=kept)
        self._names = Names({})
        self._names_of = -1

    def keep(
        self,
        request: Request,
        outcome: Decision | Rejection,
        found: Found | None,
        assigned: Mapping[str, Assigned] | None = None,
    ) -> Kept:
        """Remember a decision; to be called before the books are charged with it."""
        slots = set(np.flatnonzero(found.raw_tokens)[:MOST_TRUSTED].tolist()) if found is not None else set()
        for run in outcome.runs.values():
            slots.update((*run.picked.tolist(), *run.candidates[:MOST_TRUSTED].tolist()))
        matches = {name: msgspec.structs.replace(match, keys=()) for name, match in request.matches.items()}
        kept = Kept(
            at=time.time(),
            request=msgspec.structs.replace(request, matches=matches),
            outcome=outcome,
            names=self._who(),
            trust={slot: self._trust(slot) for slot in slots if slot in self._fleet},
            work=self._work(request, outcome),
            assigned=assigned or {},
        )
        self._kept.append(kept)
        return kept

    def find(self, request_id: str) -> Kept | None:
        """The last decision of a request."""
        return next((kept for kept in reversed(self._kept) if kept.request.id == request_id), None)

    def last(self, count: int) -> list[Kept]:
        """The newest first."""
        return [kept for kept, _ in zip(reversed(self._kept), range(count), strict=False)]

    def __len__(self) -> int:
        return len(self._kept)

    def _who(self) -> Names:
        if self._names_of != self._fleet.generation:
            self._names_of = self._fleet.generation
            self._names = Names({int(slot): self._fleet.endpoint(int(slot)) for slot in self._fleet.slots()})
        return self._names

    def _work(self, request: Request, outcome: Decision | Rejection) -> dict[str, Work]:
        if self.pricing is None or not request.prompt_tokens:
            return {}
        pricing = self.pricing
        return {
            name: pricing.work(request, run.candidates, self._fleet)
            for name, run in outcome.runs.items()
            if len(run.candidates)
        }
