"""The four dashboards as data: what `generate` writes for Grafana, `render` draws for the docs, and the tests ask Prometheus.

`quiet` says why a panel's query returns nothing where all is well; every other panel must show data in the tests.
"""

import dataclasses

Query = tuple[str, str]
"""PromQL and legend. `RANGE` stands for Grafana's rate interval, `SELECT` for the chosen gateways."""

RANGE = "$__rate_interval"
SELECT = 'instance=~"$instance"'
STATE_EXACT = 'state="exact"'
STATE_INEXACT = 'state!="exact"'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel. Grafana's grid is 24 wide; a row of the dashboard is 8 high."""

    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    text: str = ""
    """What it means, and what to do when it looks wrong."""
    kind: str = "timeseries"
    """timeseries, stat or table."""
    width: int = 8
    top: float | None = None
    """Upper end of the axis."""
    stacked: bool = False
    quiet: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dashboard:
    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def series(name: str, labels: str = "") -> str:
    """A selector for the chosen gateways."""
    return f"warmroute_{name}{{{SELECT}{', ' + labels if labels else ''}}}"


def rate(name: str, labels: str = "") -> str:
    return f"rate({series(name, labels)}[{RANGE}])"


def by(labels: str, expression: str) -> str:
    return f"sum by ({labels}) ({expression})"


def quantile(q: float, name: str, labels: str = "", by_labels: str = "") -> str:
    """Of a histogram, over all labels but `by_labels`."""
    kept = f"le, {by_labels}" if by_labels else "le"
    return f"histogram_quantile({q}, sum by ({kept}) ({rate(name + '_bucket', labels)}))"


def mean(name: str, labels: str = "", by_labels: str = "") -> str:
    """Of a histogram."""
    over = f" by ({by_labels})" if by_labels else ""
    return f"sum{over} ({rate(name + '_sum', labels)}) / sum{over} ({rate(name + '_count', labels)})"


def per_role(name: str) -> str:
    """A gauge of endpoints, summed by role."""
    joined = f"on (instance, endpoint, rank) group_left (role) {series('endpoint_info')}"
    return f"sum by (role) ({series(name)} * {joined})"


def share(name: str, labels: str, of: str) -> str:
    """What part the series with these labels have of all."""
    return f"sum({rate(name, labels)}) / sum({rate(of)})"


EXACT_STREAMS = f"sum({series('stream_trust', STATE_EXACT)}) / count({series('stream_sequence')})"
INEXACT_STREAMS = f"{series('stream_trust', STATE_INEXACT)} == 1"
EXACT_PREDICTIONS = share("cached_tokens_error_bucket", 'le="0.0"', "cached_tokens_error_count")
DISAGGREGATED = share("decider_decisions_total", 'outcome="disaggregate"', "decider_decisions_total")

