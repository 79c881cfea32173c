"""From the answers of one run to the figures of one router: pure functions, and their JSON form."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from bench.peers.traffic import Answer
from gateway.demo_report import percentiles

_RECENT = 20
"""Answers in a row over which a cache share is called recovered."""
_RECOVERED = 0.95
"""Part of the earlier cache share that counts as recovered."""


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that began between two events. `struck_share`: of the answers, those by the engine that was struck."""

    name: str
    began_s: float
    requests: int
    failed: int
    cached_share: float
    ttft_ms: dict[str, float]
    struck_share: float | None


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """After an engine came back: seconds until its first answer, and from the first event until the cache share of a row of
    answers was nearly what it had been. None: not within the run."""

    traffic_s: float | None
    cache_s: float | None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the router's parts used. `cpu_ms`: per request; `idle_ms_per_s`: before the traffic; `rss_mb`: at its end."""

    cpu_ms: dict[str, float]
    idle_ms_per_s: dict[str, float]
    rss_mb: dict[str, float]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One router in one scenario. `served`: answers by engine, every engine of the fleet. Times in milliseconds."""

    scenario: str
    router: str
    complete: bool
    seconds: float
    requests: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    cached_share: float
    predicted_exactly: float | None
    ttft_ms: dict[str, float]
    returned_share: float
    served: dict[str, int]
    busiest_over_mean: float
    usage: Usage
    phases: list[Phase]
    recovery: Recovery | None = None


def row(
    scenario: str,
    router: str,
    answers: Sequence[Answer],
    *,
    complete: bool,
    engines: Sequence[str],
    phases: Sequence[tuple[str, float]],
    struck: str | None,
    usage: Usage,
) -> Row:
    """Sum up one run. `phases`: names and when they began, in order."""
    good = [answer.seen for answer in answers if answer.failed is None]
    served = Counter(seen.engine for seen in good)
    follow = [answer.returned for answer in answers if answer.returned is not None]
    known = [seen.predicted_tokens == seen.cached_tokens for seen in good if seen.predicted_tokens is not None]
    ends = [*(began for _, began in phases[1:]), float("inf")]
    return Row(
        scenario=scenario,
        router=router,
        complete=complete,
        seconds=max((answer.ended_s for answer in answers), default=0.0),
        requests=len(answers),
        errors=dict(Counter(answer.failed for answer in answers if answer.failed is not None)),
        prompt_tokens=sum(seen.prompt_tokens for seen in good),
        cached_tokens=sum(seen.cached_tokens for seen in good),
        cached_share=cached_share(answers),
        predicted_exactly=_share(sum(known), len(known)) if known else None,
        ttft_ms=percentiles([seen.ttft_s * 1e3 for seen in good]),
        returned_share=_share(sum(follow), len(follow)),
        served={name: served[name] for name in engines},
        busiest_over_mean=_share(max(served.values(), default=0) * len(engines), len(good)),
        usage=usage,
        phases=[
            _phase(name, began, [a for a in answers if began <= a.began_s < end], struck)
            for (name, began), end in zip(phases, ends, strict=True)
        ],
        recovery=_recovery(answers, phases, struck) if phases[-1][0] == "engine back" else None,
    )


def cached_share(answers: Sequence[Answer]) -> float:
    """Cached tokens / prompt tokens of what was answered."""
    good = [answer.seen for answer in answers if answer.failed is None]
    return _share(sum(seen.cached_tokens for seen in good), sum(seen.prompt_tokens for seen in good))


def _phase(name: str, began_s: float, answers: Sequence[Answer], struck: str | None) -> Phase:
    good = [answer.seen for answer in answers if answer.failed is None]
    by_struck = sum(seen.engine == struck for seen in good)
    return Phase(
        name=name,
        began_s=began_s,
        requests=len(answers),
        failed=len(answers) - len(good),
        cached_share=cached_share(answers),
        ttft_ms=percentiles([seen.ttft_s * 1e3 for seen in good]),
        struck_share=None if struck is None else _share(by_struck, len(good)),
    )


def _recovery(answers: Sequence[Answer], phases: Sequence[tuple[str, float]], struck: str | None) -> Recovery:
    """`phases`: before, dead, back."""
    died_s, back_s = phases[-2][1], phases[-1][1]
    good = sorted((a for a in answers if a.failed is None), key=lambda a: a.ended_s)
    since = [a.ended_s for a in good if a.seen.engine == struck and a.began_s >= died_s]
    wanted = cached_share([a for a in good if a.ended_s < died_s][-2 * _RECENT :]) * _RECOVERED
    after = [a for a in good if a.began_s >= died_s]
    rows = (after[end - _RECENT : end] for end in range(_RECENT, len(after) + 1))
    recovered = next((some[-1].ended_s for some in rows if cached_share(some) >= wanted), None)
    return Recovery(
        traffic_s=since[0] - back_s if since else None,
        cache_s=None if recovered is None else recovered - died_s,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
