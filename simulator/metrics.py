"""The /metrics page of a simulated engine: vLLM's names and labels, for what a router reads and a person checks."""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.engine import Engine
from simulator.sequence import Phase, Sequence

_SECONDS = (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5), *(0.75, 1.0, 2.5, 5.0, 7.5, 10, 20, 40, 80))
_TOKENS = (*(1, 2, 5, 10, 20, 50, 100, 200, 500), *(1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000))


class Observed(msgspec.Struct, frozen=True):
    """What the page shows of a server. `engine` is asked at every scrape, so that a restarted engine is seen."""

    model: str
    rank: int
    cache_config: Mapping[str, str]
    engine: Callable[[], Engine]
    leases_expired: Callable[[], int]

    @property
    def labels(self) -> dict[str, str]:
        return {"engine": str(self.rank), "model_name": self.model}


class EngineMetrics:
    """Histograms of finished requests; gauges and counters are read off the engine."""

    def __init__(self, observed: Observed) -> None:
        self._registry = CollectorRegistry()
        labels = observed.labels
        self._registry.register(_EngineCollector(observed))
        names, values = tuple(labels), tuple(labels.values())

        def histogram(name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"vllm:{name}", help_, names, buckets=buckets, registry=self._registry)
            return family.labels(*values)

        self._ttft = histogram("time_to_first_token_seconds", "Time to first token.", _SECONDS)
        self._e2e = histogram("e2e_request_latency_seconds", "Time from arrival to the last token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time before the first scheduling.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Time from scheduling to the first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Time from the first to the last token.", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._generation = histogram("request_generation_tokens", "Generated tokens.", _TOKENS)
        self._finished = Counter(
            "vllm:request_success", "Finished requests.", (*names, "finished_reason"), registry=self._registry
        )
        for reason in ("stop", "length", "abort", "error", "repetition"):
            self._finished.labels(*values, reason)
        self._values = values

    def observe(self, sequence: Sequence) -> None:
        """Count a finished request."""
        self._finished.labels(*self._values, sequence.finish_reason or "error").inc()
        self._prompt.observe(sequence.prompt_tokens)
        self._generation.observe(sequence.sampled)
        scheduled, first, end = sequence.scheduled_at, sequence.first_token_at, sequence.finished_at
        if scheduled is not None:
            self._queue.observe(scheduled - sequence.arrived)
        if scheduled is not None and first is not None:
            self._ttft.observe(first - sequence.arrived)
            self._prefill.observe(first - scheduled)
        if first is not None and end is not None:
            self._decode.observe(end - first)
            self._e2e.observe(end - sequence.arrived)

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, observed: Observed) -> None:
        self._observed = observed
        self._labels = observed.labels

    def collect(self) -> Iterable[Metric]:
        engine = self._observed.engine()
        counters = engine.counters
        waiting = len(engine.waiting)
        yield self._gauge("num_requests_running", "Requests in the batch.", len(engine.running))
        yield self._gauge("num_requests_waiting", "Requests waiting to be processed.", waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use by requests, 1 = all.", engine.kv_usage)
        deferred = sum(sequence.phase is Phase.LOADING for sequence in engine.waiting)
        yield self._gauges(
            "num_requests_waiting_by_reason", "reason", {"capacity": waiting - deferred, "deferred": deferred}
        )
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauges("engine_sleep_state", "sleep_state", states)
        cached = counters.prefix_hits + counters.external_hits
        for name, value in (
            ("prefix_cache_queries", counters.prefix_queries),
            ("prefix_cache_hits", counters.prefix_hits),
            ("external_prefix_cache_queries", counters.external_queries),
            ("external_prefix_cache_hits", counters.external_hits),
            ("prompt_tokens", counters.computed_prompt + cached),
            ("prompt_tokens_cached", cached),
            ("generation_tokens", counters.generated),
            ("num_preemptions", counters.preemptions),
            ("nixl_num_kv_expired_reqs", self._observed.leases_expired()),
        ):
            family = CounterMetricFamily(f"vllm:{name}", f"{name}, total.", labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), value)
            yield family
        sources = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by source.", labels=(*self._labels, "source")
        )
        for source, value in (
            ("local_compute", counters.computed_prompt),
            ("local_cache_hit", counters.prefix_hits),
            ("external_kv_transfer", counters.external_hits),
        ):
            sources.add_metric((*self._labels.values(), source), value)
        yield sources
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Cache configuration.", labels=("engine", *self._observed.cache_config)
        )
        info.add_metric((self._labels["engine"], *self._observed.cache_config.values()), 1)
        yield info

    def _gauge(self, name: str, help_: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", help_, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _gauges(self, name: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", f"By {label}.", labels=(*self._labels, label))
        for key, value in values.items():
            family.add_metric((*self._labels.values(), key), value)
        return family