FLEET = Dashboard(
    uid="warmroute-fleet",
    title="Warmroute / Fleet",
    text="Is the fleet up, is it busy, and what does routing cost?",
    panels=(
        Panel(
            title="Endpoints up",
            queries=((f"sum({series('endpoint_up')})", "up"), (f"count({series('endpoint_up')})", "known")),
            kind="stat",
            width=6,
            text="Endpoints that take requests, and all that discovery named.",
        ),
        Panel(
            title="Streams that are exact",
            queries=((EXACT_STREAMS, "exact"),),
            unit="percentunit",
            kind="stat",
            width=6,
            text="Less than 100 %: see the event plane.",
        ),
        Panel(
            title="Prompt tokens reused",
            queries=((mean("match_fraction", 'which="reused"'), "reused"),),
            unit="percentunit",
            kind="stat",
            width=6,
            text="Mean share of a prompt that its engine found cached.",
        ),
        Panel(
            title="Predictions that were exact",
            queries=((EXACT_PREDICTIONS, "exact"),),
            unit="percentunit",
            kind="stat",
            width=6,
            text="Responses whose cached tokens were predicted to the token.",
        ),
        Panel(
            title="Requests",
            queries=((by("outcome", rate("requests_total")), "{{outcome}}"),),
            unit="reqps",
            text="By outcome: routed, or the status of a rejection.",
        ),
        Panel(
            title="Time to first token",
            queries=tuple((quantile(q, "time_to_first_token_seconds"), f"p{int(q * 100)}") for q in (0.5, 0.95)),
            unit="s",
            text="From the decision to the first content, as the gateway sees it.",
        ),
        Panel(
            title="Time to decide",
            queries=tuple(
                (quantile(q, "decision_step_seconds", 'step="total"'), f"p{int(q * 100)}") for q in (0.5, 0.99)
            ),
            unit="s",
            text="Everything from the last byte of a request to its decision, tokenizing included.",
        ),
        Panel(
            title="In flight",
            queries=((by("endpoint", series("endpoint_in_flight")), "{{endpoint}}"),),
            text="Requests sent to each endpoint and not finished: the router's own books.",
        ),
        Panel(
            title="Uncached tokens in flight",
            queries=((by("endpoint", series("endpoint_in_flight_tokens")), "{{endpoint}}"),),
            text="Prompt tokens that each endpoint has yet to compute. One far above the others: load does not weigh enough.",
        ),
        Panel(
            title="Waiting in engines",
            queries=((by("endpoint", series("endpoint_waiting")), "{{endpoint}}"),),
            text="As last scraped.",
        ),
        Panel(
            title="KV cache in use",
            queries=((f"max by (endpoint) ({series('endpoint_kv_usage')})", "{{endpoint}}"),),
            unit="percentunit",
            top=1,
            text="As last scraped. At 100 % engines preempt.",
        ),
        Panel(
            title="Router queue",
            queries=((f"sum({series('queue_waiting')})", "waiting"),),
            text="Above zero for long: the fleet is too small for its load.",
        ),
        Panel(
            title="Wait in the router queue, p95",
            queries=((quantile(0.95, "queue_wait_seconds", by_labels="outcome"), "{{outcome}}"),),
            unit="s",
            quiet="nobody waits while the fleet has room",
        ),
        Panel(
            title="Routed by load only",
            queries=((by("reason", rate("routed_blind_total")), "{{reason}}"),),
            unit="reqps",
            text="By reason. no_prompt is harmless (GET /v1/models and the like), everything else is a cache not used.",
        ),
        Panel(
            title="Responses",
            queries=((by("end", rate("responses_total")), "{{end}}"),),
            unit="reqps",
            text="finished, aborted, or error (5xx from an engine).",
        ),
        Panel(
            title="Steps of a decision, p99",
            queries=((quantile(0.99, "decision_step_seconds", 'step!="total"', "step"), "{{step}}"),),
            unit="s",
            text="tokenize grows with new text; all others belong below a millisecond or two.",
        ),
        Panel(
            title="Tokenizer outcomes",
            queries=((by("backend, outcome", rate("tokenizer_outcomes_total")), "{{backend}} {{outcome}}"),),
            unit="reqps",
            text="Other than ok or given: these requests are routed by load only.",
        ),
        Panel(
            title="Remembered",
            queries=(
                (
                    f"sum({rate('segment_cache_hit_tokens_total')}) / (sum({rate('segment_cache_hit_tokens_total')}) + "
                    f"sum({rate('segment_cache_miss_tokens_total')}))",
                    "tokens",
                ),
                (
                    f"sum({rate('key_chain_hit_keys_total')}) / (sum({rate('key_chain_hit_keys_total')}) + "
                    f"sum({rate('key_chain_computed_keys_total')}))",
                    "block keys",
                ),
            ),
            unit="percentunit",
            top=1,
            text="Share of tokens and block keys that earlier turns had already produced.",
        ),
        Panel(
            title="Scrapes",
            queries=((by("page, outcome", rate("scrapes_total")), "{{page}} {{outcome}}"),),
            unit="ops",
            text="Answers of model servers to the scraper.",
        ),
        Panel(
            title="Age of scraped load",
            queries=((f"max by (endpoint) ({series('endpoint_scrape_age_seconds')})", "{{endpoint}}"),),
            unit="s",
            text="Seconds. Growing: the endpoint's /metrics does not answer.",
        ),
        Panel(
            title="Circuits opened",
            queries=((f"sum by (instance) (increase({series('breaker_trips_total')}[{RANGE}]))", "{{instance}}"),),
            text="Endpoints taken out after answers of 5xx or none.",
        ),
        Panel(
            title="Gateway CPU",
            queries=(
                (
                    f"rate(process_cpu_seconds_total{{{SELECT}}}[{RANGE}]) and on (instance) warmroute_build_info",
                    "{{instance}}",
                ),
            ),
            unit="percentunit",
            text="Cores. The request path runs on one of them.",
        ),
        Panel(
            title="Gateway memory",
            queries=(
                (f"process_resident_memory_bytes{{{SELECT}}} and on (instance) warmroute_build_info", "{{instance}}"),
            ),
            unit="bytes",
        ),
        Panel(
            title="Versions",
            queries=((f"count by (version) ({series('build_info')})", "{{version}}"),),
            kind="table",
        ),
    ),
)

