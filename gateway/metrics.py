"""What the gateway counts and measures itself, in one place; what it looks up when it is scraped is in picture_metrics and
part_metrics. docs/metrics.md is generated from all three.

Labels are bounded: endpoints by the fleet (`departed_series`), reasons and steps by fixed sets, models by `MAX_MODELS`.
A help text ends with what to do when the value looks wrong.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

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
Family = CounterMetricFamily | GaugeMetricFamily


class Definition(msgspec.Struct, frozen=True):
    """What docs/metrics.md says of one metric."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def families(definitions: Mapping[str, Definition]) -> dict[str, Family]:
    """An empty family for each, by its key; for metrics that are looked up when they are scraped."""
    return {
        key: (CounterMetricFamily if it.kind == "counter" else GaugeMetricFamily)(
            it.name.removesuffix("_total"), it.help, labels=it.labels
        )
        for key, it in definitions.items()
    }


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
        self.media_prompts = counter(
            "media_prompts",
            "Prompts with images, audio or video, by who tokenized them (local, engine) and outcome: named (all are known, the "
            "prompt matches to its end), unnamed (an engine told tokens without names: nothing matches from the first image on), "
            "image_refused (400), or why only the engine can read one and the prompt ends before it: image_url, image_data, "
            "image_model, image_options, media. image_model or unnamed growing: look them up in docs/tokenization.md.",
            ("source", "outcome"),
        )
        self.media_tokens = histogram(
            "media_prompt_tokens",
            "Tokens that the images in a prompt take, of prompts with an image whose place is known. Far from what the engine "
            "counts (cached_tokens_error under): its --mm-processor-kwargs are not the router's minPixels and maxPixels.",
            TOKEN_BUCKETS,
        )
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
            "Routed requests by how they ended: finished, aborted (the stream ended before the response did), error (the engine "
            "answered 5xx), or unread (finished or aborted, see streamed_replies).",
            ("endpoint", "end"),
        )
        self.streamed_replies = counter(
            "streamed_replies",
            "Streamed replies by whether they are read as they go by: yes, or no because warmroute.replyPiecesPerSecond is used "
            "up. Of the others first token, usage and abort are unknown: what is measured comes from the rest. Mostly no: the "
            "gateway is near what one process can read, see docs/performance.md.",
            ("read",),
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
        self.burst_group = histogram(
            "burst_group_requests",
            "Requests that a window placed, each by how many of the window begin as it does (alike) and how many of those it "
            "put on the same endpoint (together). alike far above together: maxPerReplica or the balance splits the groups.",
            WINDOW_BUCKETS,
            ("which",),
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

    def forget_endpoint(self, address: str, ranks: Iterable[int] = (0,)) -> None:
        """The endpoint is gone for good: its series go too."""
        for metric in self._by_endpoint:
            metric.remove_by_labels({"endpoint": address})
        for rank in ranks:
            self.alarm.remove_by_labels({"where": f"{address}/{rank}"})

    def model(self, name: str) -> str:
        """The label for a model name: itself, or `other` beyond MAX_MODELS different ones."""
        if name in self._models:
            return name
        if len(self._models) < MAX_MODELS:
            self._models.add(name)
            return name
        return OTHER
