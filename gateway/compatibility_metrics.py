"""llm-d's metric names, for people whose dashboards and alerts know them (`warmroute.compatibilityMetrics: true`).

Two kinds: what has to be observed as it happens, because our own metrics do not know the labels (ROWS of kind histogram with
"observed"), and what is derived at scrape time from what is there anyway. DERIVED_FROM in each row says which and how;
docs/metrics.md shows the table. Source: llm-d-router, snapshot ebab68792.
"""

import collections
import math
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.compatibility_names import BUCKETS, ROWS, Row
from gateway.metrics import Metrics
from gateway.part_metrics import Parts
from gateway.picture_metrics import EndpointState, Picture
from gateway.request_events import Customer, DecidedRequest, EndedResponse

POOL = "warmroute"
"""Value of the label `name`, llm-d's pool."""
PRODUCER = "precise-prefix-cache-producer"
MAX_FAIRNESS_IDS = 100

ERROR_CODES = {400: "BadRequest", 404: "BadRequest", 412: "BadRequest", 413: "BadRequest", 503: "ServiceUnavailable"}
STORE_SKIPS = {"tokens_do_not_fit": "non_dense_block_span", "block_size_conflict": "invalid_block_size"}
"""Our reason -> llm-d's; all others keep their name."""
QUEUE_OUTCOMES = {
    "sent": "Dispatched",
    "cancelled": "EvictedContextCancelled",
    "rejected-ttl-expired": "EvictedTTL",
    "rejected-saturated": "RejectedCapacity",
    "evicted-queue-pressure": "RejectedCapacity",
}


