"""The tables that a run prints, in Markdown: measures down, routers across."""

from collections.abc import Callable, Sequence

from bench.peers.rows import Phase, Row

_NONE = "-"


def table(rows: Sequence[Row]) -> str:
    """All rows of one scenario."""
    lines: list[list[str]] = [["", *(row.router for row in rows)]]

    def add(label: str, cell: Callable[[Row], str]) -> None:
        cells = [cell(row) for row in rows]
        if any(each != _NONE for each in cells):
            lines.append([label, *cells])

    add("requests", lambda row: f"{row.requests}" + ("" if row.complete else ", **incomplete**"))
    add("errors seen by clients", lambda row: ", ".join(f"{n} {kind}" for kind, n in row.errors.items()) or "0")
    add("prompt tokens found cached", lambda row: f"{row.cached_share:.1%}")
    add("cached tokens predicted exactly", lambda row: _percent(row.predicted_exactly))
    add("TTFT p50 / p90 / p99, ms", lambda row: " / ".join(f"{value:.0f}" for value in row.ttft_ms.values()))
    add("follow-up turns back at their history", lambda row: f"{row.returned_share:.1%}")
    add("busiest engine / mean", lambda row: f"{row.busiest_over_mean:.2f}")
    add("router CPU per request, ms", lambda row: _parts(row.usage.cpu_ms, 2))
    add("router CPU when idle, ms per s", lambda row: _parts(row.usage.idle_ms_per_s, 0))
    add("router RSS, MB", lambda row: _parts(row.usage.rss_mb, 0))
    add("seconds", lambda row: f"{row.seconds:.1f}")
    if any(row.recovery for row in rows):
        add(
            "first answer of the engine after it is back, s",
            lambda row: _seconds(row.recovery.traffic_s if row.recovery else None),
        )
        add("cache share back after the death, s", lambda row: _seconds(row.recovery.cache_s if row.recovery else None))
    if len(rows[0].phases) > 1:
        lines.append([_PHASES, *("" for _ in rows)])
        for number, phase in enumerate(rows[0].phases):
            lines.append([f"**{phase.name}**", *(_phase(row.phases[number]) for row in rows)])
    return "\n".join(["| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(lines[0]), *lines[1:])])


_PHASES = "*failed of requests; cached; TTFT p90; answers by the struck engine:*"


def _phase(phase: Phase) -> str:
    if not phase.requests:
        return "no requests"
    share = _percent(phase.struck_share, 0)
    return f"{phase.failed} of {phase.requests}; {phase.cached_share:.0%}; {phase.ttft_ms['p90']:.0f} ms; {share}"


def _parts(parts: dict[str, float], digits: int) -> str:
    whole = f"{sum(parts.values()):.{digits}f}"
    if len(parts) == 1:
        return whole
    return f"{whole} ({', '.join(f'{name} {value:.{digits}f}' for name, value in parts.items())})"


def _percent(share: float | None, digits: int = 1) -> str:
    return _NONE if share is None else f"{share:.{digits}%}"


def _seconds(value: float | None) -> str:
    return "not within the run" if value is None else f"{value:.1f}"
