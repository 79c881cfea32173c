"""The fleet: is it up, is it busy, what does routing cost."""

from deploy.grafana.panel import (
    EXACT_PREDICTIONS,
    RANGE,
    SELECT,
    STATE_EXACT,
    Dashboard,
    Panel,
    by,
    mean,
    quantile,
    rate,
    series,
)

EXACT_STREAMS = f"sum({series('stream_trust', STATE_EXACT)}) / count({series('stream_sequence')})"
STREAM_EVENTS = 'event=~"streams|decided|rejected|finished|aborted"'
TROUBLE_EVENTS = 'event=~"decide_timeouts|.+_errors|refused_calls"'
CONNECTIONS = 'event="connections"'

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
            title="ext-proc streams open",
            queries=((f"sum by (instance) ({series('extproc_streams_open')})", "{{instance}}"),),
            text="One per request in flight. Rising while requests do not: responses do not end here, or a proxy went away "
            "without a word (it is given up after 60 s).",
        ),
        Panel(
            title="ext-proc streams by what became of them",
            queries=((by("event", rate("extproc_total", STREAM_EVENTS)), "{{event}}"),),
            unit="ops",
            text="streams above decided and rejected together: requests end before they are complete. aborted growing: clients "
            "give up, or connections between Envoy and the gateway break (trouble and connections, beside this).",
        ),
        Panel(
            title="ext-proc trouble",
            queries=((f"sum by (event) (increase({series('extproc_total', TROUBLE_EVENTS)}[{RANGE}]))", "{{event}}"),),
            text="Should be flat. decide_timeouts: see the steps of a decision. connection_errors, refused_calls: somebody who "
            "is not Envoy talks to the port; the log's http2_broken says why. The others are our own faults: see the log.",
        ),
        Panel(
            title="Connections from the proxy",
            queries=(
                (f"sum by (instance) (increase({series('extproc_total', CONNECTIONS)}[{RANGE}]))", "{{instance}}"),
            ),
            text="New ones; Envoy keeps one per worker, so this belongs at zero. Always some: they break, see Gateway CPU and "
            "docs/transport.md. Always zero with transport grpcio, which does not count them.",
        ),
        Panel(
            title="Transport",
            queries=(
                (
                    f"count by (transport, configured) ({series('extproc_transport')})",
                    "{{transport}} (configured: {{configured}})",
                ),
            ),
            kind="table",
            text="What carries ext-proc. grpcio where auto is configured: libnghttp2 cannot be loaded (the log's "
            "transport_fallback says why), and a decision costs more CPU here and in Envoy.",
        ),
        Panel(
            title="Streamed replies",
            queries=((by("read", rate("streamed_replies_total")), "read: {{read}}"),),
            unit="ops",
            text="By whether their pieces are read as they go by. no: warmroute.replyPiecesPerSecond is used up; time to first "
            "token and accuracy then come from the others. Mostly no: see docs/performance.md, Streamed replies.",
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