EVENTS = Dashboard(
    uid="warmroute-events",
    title="Warmroute / Event plane",
    text="Which engines' caches does the router know, how well, and what was lost on the way?",
    panels=(
        Panel(
            title="Streams by trust",
            queries=((by("state", series("stream_trust")), "{{state}}"),),
            stacked=True,
            text="Everything but exact has a reason, listed beside this.",
        ),
        Panel(
            title="Streams that are not exact",
            queries=((INEXACT_STREAMS, "{{endpoint}} {{rank}} {{state}}: {{reason}}"),),
            kind="table",
            width=16,
            text="Look the reason up in docs/events.md; `warmroute doctor` names the broken wire.",
            quiet="every stream is exact",
        ),
        Panel(
            title="Events by kind",
            queries=((by("kind", rate("events_total")), "{{kind}}"),),
            unit="ops",
            text="BlockStored and BlockRemoved, applied to the index.",
        ),
        Panel(
            title="Events by endpoint",
            queries=((by("endpoint", rate("events_total")), "{{endpoint}}"),),
            unit="ops",
            text="An endpoint that gets new prompts and stays at zero has a broken event wire.",
        ),
        Panel(
            title="Skipped events by reason",
            queries=((by("reason", rate("events_skipped_total")), "{{reason}}"),),
            unit="ops",
            text="Should be empty. The reasons are in docs/events.md.",
            quiet="no event was skipped",
        ),
        Panel(
            title="Gaps",
            queries=((f"sum by (endpoint) (increase({series('stream_gaps_total')}[{RANGE}]))", "{{endpoint}}"),),
            text="Sequence numbers that did not come: the engine's publisher dropped batches, or the network did.",
        ),
        Panel(
            title="Replays asked for",
            queries=((f"sum by (endpoint) (increase({series('stream_replays_total')}[{RANGE}]))", "{{endpoint}}"),),
            text="One when a stream is joined, then one per gap.",
        ),
        Panel(
            title="Batches",
            queries=((by("endpoint", rate("stream_batches_total")), "{{endpoint}}"),),
            unit="ops",
            text="About one per engine step that changes the cache.",
        ),
        Panel(
            title="Age of the last event",
            queries=((f"max by (endpoint) ({series('stream_last_event_age_seconds')})", "{{endpoint}}"),),
            unit="s",
            text="Long is fine for an endpoint without traffic.",
        ),
        Panel(
            title="Event lag",
            queries=((f"max by (endpoint) ({series('stream_event_lag_seconds')})", "{{endpoint}}"),),
            unit="s",
            text="Engine's time of the last batch to its being applied. Constant offsets are clocks that differ.",
        ),
        Panel(
            title="Sequence",
            queries=((f"max by (endpoint) ({series('stream_sequence')})", "{{endpoint}}"),),
            text="Falls when an engine restarts.",
        ),
        Panel(
            title="Index",
            queries=((f"sum({series('index_keys')})", "block keys"), (f"sum({series('index_entries')})", "entries")),
            text="Entries / keys is the replication of blocks over endpoints.",
        ),
        Panel(
            title="Forgotten by the index",
            queries=((by("what", rate("index_evicted_total")), "{{what}}"),),
            unit="ops",
            text="Growing: matches are too short. Raise warmroute.index.maxKeys or maxHolders.",
        ),
        Panel(
            title="Our own failures on events",
            queries=((f"sum({rate('event_errors_total')})", "messages"),),
            unit="ops",
            text="Should be zero: see the log.",
        ),
        Panel(
            title="Alarms of the gateway's own checks",
            queries=((f"max by (alarm, where) ({series('alarm')}) == 1", "{{alarm}}: {{where}}"),),
            kind="table",
            text="Look them up in docs/troubleshooting.md.",
            quiet="no alarm is on",
        ),
    ),
)