class CompatibilityMetrics(Collector):
    """Registers itself and what it observes in `registry`, and listens to `metrics`."""

    def __init__(self, registry: CollectorRegistry, metrics: Metrics, picture: Picture, parts: Parts) -> None:
        self._metrics, self._picture, self._parts = metrics, picture, parts
        self._fairness: set[str] = set()
        self._running: collections.Counter[tuple[str, ...]] = collections.Counter()
        self._failed_attempts: collections.Counter[str] = collections.Counter()
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in ROWS:
            if row.observed and row.kind == "counter":
                self._counters[row.name] = Counter(
                    row.full.removesuffix("_total"), row.help, row.labels, registry=registry
                )
            elif row.observed and row.kind == "histogram":
                buckets = BUCKETS[row.name]
                self._histograms[row.name] = Histogram(
                    row.full, row.help, row.labels, buckets=buckets, registry=registry
                )
        registry.register(self)
        metrics.when_decided.append(self._decided)
        metrics.when_sent.append(self._sent)
        metrics.when_ended.append(self._ended)

    # Observed

    def _labels(self, customer: Customer) -> tuple[str, str, str, str]:
        model, fairness = self._metrics.model(customer.model), customer.fairness_id
        if fairness not in self._fairness:
            if len(self._fairness) >= MAX_FAIRNESS_IDS:
                fairness = "other"
            else:
                self._fairness.add(fairness)
        return model, model, fairness, str(customer.priority)

    def _decided(self, decided: DecidedRequest) -> None:
        labels = self._labels(decided.customer)
        self._counters["request_total"].labels(*labels).inc()
        self._histograms["request_size_bytes"].labels(*labels).observe(decided.body_bytes)
        self._histograms["scheduler_e2e_duration_seconds"].observe(decided.seconds)
        if decided.rejected is not None:
            code = ERROR_CODES.get(decided.rejected, "Internal")
            code = "InferencePoolResourceExhausted" if decided.rejected == 429 else code
            self._counters["request_error_total"].labels(*labels, code).inc()
            self._failed_attempts[labels[0]] += 1
        if decided.stages is not None:
            plugin = ("disagg-profile-handler", "disagg-profile-handler", labels[0], decided.stages)
            self._counters["disagg_decision_total"].labels(*plugin).inc()
            if not decided.stages.startswith("encode"):
                self._counters["pd_decision_total"].labels(*plugin).inc()

    def _sent(self, customer: Customer) -> None:
        self._running[self._labels(customer)] += 1

    def _ended(self, ended: EndedResponse) -> None:
        labels = self._labels(ended.customer)
        self._running[labels] -= 1
        if ended.end == "error":
            self._counters["request_error_total"].labels(*labels, "ModelServerError").inc()
        if ended.end != "finished":
            return
        seconds = ended.ended_at - ended.sent_at
        self._observe("request_duration_seconds", labels, seconds)
        self._observe("response_size_bytes", labels, ended.body_bytes)
        if ended.first_token_at is not None:
            streaming = (*labels, "true" if ended.streaming else "false")
            self._observe("request_ttft_seconds", streaming, ended.first_token_at - ended.sent_at)
        if (usage := ended.usage) is None:
            return
        for name, tokens in (
            ("request_input_tokens", usage.prompt_tokens),
            ("request_output_tokens", usage.completion_tokens),
            ("request_cached_tokens", usage.cached_tokens),
        ):
            if tokens is not None:
                self._observe(name, labels, tokens)
        if usage.completion_tokens:
            self._observe("request_ntpot_seconds", labels, seconds / usage.completion_tokens)
            if ended.streaming and ended.first_token_at is not None and usage.completion_tokens > 1:
                apart = (ended.ended_at - ended.first_token_at) / (usage.completion_tokens - 1)
                self._observe("request_streaming_tpot_seconds", labels, apart)

    def _observe(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self._histograms[name].labels(*labels).observe(value)

    # Derived

    def collect(self) -> Iterable[Metric]:
        found: dict[str, list[tuple[tuple[str, ...], float]]] = collections.defaultdict(list)
        self._of_endpoints(self._picture.endpoints(), found)
        self._of_streams(found)
        self._of_parts(found)
        index = self._picture.index()
        found["prefix_indexer_size"].append(((PRODUCER, PRODUCER), index.entries))
        found["info"].append(((version("warmroute"), "warmroute"), 1))
        for labels, count in dict(self._running).items():
            found["request_running"].append((labels, count))
        histograms = self._of_histograms(found)
        for row in ROWS:
            if row.observed or row.kind == "histogram":
                continue
            family = (CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily)(
                row.full.removesuffix("_total"), row.help, labels=row.labels
            )
            for labels, value in found[row.name]:
                family.add_metric(labels, value)
            yield family
        yield from histograms

    @staticmethod
    def _of_endpoints(endpoints: list[EndpointState], found: dict[str, list[tuple[tuple[str, ...], float]]]) -> None:
        found["ready_endpoints"].append(((POOL,), sum(endpoint.up for endpoint in endpoints)))
        columns = {
            "kv_cache_utilization": [endpoint.kv_usage for endpoint in endpoints],
            "queue_size": [endpoint.waiting for endpoint in endpoints],
            "running_requests": [endpoint.running for endpoint in endpoints],
        }
        for name, values in columns.items():
            if values:
                found[f"average_{name}"].append(((POOL,), float(np.mean(values))))
                found[f"std_dev_{name}"].append(((POOL,), float(np.std(values))))
        for endpoint in endpoints:
            found["per_endpoint_queue_size"].append(((POOL, endpoint.name), endpoint.waiting))
            labels = (endpoint.name, endpoint.namespace, PRODUCER, "", "")
            found["inflight_requests"].append((labels, endpoint.in_flight))
            found["inflight_tokens"].append((labels, endpoint.in_flight_tokens))

    def _of_streams(self, found: dict[str, list[tuple[tuple[str, ...], float]]]) -> None:
        skipped: collections.Counter[str] = collections.Counter()
        stored = removed = listening = 0
        for stream in self._picture.streams():
            listening += stream.reason != "no_events"
            stored += stream.events.get("BlockStored", 0)
            removed += stream.events.get("BlockRemoved", 0)
            found["kv_cache_events_subscriber_messages_received_total"].append(((stream.endpoint,), stream.batches))
            for reason, count in stream.skipped.items():
                skipped[STORE_SKIPS.get(reason, reason)] += count
        found["kv_cache_events_active_subscribers"].append(((), listening))
        found["kv_cache_index_admissions_total"].append(((), stored))
        found["kv_cache_index_evictions_total"].append(((), removed))
        for reason in sorted({"unsupported_cache_kind", "invalid_block_size", "non_dense_block_span", *skipped}):
            found["kv_cache_events_stores_skipped_total"].append((("", reason), skipped[reason]))

    def _of_parts(self, found: dict[str, list[tuple[tuple[str, ...], float]]]) -> None:
        errors: collections.Counter[str] = collections.Counter()
        for key, labels, value in self._parts.samples():
            if key == "scrapes" and labels[1] != "ok":
                errors[f"{labels[0]}-data-source"] += int(value)
            elif key == "extproc" and labels == ("streams",):
                found["extproc_streams_total"].append((("OK",), value))
        for source in sorted({"metrics-data-source", *errors}):
            found["datalayer_poll_errors_total"].append(((source,), errors[source]))
        found["extproc_streams_inflight"].append(((), _value(self._metrics.streams_open)))

    def _of_histograms(self, found: dict[str, list[tuple[tuple[str, ...], float]]]) -> list[Metric]:
        metrics = self._metrics
        match = _merged(metrics.step, lambda labels: () if labels["step"] == "match" else None)
        best = _merged(metrics.match_tokens, lambda labels: () if labels["which"] == "best" else None)
        lookups, hits = best.get((), _Merged()), 0.0
        hits = lookups.count - lookups.buckets.get(0.0, 0.0)
        found["kv_cache_index_lookup_requests_total"].append(((), lookups.count))
        found["kv_cache_index_lookup_hits_total"].append(((), hits))
        for sample in _samples(metrics.decisions):
            host, _, port = sample[0]["endpoint"].rpartition(":")
            found["scheduler_attempts_total"].append((("success", "", sample[0]["endpoint"], host, port), sample[1]))
        for model, count in dict(self._failed_attempts).items():
            found["scheduler_attempts_total"].append((("failure", model, "", "", ""), count))
        found["scheduler_attempts_total"] = _summed(found["scheduler_attempts_total"])
        waits = _merged(metrics.queue_wait, lambda labels: (QUEUE_OUTCOMES.get(labels["outcome"], "RejectedOther"),))
        found["flow_control_queue_size"].append(((POOL,), _value(metrics.queue_waiting)))
        for (outcome,), merged in waits.items():
            found["flow_control_requests_total"].append(((outcome, POOL), merged.count))
        ratio = _merged(metrics.match_fraction, lambda labels: () if labels["which"] == "chosen" else None)
        return [
            _family("kv_cache_index_lookup_latency_seconds", match),
            _family("prefix_indexer_hit_ratio", {(PRODUCER, PRODUCER): ratio[()]} if ratio else {}),
            _family(
                "flow_control_request_queue_duration_seconds", {(*key, POOL): merged for key, merged in waits.items()}
            ),
        ]


class _Merged(msgspec.Struct):
    """A histogram summed over labels; `buckets` are cumulative, by upper bound."""

    buckets: dict[float, float] = {}
    count: float = 0.0
    total: float = 0.0


def _samples(metric: Counter) -> Iterable[tuple[Mapping[str, str], float]]:
    for family in metric.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                yield sample.labels, sample.value


def _value(gauge: Collector) -> float:
    return sum(sample.value for family in gauge.collect() for sample in family.samples)


def _merged(
    histogram: Histogram, key_of: Callable[[Mapping[str, str]], tuple[str, ...] | None]
) -> dict[tuple[str, ...], _Merged]:
    """Sum a histogram by `key_of` its labels; None leaves a series out."""
    merged: dict[tuple[str, ...], _Merged] = {}
    for family in histogram.collect():
        for sample in family.samples:
            key = key_of(sample.labels)
            if key is None:
                continue
            into = merged.setdefault(key, _Merged())
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels["le"])
                into.buckets[bound] = into.buckets.get(bound, 0.0) + sample.value
            elif sample.name.endswith("_count"):
                into.count += sample.value
            elif sample.name.endswith("_sum"):
                into.total += sample.value
    return merged


def _summed(rows: list[tuple[tuple[str, ...], float]]) -> list[tuple[tuple[str, ...], float]]:
    sums: collections.Counter[tuple[str, ...]] = collections.Counter()
    for labels, value in rows:
        sums[labels] += value  # type: ignore[assignment]
    return list(sums.items())


def _family(name: str, by_labels: Mapping[tuple[str, ...], _Merged]) -> Metric:
    row: Row = next(row for row in ROWS if row.name == name)
    family = HistogramMetricFamily(row.full, row.help, labels=row.labels)
    for labels, merged in by_labels.items():
        bounds = sorted(merged.buckets.items())
        family.add_metric(
            labels, [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in bounds], merged.total
        )
    return family
