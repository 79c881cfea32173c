"""Every metric the gateway exports, in one place; docs/metrics.md is generated from here.

Labels are bounded: endpoints by the fleet (`departed_series`), reasons and steps by fixed sets, models by `MAX_MODELS`.
A help text ends with what to do when the value looks wrong.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.request_events import Customer, DecidedRequest, EndedResponse

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside every counter and histogram, which nobody reads

MAX_MODELS = 100
OTHER = "other"
"""The label for models beyond that, and for names that nobody but a client has said."""

STEP_BUCKETS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
TTFT_BUCKETS = (*(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 45, 60, 120),)
TOKEN_BUCKETS = tuple(float(2**n) for n in range(3, 18))
ERROR_BUCKETS = (0.0, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)
WINDOW_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256, 512, 1000)
FRACTION_BUCKETS = tuple(n / 10 for n in range(11))

STEPS = ("parse", "tokenize", "keys", "match", "schedule", "total")


M = TypeVar("M", Counter, Histogram)


class Definition(msgspec.Struct, frozen=True):
    """What docs/metrics.md says of one metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class Metrics:
    """The gateway's own counters and histograms, registered in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.definitions: list[Definition] = []
        self.when_decided: list[Callable[[DecidedRequest], None]] = []
        """Who else counts requests."""
        self.when_sent: list[Callable[[Customer], None]] = []
        self.when_ended: list[Callable[[EndedResponse], None]] = []
        self._models: set[str] = set()
        self._by_endpoint: list[Counter | Histogram] = []

        def define(name: str, kind: str, labels: tuple[str, ...], help_: str) -> None:
            self.definitions.append(Definition(f"warmroute_{name}", kind, labels, help_))

        def remembered(metric: M, labels: tuple[str, ...]) -> M:
            if "endpoint" in labels:
                self._by_endpoint.append(metric)
            return metric

        def counter(name: str, help_: str, labels: tuple[str, ...] = ()) -> Counter:
            define(f"{name}_total", "counter", labels, help_)
            return remembered(Counter(f"warmroute_{name}", help_, labels, registry=registry), labels)

        def gauge(name: str, help_: str, labels: tuple[str, ...] = ()) -> Gauge:
            define(name, "gauge", labels, help_)
            return Gauge(f"warmroute_{name}", help_, labels, registry=registry)

        def histogram(name: str, help_: str, buckets: Iterable[float], labels: tuple[str, ...] = ()) -> Histogram:
            define(name, "histogram", labels, help_)
            made = Histogram(f"warmroute_{name}", help_, labels, buckets=tuple(buckets), registry=registry)
            return remembered(made, labels)

        self.requests = counter(
            "requests",
            "Requests decided, by outcome: routed, or rejected with the status. Rejections that are not 4xx mean that no "
            "endpoint was eligible: look at warmroute_endpoint_up.",
            ("model", "outcome"),
        )
        self.blind = counter(
            "routed_blind",
            "Requests routed by load only, by reason. Anything but no_prompt means that the prefix cache was not used: look "
            "up the reason in the troubleshooting page.",
            ("reason",),
        )
        self.step = histogram(
            "decision_step_seconds",
            "Time of each step of a decision. tokenize grows with the new text of a request; the others should stay below "
            "a millisecond.",
            STEP_BUCKETS,
            ("step",),
        )
        self.prompt_tokens = histogram("prompt_tokens", "Prompt length of tokenized requests.", TOKEN_BUCKETS)
        self.match_tokens = histogram(
            "match_tokens",
            "Leading cached tokens predicted, on the endpoint that has most (best) and on the chosen one. best far above "
            "chosen means that load overrules affinity; both at zero means that a wire is broken or nothing is shared.",
            (0.0, *TOKEN_BUCKETS),
            ("which",),
        )
        self.match_fraction = histogram(
            "match_fraction",
            "Share of the prompt that is cached, by the endpoint that was chosen to compute it: best available in its role, "
            "predicted on the chosen one, and actually reused as its engine reported (hand-offs: where the gateway sees the "
            "prefill's answer). best above chosen: load overrules affinity. chosen above reused: the picture is wrong, see "
            "cached_tokens_error.",
            FRACTION_BUCKETS,
            ("endpoint", "which"),
        )
        self.decisions = counter(
            "decisions",
            "Routed requests by chosen endpoint and why: most_cached, part_cached, load_over_cache (another one holds more, "
            "and load weighed more), nothing_cached, only_choice, no_knowledge (nothing was matched: see routed_blind).",
            ("endpoint", "reason"),
        )
        self.cached_error = histogram(
            "cached_tokens_error",
            "Absolute difference between predicted and engine-reported cached tokens, over (predicted too much) or under. "
            "A healthy fleet has everything in the smallest buckets.",
            ERROR_BUCKETS,
            ("endpoint", "direction"),
        )
        self.cached_unknown = counter(
            "cached_tokens_unreported",
            "Completed responses whose usage had no cached_tokens: accuracy cannot be known. Start engines with "
            "--enable-prompt-tokens-details.",
            ("endpoint",),
        )
        self.token_parity = counter(
            "token_parity",
            "Sampled requests whose token ids were compared with those the engine announced: equal, differs, or unseen (the "
            "engine announced nothing like it). differs: the log names the first token; tokenizer or template are not the "
            "engine's. unseen growing: its events do not arrive.",
            ("endpoint", "result"),
        )
        self.responses = counter(
            "responses",
            "Routed requests by how they ended: finished, aborted (the stream ended before the response did), or error "
            "(the engine answered 5xx).",
            ("endpoint", "end"),
        )
        self.ttft = histogram(
            "time_to_first_token_seconds",
            "From the routing decision to the first byte of the response body, as the gateway sees it.",
            TTFT_BUCKETS,
            ("endpoint",),
        )
        self.plugin_errors = counter(
            "plugin_errors",
            "Plugins that raised; the request went on without what they knew. The log names the error.",
            ("plugin",),
        )
        self.decider = counter(
            "decider_decisions",
            "Prefill/decode decisions by decider, outcome and reason.",
            ("decider", "outcome", "reason"),
        )
        self.hints = counter(
            "request_hints",
            "Routed requests by what a plugin tells the engine in request headers, by plugin and outcome. p2p-source-producer: "
            "named (an endpoint that holds more of the prompt), no_better (nobody whose events are exact holds enough more), "
            "no_match (the prompt was not matched: see routed_blind). Never named while match_tokens has best above chosen: "
            "look at stream_trust.",
            ("plugin", "outcome"),
        )
        self.handoffs = counter(
            "handoffs",
            "Hand-offs by the gateway itself, by outcome and reason: transferred, local (the prefill leg came to nothing, the "
            "decode endpoint computed the prompt), or broken (it failed when the decode leg was under way). local growing "
            "means wasted prefill work: look up the reason in docs/prefill-decode.md.",
            ("outcome", "reason"),
        )
        self.prefill_leg = histogram(
            "prefill_leg_seconds",
            "Time of prefill legs that the gateway sent, by outcome. Near warmroute.handoff.timeout the prefill pool is too "
            "small, or the decider does not see its queue.",
            STEP_BUCKETS,
            ("outcome",),
        )
        self.token_ids = counter(
            "token_ids_forwarded",
            "Requests by whether the router's token ids went along (warmroute.forwardTokenIds): yes, or no because the engine "
            "would not use them for this request.",
            ("forwarded",),
        )
        self.rewrites_history = gauge(
            "template_rewrites_history",
            "1 where the model's chat template renders earlier turns differently later, so that no prefix cache can reuse a "
            "reply; 0 where it only appends. `warmroute template` shows where and why.",
            ("model",),
        )
        self.alarm = gauge(
            "alarm",
            "1 while the gateway's own checks say that something is broken (0 when it is over): no_events, no_match, "
            "cached_disagrees, role_keys_missing, thread_died. Look the alarm up in docs/troubleshooting.md; `warmroute doctor` "
            "says what to write where.",
            ("alarm", "where"),
        )
        self.queue_waiting = gauge(
            "queue_waiting",
            "Requests that wait in the router queue now. Above zero for long means that the fleet is too small for its load.",
        )
        self.queue_wait = histogram(
            "queue_wait_seconds",
            "Time in the router queue of requests that could not go at once, by how it ended: sent, cancelled (the client "
            "went away), or the reason of the rejection.",
            TTFT_BUCKETS,
            ("outcome",),
        )
        self.burst_waiting = gauge(
            "burst_waiting",
            "Requests that wait in a window of a burst-prefix-cache-producer now. Nothing bounds it but the window's duration "
            "where maxBatchSize is -1.",
        )
        self.burst_window = histogram(
            "burst_window_requests",
            "Requests per window of a burst-prefix-cache-producer, by how it ended: time, full (maxBatchSize), or closed "
            "(shutdown or reload). Mostly 1: there are no bursts, and the window only costs time.",
            WINDOW_BUCKETS,
            ("ended",),
        )
        self.burst_wait = histogram(
            "burst_wait_seconds",
            "Time that requests were held in such a window, by what became of them: colocated (with others of the same "
            "beginning), separated (maxPerReplica or the balance sent the others elsewhere), alone (no other prompt is like "
            "it), no_endpoint, cancelled (the client went away), failed. Mostly alone: switch the producer off, or lower "
            "minColocateBlocks.",
            STEP_BUCKETS,
            ("outcome",),
        )
        self.burst_assigned = counter(
            "burst_assigned",
            "Requests that a window had assigned to an endpoint, by whether their prompt is computed there: yes, or no because "
            "other scorers weighed more. no growing: give the prefix-cache-scorer that reads the producer more weight.",
            ("followed",),
        )
        self.streams_open = gauge("extproc_streams_open", "ext-proc streams open now, one per request in flight.")
        self.reloads = counter("config_reloads", "Configuration reloads, by result: ok or refused.", ("result",))

    def forget_endpoint(self, address: str) -> None:
        """The endpoint is gone for good: its series go too."""
        for metric in self._by_endpoint:
            metric.remove_by_labels({"endpoint": address})

    def model(self, name: str) -> str:
        """The label for a model name: itself, or `other` beyond MAX_MODELS different ones."""
        if name in self._models:
            return name
        if len(self._models) < MAX_MODELS:
            self._models.add(name)
            return name
        return OTHER


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """What is exported of one event stream."""

    endpoint: str
    rank: int
    state: str
    reason: str
    detail: str
    """For people; never a label."""
    events: dict[str, int]
    skipped: dict[str, int]
    gaps: int
    replays: int
    sequence: int
    last_event_age_s: float
    lag_s: float = 0.0
    """Engine time of the last batch to the moment it was applied."""
    batches: int = 0
    keys: int = 0
    """Block keys held for it."""
    events_per_s: float = 0.0
    """Over the self-watch's window; 0 where nobody watches."""


