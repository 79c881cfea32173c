"""What a run comes to, and many runs as a table."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from bench.placement.replay import Served

SLO_TTFT_S, SLO_TPOT_MS = 5.0, 100.0
BASELINES = ("least-work", "llm-d")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one list of arrivals. TTFT in seconds from arrival, the router queue included."""

    mean: float
    p50: float
    p90: float
    p99: float
    longest: float
    tpot_ms: float
    hit: float
    """Percent of prompt tokens that engines found cached."""
    slo: float
    """Percent of requests with a first token within 5 s and then at most 100 ms per token."""
    imbalance: float
    """Requests of the busiest engine, relative to the mean."""


def outcome(fates: Sequence[Served], engines: int) -> Outcome:
    """Of requests that have all been answered."""
    ttft = np.array([it.first - it.prompt.at for it in fates])
    tpot = np.array([(it.finished - it.first) / max(it.prompt.reply - 1, 1) * 1e3 for it in fates])
    several = np.array([it.prompt.reply > 1 for it in fates])
    requests = np.bincount([it.slot for it in fates], minlength=engines)
    p50, p90, p99 = np.percentile(ttft, [50, 90, 99])
    return Outcome(
        mean=float(ttft.mean()),
        p50=float(p50),
        p90=float(p90),
        p99=float(p99),
        longest=float(ttft.max()),
        tpot_ms=float(tpot[several].mean()) if several.any() else 0.0,
        hit=100.0 * sum(it.cached for it in fates) / sum(it.prompt.tokens for it in fates),
        slo=100.0 * float(((ttft <= SLO_TTFT_S) & (tpot <= SLO_TPOT_MS)).mean()),
        imbalance=float(requests.max() / requests.mean()),
    )


BySeed = Mapping[int, Outcome]


def ratio(runs: BySeed, base: BySeed, field: str) -> str:
    """Of a field to that of another policy with the same arrivals: mean and standard deviation over the seeds."""
    both = [seed for seed in runs if seed in base]
    if not both:
        return "-"
    ratios = [getattr(runs[seed], field) / getattr(base[seed], field) for seed in both]
    spread = f" ± {statistics.stdev(ratios):.2f}" if len(ratios) > 1 else ""
    return f"{statistics.mean(ratios):.2f}{spread}"


def table(results: Mapping[str, BySeed], bases: Sequence[str] = BASELINES) -> str:
    """Policies as rows; cells are means over the seeds."""
    heads = ["policy", "TTFT mean / p50 / p90 / p99, s", "longest, s", "TPOT, ms", "hit, %", "SLO, %", "max/mean"]
    heads += [f"mean to {base}" for base in bases] + [f"p99 to {base}" for base in bases]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name, runs in results.items():
        if not runs:
            continue
        mean = {key: statistics.mean(getattr(run, key) for run in runs.values()) for key in Outcome.__struct_fields__}
        cells = [
            name,
            " / ".join(seconds(mean[key]) for key in ("mean", "p50", "p90", "p99")),
            seconds(mean["longest"]),
        ]
        cells += [f"{mean['tpot_ms']:.1f}", f"{mean['hit']:.1f}", f"{mean['slo']:.1f}", f"{mean['imbalance']:.2f}"]
        cells += [ratio(runs, results.get(base, {}), field) for field in ("mean", "p99") for base in bases]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def seconds(value: float) -> str:
    """Three digits."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
