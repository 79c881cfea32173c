"""What `warmroute top` shows: one frame from the admin port's /state, or, with less in it, from /metrics.

Reading and drawing are apart, so that a script can have the frame as JSON and a test can look at either.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

TRUST_COLOURS = {"exact": "green", "degraded": "yellow", "blind": "red"}
DECISIONS_SHOWN = 12


class EndpointLine(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint (and rank) with its stream. Unknown ages are -1."""

    endpoint: str
    rank: int
    name: str
    role: str
    up: bool
    trust: str
    reason: str
    detail: str
    in_flight: float
    in_flight_tokens: float
    waiting: float
    running: float
    kv_usage: float
    match_share: float | None
    """Mean share of the prompt that was cached where it was sent, over what `Frame.share_of` says; None without requests."""
    routed: int
    events: float
    skipped: float
    gaps: float
    last_event_age_s: float
    lag_s: float
    scrape_age_s: float


class DecisionLine(msgspec.Struct, frozen=True, kw_only=True):
    """One recent decision."""

    age_s: float
    request_id: str
    model: str
    endpoint: str
    prefill: str | None
    prompt_tokens: int
    best_tokens: int
    chosen_tokens: int
    reason: str
    verdicts: dict[str, str]


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet at one moment."""

    source: str
    at: float
    share_of: str
    endpoints: list[EndpointLine]
    decisions: list[DecisionLine]
    index_keys: float
    index_entries: float
    alarms: list[str] = []
    """What the gateway's own checks say."""


def from_state(state: Mapping[str, Any], source: str, now: float | None = None) -> Frame:
    """A frame from the admin port's /state. Raises KeyError where that is not one."""
    at = time.time() if now is None else now
    streams = {(it["endpoint"], it["rank"]): it for it in state["streams"]}
    shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    for it in state["routed"]:
        if it["best_tokens"] >= 0 and it["prompt_tokens"]:
            shares[it["endpoint"], it["rank"]].append(it["chosen_tokens"] / it["prompt_tokens"])
    routed: dict[tuple[str, int], int] = defaultdict(int)
    for it in state["routed"]:
        routed[it["endpoint"], it["rank"]] += 1
    endpoints = []
    for it in state["endpoints"]:
        stream, share = streams[it["endpoint"], it["rank"]], shares.get((it["name"], it["rank"]))
        endpoints.append(
            EndpointLine(
                **{
                    name: it[name]
                    for name in ("endpoint", "rank", "name", "role", "up", "in_flight", "in_flight_tokens")
                },
                **{name: it[name] for name in ("waiting", "running", "kv_usage", "scrape_age_s")},
                trust=stream["state"],
                reason=stream["reason"],
                detail=stream["detail"],
                match_share=sum(share) / len(share) if share else None,
                routed=routed[it["name"], it["rank"]],
                events=sum(stream["events"].values()),
                skipped=sum(stream["skipped"].values()),
                gaps=stream["gaps"],
                last_event_age_s=stream["last_event_age_s"],
                lag_s=stream["lag_s"],
            )
        )
    decisions = [
        DecisionLine(
            **{name: it[name] for name in ("request_id", "model", "endpoint", "prefill", "prompt_tokens")},
            **{name: it[name] for name in ("best_tokens", "chosen_tokens", "reason", "verdicts")},
            age_s=max(0.0, at - it["at"]),
        )
        for it in state["routed"]
    ]
    index = state["index"]
    return Frame(
        source=source,
        at=at,
        share_of=f"the last {len(state['routed'])} requests",
        endpoints=endpoints,
        decisions=decisions,
        index_keys=index["keys"],
        index_entries=index["entries"],
        alarms=[f"{it['alarm']} {it['where']}: {it['detail']}" for it in state.get("alarms", ())],
    )


class _Page:
    """A metrics page by name, then by labels."""

    def __init__(self, text: str) -> None:
        self._series: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._series[sample.name.removeprefix("warmroute_")].append((sample.labels, sample.value))

    def all(self, name: str, **labels: str) -> Iterable[tuple[dict[str, str], float]]:
        wanted = labels.items()
        return [(found, value) for found, value in self._series[name] if wanted <= found.items()]

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.all(name, **labels))


