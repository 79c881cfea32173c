"""Why a request went where it went, as plain data: made from what the cycle kept, only when somebody asks."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from fleet.endpoint import Endpoint
from fleet.request import Request
from gateway.burst_room import Assigned
from gateway.cycle import Decision, Rejection, Run
from scorers.expected_work_scorer import Work

MOST_BYTES = 4096
"""Of an explanation in a response header: proxies on the way have limits of their own, 8 KB and more for all headers."""


class Endpoints(Protocol):
    """Who the slots were when the decision was made."""

    def endpoint(self, slot: int) -> Endpoint: ...


def explain(
    request: Request,
    outcome: Decision | Rejection,
    fleet: Endpoints,
    *,
    trust: Mapping[int, object] | None = None,
    work: Mapping[str, Work] | None = None,
    most: int | None = None,
    assigned: Mapping[str, Assigned] | None = None,
) -> dict[str, Any]:
    """JSON-ready. Endpoints appear by name; every candidate of every profile says what removed it or what it scored.

    `trust`: by slot, how far its match was believed. `work`: by profile, what expected-work-scorer made of its candidates.
    `assigned`: by burst producer, where its window wanted the request.
    `most`: candidates and removed endpoints shown per profile, the best first; None shows all.
    """
    answer: dict[str, Any] = {
        "request": request.id,
        "model": request.target_model,
        "promptTokens": request.prompt_tokens,
        "rewritesHistory": request.rewrites_history,
        "fairnessId": request.fairness_id,
        "profiles": {
            name: _run(run, request, fleet, trust or {}, (work or {}).get(name), most)
            for name, run in outcome.runs.items()
        },
    }
    answer["deciders"] = {
        profile: {
            "decider": decider,
            "disaggregate": verdict.disaggregate,
            "reason": verdict.reason,
            "numbers": {name: float(number) for name, number in verdict.numbers.items()},
        }
        for profile, (decider, verdict) in outcome.verdicts.items()
    }
    if assigned:
        answer["bursts"] = {producer: _burst(it) for producer, it in assigned.items()}
    if isinstance(outcome, Rejection):
        return answer | {"rejected": {"status": outcome.status, "reason": outcome.reason, "message": outcome.message}}
    return answer | {
        "primary": outcome.primary,
        "endpoints": [_name(slot, fleet) for slot in outcome.slots],
        "destinations": list(outcome.destinations),
        "prefill": None if outcome.prefill is None else _name(outcome.prefill, fleet),
        "headers": dict(outcome.headers),
        "hints": {
            plugin: {
                "outcome": hint.outcome,
                "endpoint": None if hint.endpoint is None else _name(hint.endpoint, fleet),
                "numbers": hint.numbers,
            }
            for plugin, hint in outcome.hints.items()
        },
    }


def header_text(told: dict[str, Any]) -> str:
    """An explanation as the value of a response header; without candidates where it would be too long for one."""
    text = msgspec.json.encode(told)
    if len(text) > MOST_BYTES:
        slim = {name: {"picked": profile["picked"]} for name, profile in told["profiles"].items()}
        text = msgspec.json.encode(told | {"profiles": slim, "shortened": True})
    # Header values are bytes of their own kind: names of endpoints and models may hold anything.
    return text.decode().encode("ascii", "backslashreplace").decode()


def explanation_text(told: dict[str, Any]) -> str:
    """An explanation for people."""
    lines = [f"request {told['request']}  model {told['model']}  prompt {told['promptTokens']} tokens"]
    if "rejected" in told:
        rejected = told["rejected"]
        lines.append(f"rejected: {rejected['status']} {rejected['reason'] or ''} {rejected['message']}")
    else:
        lines.append(f"goes to {told['endpoints'][0]} ({told['destinations'][0]})")
        if told["endpoints"][1:]:
            lines.append(f"  then, if that does not answer: {', '.join(told['endpoints'][1:])}")
        if told["prefill"]:
            lines.append(f"  after a prefill on {told['prefill']}")
    for producer, said in told.get("bursts", {}).items():
        where = f"assigned to {said['assigned']}" if said["assigned"] else "not assigned"
        lines.append(
            f"{producer}: {where} ({said['why']}), {said['together']} of {said['group']} alike together, "
            f"window of {said['window']}, waited {said['waited_s'] * 1e3:.0f} ms"
        )
    for profile, said in told.get("deciders", {}).items():
        answer = "yes" if said["disaggregate"] else "no"
        numbers = _numbers_text(said["numbers"])
        lines.append(f"{profile}? {said['decider']} says {answer}: {said['reason']}  {numbers}".rstrip())
    for plugin, hint in told.get("hints", {}).items():
        what = f"{hint['outcome']} {hint['endpoint'] or ''}".rstrip()
        lines.append(f"{plugin}: {what}  {_numbers_text(hint['numbers'])}".rstrip())
    for name, profile in told["profiles"].items():
        lines += ["", f"profile {name}: picked {', '.join(profile['picked']) or 'nobody'}"]
        width = max(
            (len(it) for it in (*(c["endpoint"] for c in profile["candidates"]), *profile["removed"])), default=0
        )
        lines += [_candidate_text(candidate, width) for candidate in profile["candidates"]]
        lines += [f"  {endpoint:<{width}}  removed by {by}" for endpoint, by in profile["removed"].items()]
    return "\n".join(lines)


def _numbers_text(numbers: dict[str, float]) -> str:
    return "  ".join(f"{name}={number:g}" for name, number in numbers.items())


def _candidate_text(candidate: dict[str, Any], width: int) -> str:
    scores = " + ".join(f"{name} {it['score']:.3f} x {it['weight']:g}" for name, it in candidate["scores"].items())
    cached = max(candidate["cachedTokens"].values(), default=0.0)
    line = f"  {candidate['endpoint']:<{width}}  total {candidate['total']:.3f}"
    line += f" = {scores}" if scores else ""
    line += f"; {cached:.0f} tokens cached"
    if "trust" in candidate:
        line += f" (stream {candidate['trust']})"
    if (work := candidate.get("work")) is not None:
        line += f"; {work['backlog_s'] * 1e3:.1f} ms of work before it, {work['own_s'] * 1e3:.1f} ms of its own"
    return line


def _burst(assigned: Assigned) -> dict[str, Any]:
    rank = f" rank {assigned.rank}" if assigned.rank else ""
    return {
        "assigned": None if assigned.slot is None else f"{assigned.address}{rank}",
        "why": assigned.why,
        "group": assigned.group,
        "together": assigned.together,
        "window": assigned.window,
        "waited_s": assigned.waited_s,
    }


def _run(
    run: Run, request: Request, fleet: Endpoints, trust: Mapping[int, object], work: Work | None, most: int | None
) -> dict[str, Any]:
    removed = {
        _name(slot, fleet): filter_name
        for filter_name, given, kept in run.filtered
        for slot in given[~kept][:most].tolist()
    }
    candidates = []
    order = sorted(range(len(run.candidates)), key=lambda index: -run.totals[index])
    for index in order[:most]:
        slot = int(run.candidates[index])
        candidate = {
            "endpoint": _name(slot, fleet),
            "total": float(run.totals[index]),
            "scores": {name: {"score": float(it[index]), "weight": weight} for name, weight, it in run.scores},
            "cachedTokens": {
                producer: float(match.tokens_at(run.candidates[[index]])[0])
                for producer, match in request.matches.items()
            },
        }
        if slot in trust:
            candidate["trust"] = str(trust[slot])
        if work is not None:
            candidate["work"] = {
                "own_s": float(work.own[index]),
                "backlog_s": float(work.backlog[index]),
                "expected_s": float(work.expected[index]),
                "cached": float(work.cached[index]),
            }
        candidates.append(candidate)
    return {
        "picked": [_name(slot, fleet) for slot in run.picked.tolist()],
        "candidates": candidates,
        "removed": removed,
    }


def _name(slot: int, fleet: Endpoints) -> str:
    endpoint = fleet.endpoint(slot)
    return endpoint.name if not endpoint.rank else f"{endpoint.name} rank {endpoint.rank}"
