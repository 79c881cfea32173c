"""What a demo found out: pure numbers, a JSON form of them, and the table for people."""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.demo_traffic import Observation

PERCENTILES = (50, 90, 99)


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One way of routing. Times in milliseconds; `requests_by_engine` has every engine of the fleet."""

    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    hit_ratio: float
    ttft_ms: dict[str, float]
    requests_by_engine: dict[str, int]
    duration_s: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The router's prediction against the engine's own count, over answered requests."""

    exact: int
    over: int
    under: int
    unknown: int
    predicted_tokens: int
    actual_tokens: int


class Overhead(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway costs, in milliseconds: its own decision time, and whole requests through it and past it."""

    decision_ms: dict[str, float]
    through_ms: dict[str, float]
    past_ms: dict[str, float]

    @property
    def added_ms(self) -> float:
        """Median through the gateway minus median past it."""
        return self.through_ms["p50"] - self.past_ms["p50"]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a demo prints."""

    round_robin: PhaseResult
    warmroute: PhaseResult
    prediction: Prediction
    overhead: Overhead
    errors: list[str]
    duration_s: float

    def as_json(self) -> bytes:
        """One JSON object; keys are the fields above, stable."""
        built = msgspec.to_builtins(self)
        built["overhead"]["added_ms"] = self.overhead.added_ms
        return msgspec.json.format(msgspec.json.encode(built), indent=2)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles, `{"p50": ..}`; zeros for no values."""
    ordered = sorted(values)
    if not ordered:
        return {f"p{p}": 0.0 for p in PERCENTILES}
    return {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}


def phase(observations: Sequence[Observation], engines: Sequence[str], duration_s: float) -> PhaseResult:
    """Sum up the requests of one phase."""
    good = [o for o in observations if o.error is None]
    prompt, cached = sum(o.prompt_tokens for o in good), sum(o.cached_tokens for o in good)
    served = Counter(o.engine for o in good)
    return PhaseResult(
        requests=len(observations),
        failed=len(observations) - len(good),
        prompt_tokens=prompt,
        cached_tokens=cached,
        hit_ratio=cached / prompt if prompt else 0.0,
        ttft_ms=percentiles([o.ttft_s * 1e3 for o in good]),
        requests_by_engine={name: served[name] for name in engines},
        duration_s=duration_s,
    )


def prediction(observations: Sequence[Observation]) -> Prediction:
    """Compare what the router said with what the engine did."""
    good = [o for o in observations if o.error is None]
    known = [(o.predicted_tokens, o.cached_tokens) for o in good if o.predicted_tokens is not None]
    return Prediction(
        exact=sum(p == a for p, a in known),
        over=sum(p > a for p, a in known),
        under=sum(p < a for p, a in known),
        unknown=len(good) - len(known),
        predicted_tokens=sum(p for p, _ in known),
        actual_tokens=sum(a for _, a in known),
    )


def histogram_percentiles(before: str, after: str, name: str, labels: str) -> dict[str, float]:
    """Percentiles of what a histogram gained between two Prometheus pages, in its own unit, interpolated within buckets.

    `labels`: text that a series' labels must contain, e.g. `step="total"`. Zeros where nothing was gained.
    """
    earlier = _buckets(before, name, labels)
    buckets = [
        (bound, count - earlier.get(bound, 0.0)) for bound, count in sorted(_buckets(after, name, labels).items())
    ]
    total = buckets[-1][1] if buckets else 0.0
    result = {}
    for percent in PERCENTILES:
        low, below, value = 0.0, 0.0, 0.0
        for bound, count in buckets:
            if total and count >= total * percent / 100:
                inside = (total * percent / 100 - below) / (count - below) if count > below else 0.0
                value = low if math.isinf(bound) else low + (bound - low) * inside
                break
            low, below = bound, count
        result[f"p{percent}"] = value
    return result


def _buckets(page: str, name: str, labels: str) -> dict[float, float]:
    """Upper bound -> cumulative count."""
    found: dict[float, float] = {}
    for line in page.splitlines():
        if line.startswith(f"{name}_bucket{{") and labels in line:
            upper = line.partition('le="')[2].partition('"')[0]
            found[float(upper.replace("+Inf", "inf"))] = float(line.rpartition(" ")[2])
    return found


def table(report: Report) -> RenderableType:
    """The comparison for a terminal."""
    one, two = report.round_robin, report.warmroute
    comparison = Table(title="The same conversations, two ways to route them", title_justify="left")
    comparison.add_column("")
    for heading in ("round robin", "Warmroute", "difference"):
        comparison.add_column(heading, justify="right")

    def add(label: str, left: str, right: str, difference: str = "") -> None:
        comparison.add_row(label, left, right, difference)

    failed = f", {one.failed} failed" if one.failed else "", f", {two.failed} failed" if two.failed else ""
    add("requests", f"{one.requests}{failed[0]}", f"{two.requests}{failed[1]}")
    points = (two.hit_ratio - one.hit_ratio) * 100
    add("prompt tokens from cache", f"{one.hit_ratio:.1%}", f"{two.hit_ratio:.1%}", f"{points:+.1f} points")
    for name in one.ttft_ms:
        left, right = one.ttft_ms[name], two.ttft_ms[name]
        change = f"{left / right:.1f}x faster" if 0 < right <= left else f"{right / left:.1f}x slower" if left else ""
        add(f"time to first token, {name}", f"{left:.0f} ms", f"{right:.0f} ms", change)
    for engine in one.requests_by_engine:
        add(f"requests on {engine}", str(one.requests_by_engine[engine]), str(two.requests_by_engine[engine]))

    guess, cost = report.prediction, report.overhead
    details = Table.grid(padding=(0, 2))
    details.add_row(
        "cached tokens, predicted / actual",
        f"{guess.predicted_tokens} / {guess.actual_tokens}\n{guess.exact} requests exact, {guess.over} over, "
        f"{guess.under} under" + (f", {guess.unknown} without a prediction" if guess.unknown else ""),
    )
    details.add_row(
        "the gateway's decision", f"p50 {cost.decision_ms['p50']:.1f} ms, p99 {cost.decision_ms['p99']:.1f} ms"
    )
    details.add_row(
        "a request through it / past it",
        f"p50 {cost.through_ms['p50']:.1f} / {cost.past_ms['p50']:.1f} ms: it adds {cost.added_ms:.1f} ms",
    )
    details.add_row("whole demo", f"{report.duration_s:.0f} s")
    problems = [Text(f"failed: {error}", style="red") for error in report.errors]
    return Group(comparison, details, *problems)