QUALITY = Dashboard(
    uid="warmroute-quality",
    title="Warmroute / Routing quality",
    text="How much of the prompts is reused, how much could be, and are predictions right?",
    panels=(
        Panel(
            title="Match share: best, chosen, reused",
            queries=((mean("match_fraction", by_labels="which"), "{{which}}"),),
            unit="percentunit",
            top=1,
            width=12,
            text="best above chosen: load overrules affinity. chosen above reused: the picture is wrong.",
        ),
        Panel(
            title="Why endpoints were chosen",
            queries=((by("reason", rate("decisions_total")), "{{reason}}"),),
            unit="reqps",
            stacked=True,
            width=12,
            text="nothing_cached alone, under chat traffic, is the signature of a broken wire.",
        ),
        Panel(
            title="Reused share by endpoint",
            queries=((mean("match_fraction", 'which="reused"', "endpoint"), "{{endpoint}}"),),
            unit="percentunit",
            top=1,
        ),
        Panel(
            title="Requests by endpoint",
            queries=((by("endpoint", rate("decisions_total")), "{{endpoint}}"),),
            unit="reqps",
            text="One endpoint with nearly all of it: scores have collapsed onto it.",
        ),
        Panel(
            title="Predictions that were exact",
            queries=((EXACT_PREDICTIONS, "exact"),),
            unit="percentunit",
            top=1,
            text="Predicted cached tokens against what the engine reported.",
        ),
        Panel(
            title="Prediction error",
            queries=((mean("cached_tokens_error", by_labels="direction"), "{{direction}}"),),
            text="Mean absolute difference in tokens. over: the engine had less than the index said.",
        ),
        Panel(
            title="Prediction error by endpoint, p95",
            queries=((quantile(0.95, "cached_tokens_error", by_labels="endpoint"), "{{endpoint}}"),),
            text="Tokens.",
        ),
        Panel(
            title="Cached tokens not reported",
            queries=((by("endpoint", rate("cached_tokens_unreported_total")), "{{endpoint}}"),),
            unit="reqps",
            text="Start engines with --enable-prompt-tokens-details.",
            quiet="all engines report cached tokens",
        ),
        Panel(
            title="Time to first token by endpoint, p95",
            queries=((quantile(0.95, "time_to_first_token_seconds", by_labels="endpoint"), "{{endpoint}}"),),
            unit="s",
        ),
        Panel(
            title="Prompt length",
            queries=tuple((quantile(q, "prompt_tokens"), f"p{int(q * 100)}") for q in (0.5, 0.95)),
            text="Tokens.",
        ),
        Panel(
            title="Cached tokens predicted, median",
            queries=((quantile(0.5, "match_tokens", by_labels="which"), "{{which}}"),),
            text="Tokens, on the best endpoint and on the chosen one.",
        ),
        Panel(
            title="Models whose template rewrites history",
            queries=((f"max by (model) ({series('template_rewrites_history')})", "{{model}}"),),
            kind="table",
            text="1: replies cannot be reused. `warmroute template` shows where and why.",
        ),
        Panel(
            title="Plugins that failed",
            queries=((by("plugin", rate("plugin_errors_total")), "{{plugin}}"),),
            unit="ops",
            quiet="no plugin raised",
        ),
    ),
)

STAGES = Dashboard(
    uid="warmroute-stages",
    title="Warmroute / Prefill and decode",
    text="Which prompts are computed elsewhere, does it pay, and do the hand-offs arrive?",
    panels=(
        Panel(
            title="Prompts computed elsewhere",
            queries=((DISAGGREGATED, "share"),),
            unit="percentunit",
            kind="stat",
        ),
        Panel(
            title="Decisions",
            queries=((by("outcome", rate("decider_decisions_total")), "{{outcome}}"),),
            unit="reqps",
            stacked=True,
            text="disaggregate: a prefill endpoint computes the prompt. local: the decode endpoint does.",
        ),
        Panel(
            title="Decisions by reason",
            queries=((by("reason", rate("decider_decisions_total")), "{{reason}}"),),
            unit="reqps",
            text="The deciders' reasons are in docs/plugins.md.",
        ),
        Panel(
            title="Hand-offs",
            queries=((by("outcome, reason", rate("handoffs_total")), "{{outcome}} {{reason}}"),),
            unit="reqps",
            text="By the gateway itself (handoff.mode gateway). local: prefill work was wasted.",
        ),
        Panel(
            title="Time of prefill legs",
            queries=tuple((quantile(q, "prefill_leg_seconds"), f"p{int(q * 100)}") for q in (0.5, 0.95)),
            unit="s",
            text="Near warmroute.handoff.timeout: the prefill pool is too small.",
        ),
        Panel(
            title="Time to first token by role, p95",
            queries=(
                (
                    "histogram_quantile(0.95, sum by (le, role) (sum by (instance, endpoint, le) "
                    f"({rate('time_to_first_token_seconds_bucket')}) * on (instance, endpoint) group_left (role) "
                    f"max by (instance, endpoint, role) ({series('endpoint_info')})))",
                    "{{role}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            title="Requests in flight by role",
            queries=((per_role("endpoint_in_flight"), "{{role}}"),),
        ),
        Panel(
            title="Uncached tokens in flight by role",
            queries=((per_role("endpoint_in_flight_tokens"), "{{role}}"),),
            text="On decode endpoints: prompts that were not handed off.",
        ),
        Panel(
            title="Waiting by role",
            queries=((per_role("endpoint_waiting"), "{{role}}"),),
            text="One role with a queue and the other without: the ratio of the pools is off.",
        ),
        Panel(
            title="KV cache in use by role, mean",
            queries=((f"{per_role('endpoint_kv_usage')} / count by (role) ({series('endpoint_info')})", "{{role}}"),),
            unit="percentunit",
            top=1,
        ),
        Panel(
            title="Endpoints up by role",
            queries=((per_role("endpoint_up"), "{{role}}"),),
        ),
    ),
)

DASHBOARDS = (FLEET, EVENTS, QUALITY, STAGES)
