"""Why a request went where it went, as plain data: made from what the cycle kept, only when somebody asks."""

from typing import Any

from fleet.fleet import Fleet
from fleet.request import Request
from gateway.cycle import Decision, Rejection, Run


def explain(request: Request, outcome: Decision | Rejection, fleet: Fleet) -> dict[str, Any]:
    """JSON-ready. Endpoints appear by name; every candidate of every profile says what removed it or what it scored."""
    answer: dict[str, Any] = {
        "request": request.id,
        "model": request.target_model,
        "promptTokens": request.prompt_tokens,
        "profiles": {name: _run(run, request, fleet) for name, run in outcome.runs.items()},
    }
    if isinstance(outcome, Rejection):
        return answer | {"rejected": {"status": outcome.status, "reason": outcome.reason, "message": outcome.message}}
    return answer | {
        "primary": outcome.primary,
        "endpoints": [_name(slot, fleet) for slot in outcome.slots],
        "destinations": list(outcome.destinations),
        "headers": dict(outcome.headers),
        "deciders": {
            profile: {
                "decider": decider,
                "disaggregate": verdict.disaggregate,
                "reason": verdict.reason,
                "numbers": verdict.numbers,
            }
            for profile, (decider, verdict) in outcome.verdicts.items()
        },
    }


def _run(run: Run, request: Request, fleet: Fleet) -> dict[str, Any]:
    removed = {
        _name(slot, fleet): filter_name for filter_name, given, kept in run.filtered for slot in given[~kept].tolist()
    }
    candidates = []
    order = sorted(range(len(run.candidates)), key=lambda index: -run.totals[index])
    for index in order:
        slot = int(run.candidates[index])
        candidates.append(
            {
                "endpoint": _name(slot, fleet),
                "total": float(run.totals[index]),
                "scores": {name: {"score": float(it[index]), "weight": weight} for name, weight, it in run.scores},
                "cachedTokens": {
                    producer: float(match.tokens_at(run.candidates[[index]])[0])
                    for producer, match in request.matches.items()
                },
            }
        )
    return {
        "picked": [_name(slot, fleet) for slot in run.picked.tolist()],
        "candidates": candidates,
        "removed": removed,
    }


def _name(slot: int, fleet: Fleet) -> str:
    endpoint = fleet.endpoint(slot)
    return endpoint.name if not endpoint.rank else f"{endpoint.name} rank {endpoint.rank}"