def from_metrics(text: str, source: str) -> Frame:
    """A frame from a /metrics page: no single decisions, and match shares since the gateway's start."""
    page = _Page(text)
    endpoints = []
    for labels, _ in page.all("endpoint_info"):
        here = {"endpoint": labels["endpoint"], "rank": labels["rank"]}
        at = {"endpoint": labels["endpoint"]}
        state = next(
            (found for found, value in page.all("stream_trust", **here) if value), {"state": "blind", "reason": ""}
        )
        matched = page.sum("match_fraction_count", which="chosen", **at)
        endpoints.append(
            EndpointLine(
                **at,
                rank=int(labels["rank"]),
                name=labels["name"],
                role=labels["role"],
                up=page.sum("endpoint_up", **here) > 0,
                trust=state["state"],
                reason=state["reason"],
                detail="",
                match_share=page.sum("match_fraction_sum", which="chosen", **at) / matched if matched else None,
                routed=int(page.sum("decisions_total", **at)),
                events=page.sum("events_total", **here),
                skipped=page.sum("events_skipped_total", **here),
                gaps=page.sum("stream_gaps_total", **here),
                in_flight=page.sum("endpoint_in_flight", **here),
                in_flight_tokens=page.sum("endpoint_in_flight_tokens", **here),
                waiting=page.sum("endpoint_waiting", **here),
                running=page.sum("endpoint_running", **here),
                kv_usage=page.sum("endpoint_kv_usage", **here),
                last_event_age_s=page.sum("stream_last_event_age_seconds", **here),
                lag_s=page.sum("stream_event_lag_seconds", **here),
                scrape_age_s=page.sum("endpoint_scrape_age_seconds", **here),
            )
        )
    return Frame(
        source=source,
        at=time.time(),
        share_of="all requests",
        endpoints=endpoints,
        decisions=[],
        index_keys=page.sum("index_keys"),
        index_entries=page.sum("index_entries"),
        alarms=[f"{labels['alarm']} {labels['where']}" for labels, value in page.all("alarm") if value],
    )


def drawn(frame: Frame) -> RenderableType:
    """The frame for a terminal."""
    up = sum(it.up for it in frame.endpoints)
    exact = sum(it.trust == "exact" for it in frame.endpoints)
    count = len(frame.endpoints)
    head = Text.assemble(
        ("warmroute ", "bold"),
        f"{frame.source}  {time.strftime('%H:%M:%S', time.localtime(frame.at))}  endpoints ",
        (f"{up}/{count} up", "green" if up == count else "red"),
        "  streams ",
        (f"{exact}/{count} exact", "green" if exact == count else "yellow"),
        f"  index {_count(frame.index_keys)} keys, {_count(frame.index_entries)} entries",
    )
    parts: list[RenderableType] = [head, _endpoints(frame)]
    if frame.decisions:
        parts.append(_decisions(frame.decisions[:DECISIONS_SHOWN]))
    parts += [
        Text(f"{it.name}: {it.trust}, {it.reason}{f' ({it.detail})' if it.detail else ''}", TRUST_COLOURS[it.trust])
        for it in frame.endpoints
        if it.trust != "exact"
    ]
    parts += [Text(f"alarm {it}", "bold red") for it in frame.alarms]
    return Group(*parts)


def _endpoints(frame: Frame) -> Table:
    table = _table(
        ("endpoint", "left"),
        ("role", "left"),
        ("trust", "left"),
        *(
            (name, "right")
            for name in ("flight", "uncached", "wait", "run", "kv", "match", "reqs", "events", "last", "lag")
        ),
    )
    for it in frame.endpoints:
        name = it.name if not it.rank else f"{it.name}/{it.rank}"
        table.add_row(
            Text(name, "" if it.up else "red strike"),
            it.role or "any",
            Text(it.trust if it.trust == "exact" else f"{it.trust}: {it.reason}", TRUST_COLOURS.get(it.trust, "")),
            _count(it.in_flight),
            _count(it.in_flight_tokens),
            _count(it.waiting),
            _count(it.running),
            f"{it.kv_usage:.0%}",
            "-" if it.match_share is None else f"{it.match_share:.0%}",
            _count(it.routed),
            Text(_count(it.events) + (f" -{_count(it.skipped)}" if it.skipped else ""), "yellow" if it.skipped else ""),
            _age(it.last_event_age_s),
            "-" if it.last_event_age_s < 0 else f"{it.lag_s * 1e3:.0f} ms",
        )
    table.caption = f"match, reqs: {frame.share_of}; uncached: prompt tokens not computed yet; last, lag: events"
    return table


def _decisions(decisions: Sequence[DecisionLine]) -> Table:
    table = _table(
        ("ago", "right"),
        ("request", "left"),
        ("goes to", "left"),
        *((name, "right") for name in ("prompt", "cached", "best")),
        ("why", "left"),
    )
    for it in decisions:
        known = it.best_tokens >= 0
        why = [it.reason, *(f"{profile}: {said}" for profile, said in it.verdicts.items())]
        table.add_row(
            _age(it.age_s),
            it.request_id[:8],
            it.endpoint if it.prefill is None else f"{it.endpoint} after {it.prefill}",
            _count(it.prompt_tokens),
            _count(it.chosen_tokens) if known else "-",
            _count(it.best_tokens) if known else "-",
            ", ".join(why),
        )
    return table


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left", caption_style="dim")
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _count(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}k" if value >= 1e4 else f"{value:.0f}"


def _age(seconds: float) -> str:
    if seconds < 0:
        return "never"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