class IndexState(msgspec.Struct, frozen=True, kw_only=True):
    keys: int
    entries: int
    evicted_keys: int
    evicted_holders: int


class EndpointState(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    endpoint: str
    rank: int
    role: str
    up: bool
    in_flight: int
    in_flight_tokens: float
    waiting: float
    running: float
    kv_usage: float
    scrape_age_s: float


class Picture(Protocol):
    """The gateway's picture at the moment of a scrape."""

    def streams(self) -> list[StreamState]: ...
    def index(self) -> IndexState: ...
    def endpoints(self) -> list[EndpointState]: ...


TRUST_STATES = ("exact", "degraded", "blind")


_STREAM = ("endpoint", "rank")

PICTURE: dict[str, Definition] = {
    key: Definition(f"warmroute_{key}" + ("_total" if kind == "counter" else ""), kind, labels, help_)
    for key, kind, labels, help_ in (
        ("index_keys", "gauge", (), "Distinct block keys in the index."),
        ("index_entries", "gauge", (), "(key, endpoint) pairs in the index; entries / keys is the replication."),
        (
            "index_evicted",
            "counter",
            ("what",),
            "Keys and holders the index forgot because it was full. Growing means matches that are too short: raise "
            "maxKeys or maxHolders.",
        ),
        (
            "stream_trust",
            "gauge",
            (*_STREAM, "state", "reason"),
            "1 for the state a stream is in: exact, degraded or blind, with the reason. Anything but exact: look up the reason.",
        ),
        ("events", "counter", (*_STREAM, "kind"), "KV events applied, by kind."),
        ("events_skipped", "counter", (*_STREAM, "reason"), "KV events skipped, by reason. Should not grow."),
        ("stream_batches", "counter", _STREAM, "Batches of events applied, live or from a replay."),
        ("stream_gaps", "counter", _STREAM, "Sequence gaps seen. Growing means that the engine's PUB drops batches."),
        ("stream_replays", "counter", _STREAM, "Replays asked for: one at the first connection, then one per gap."),
        ("stream_sequence", "gauge", _STREAM, "Last sequence number applied; -1 before the first."),
        (
            "stream_last_event_age_seconds",
            "gauge",
            _STREAM,
            "Seconds since the last event; -1 before the first. An endpoint that serves new prompts and stays silent has a "
            "broken event wire.",
        ),
        (
            "stream_event_lag_seconds",
            "gauge",
            _STREAM,
            "From the engine's time of the last live batch to its being applied here. Negative or growing without load: the "
            "clocks differ. Growing with load: the gateway's event thread is behind.",
        ),
        (
            "endpoint_info",
            "gauge",
            (*_STREAM, "name", "role"),
            "Always 1; joins an endpoint's name and role to its other metrics. role is empty where there is no role label.",
        ),
        ("endpoint_up", "gauge", _STREAM, "1 while the endpoint takes requests."),
        ("endpoint_in_flight", "gauge", _STREAM, "Requests sent there and not finished."),
        ("endpoint_in_flight_tokens", "gauge", _STREAM, "Uncached prompt tokens sent there that await a first token."),
        ("endpoint_waiting", "gauge", _STREAM, "Waiting requests, as last scraped."),
        ("endpoint_running", "gauge", _STREAM, "Running requests, as last scraped."),
        ("endpoint_kv_usage", "gauge", _STREAM, "KV cache use 0..1, as last scraped."),
        ("endpoint_scrape_age_seconds", "gauge", _STREAM, "Age of the scraped load; -1 before the first scrape."),
    )
}


class PictureCollector(Collector):
    """Exports what the index, the streams and the fleet hold, read at scrape time."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def collect(self) -> Iterable[Metric]:
        families = {
            key: (CounterMetricFamily if d.kind == "counter" else GaugeMetricFamily)(
                d.name.removesuffix("_total"), d.help, labels=d.labels
            )
            for key, d in PICTURE.items()
        }

        def put(key: str, labels: tuple[str, ...], value: float) -> None:
            families[key].add_metric(labels, value)

        index = self._picture.index()
        put("index_keys", (), index.keys)
        put("index_entries", (), index.entries)
        put("index_evicted", ("keys",), index.evicted_keys)
        put("index_evicted", ("holders",), index.evicted_holders)
        for stream in self._picture.streams():
            label = (stream.endpoint, str(stream.rank))
            for state in TRUST_STATES:
                here = state == stream.state
                put("stream_trust", (*label, state, stream.reason if here else ""), float(here))
            for kind, count in stream.events.items():
                put("events", (*label, kind), count)
            for reason, count in stream.skipped.items():
                put("events_skipped", (*label, reason), count)
            put("stream_batches", label, stream.batches)
            put("stream_gaps", label, stream.gaps)
            put("stream_replays", label, stream.replays)
            put("stream_sequence", label, stream.sequence)
            put("stream_last_event_age_seconds", label, stream.last_event_age_s)
            put("stream_event_lag_seconds", label, stream.lag_s)
        for endpoint in self._picture.endpoints():
            label = (endpoint.endpoint, str(endpoint.rank))
            put("endpoint_info", (*label, endpoint.name, endpoint.role), 1.0)
            put("endpoint_up", label, float(endpoint.up))
            put("endpoint_in_flight", label, endpoint.in_flight)
            put("endpoint_in_flight_tokens", label, endpoint.in_flight_tokens)
            put("endpoint_waiting", label, endpoint.waiting)
            put("endpoint_running", label, endpoint.running)
            put("endpoint_kv_usage", label, endpoint.kv_usage)
            put("endpoint_scrape_age_seconds", label, endpoint.scrape_age_s)
        yield from families.values()
