"""llm-d's metrics, one row each: name, labels, and what ours they are made from. Data only.

The names and labels are llm-d-router's (snapshot ebab68792). ABSENT lists what is not exported, and why.
"""

import msgspec

PREFIX = "llm_d_epp_"

TTFT = (0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60, 120)
DURATION: tuple[float, ...] = (*TTFT, 180, 240, 300, 360, 480, 600, 900, 1200, 1800, 2700, 3600)
TPOT = (0.0005, 0.00205, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1, 1.5, 2)
NTPOT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SCHEDULER = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = tuple(float(2**n) for n in range(3, 18))
BYTES = tuple(float(2**n) for n in range(6, 31, 2))

BUCKETS: dict[str, tuple[float, ...]] = {
    "request_duration_seconds": DURATION,
    "request_size_bytes": BYTES,
    "response_size_bytes": BYTES,
    "request_input_tokens": (1.0, *TOKENS),
    "request_output_tokens": (1.0, *TOKENS),
    "request_cached_tokens": (0.0, *TOKENS),
    "request_ntpot_seconds": NTPOT,
    "request_ttft_seconds": TTFT,
    "request_streaming_tpot_seconds": TPOT,
    "scheduler_e2e_duration_seconds": SCHEDULER,
}


class Row(msgspec.Struct, frozen=True):
    """One metric. `observed`: recorded as it happens; otherwise derived when Prometheus asks."""

    name: str
    kind: str
    labels: tuple[str, ...]
    derived_from: str
    observed: bool = False

    @property
    def full(self) -> str:
        return PREFIX + self.name

    @property
    def help(self) -> str:
        return f"llm-d's name, for existing dashboards and alerts. From: {self.derived_from}"


_REQUEST = ("model_name", "target_model_name", "fairness_id", "priority")
_PLUGIN = ("plugin_name", "plugin_type")
_STAGES = (*_PLUGIN, "model_name", "decision_type")

ROWS: tuple[Row, ...] = (
    Row("request_total", "counter", _REQUEST, "every decided request", observed=True),
    Row(
        "request_error_total",
        "counter",
        (*_REQUEST, "error_code"),
        "rejections (400, 404, 412, 413 BadRequest; 429 InferencePoolResourceExhausted; 503 ServiceUnavailable; else "
        "Internal) and answers of 5xx (ModelServerError)",
        observed=True,
    ),
    Row("request_duration_seconds", "histogram", _REQUEST, "decision to the end of the response", observed=True),
    Row("request_size_bytes", "histogram", _REQUEST, "bodies as they came", observed=True),
    Row("response_size_bytes", "histogram", _REQUEST, "bodies that came by", observed=True),
    Row("request_input_tokens", "histogram", _REQUEST, "usage.prompt_tokens", observed=True),
    Row("request_output_tokens", "histogram", _REQUEST, "usage.completion_tokens", observed=True),
    Row("request_cached_tokens", "histogram", _REQUEST, "usage.prompt_tokens_details.cached_tokens", observed=True),
    Row("request_running", "gauge", _REQUEST, "routed requests whose response has not ended"),
    Row("request_ntpot_seconds", "histogram", _REQUEST, "duration / output tokens", observed=True),
    Row(
        "request_ttft_seconds",
        "histogram",
        (*_REQUEST, "streaming"),
        "decision to the first content, as warmroute_time_to_first_token_seconds",
        observed=True,
    ),
    Row(
        "request_streaming_tpot_seconds",
        "histogram",
        _REQUEST,
        "(end - first token) / (output tokens - 1), streams only",
        observed=True,
    ),
    Row(
        "scheduler_e2e_duration_seconds",
        "histogram",
        (),
        'warmroute_decision_step_seconds{step="total"}',
        observed=True,
    ),
    Row(
        "scheduler_attempts_total",
        "counter",
        ("status", "target_model_name", "endpoint_name", "namespace", "port"),
        "warmroute_decisions_total (endpoint_name is ip:port, namespace the ip) and rejections",
    ),
    Row("disagg_decision_total", "counter", _STAGES, "decisions of disagg-profile-handler by stages", observed=True),
    Row("pd_decision_total", "counter", _STAGES, "the same, without encode stages", observed=True),
    Row("ready_endpoints", "gauge", ("name",), "sum of warmroute_endpoint_up; name is always warmroute"),
    Row("average_kv_cache_utilization", "gauge", ("name",), "mean of warmroute_endpoint_kv_usage"),
    Row("average_queue_size", "gauge", ("name",), "mean of warmroute_endpoint_waiting"),
    Row("average_running_requests", "gauge", ("name",), "mean of warmroute_endpoint_running"),
    Row("std_dev_kv_cache_utilization", "gauge", ("name",), "standard deviation of warmroute_endpoint_kv_usage"),
    Row("std_dev_queue_size", "gauge", ("name",), "standard deviation of warmroute_endpoint_waiting"),
    Row("std_dev_running_requests", "gauge", ("name",), "standard deviation of warmroute_endpoint_running"),
    Row("per_endpoint_queue_size", "gauge", ("name", "model_server_endpoint"), "warmroute_endpoint_waiting"),
    Row(
        "inflight_requests",
        "gauge",
        ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority"),
        "warmroute_endpoint_in_flight; fairness_id and priority are empty",
    ),
    Row(
        "inflight_tokens",
        "gauge",
        ("endpoint_name", "namespace", "producer_name", "fairness_id", "priority"),
        "warmroute_endpoint_in_flight_tokens; fairness_id and priority are empty",
    ),
    Row("prefix_indexer_size", "gauge", _PLUGIN, "warmroute_index_entries"),
    Row("prefix_indexer_hit_ratio", "histogram", _PLUGIN, 'warmroute_match_fraction{which="chosen"}'),
    Row("kv_cache_index_admissions_total", "counter", (), "BlockStored events applied (llm-d counts keys)"),
    Row("kv_cache_index_evictions_total", "counter", (), "BlockRemoved events applied (llm-d counts keys)"),
    Row("kv_cache_index_lookup_requests_total", "counter", (), "requests that were matched"),
    Row("kv_cache_index_lookup_hits_total", "counter", (), "of these, where some endpoint held a block"),
    Row(
        "kv_cache_index_lookup_latency_seconds",
        "histogram",
        (),
        'warmroute_decision_step_seconds{step="match"}, with its buckets from 50 us',
    ),
    Row(
        "kv_cache_events_stores_skipped_total",
        "counter",
        ("cache_kind", "reason"),
        "warmroute_events_skipped_total: tokens_do_not_fit is non_dense_block_span, block_size_conflict is "
        "invalid_block_size, all others keep their reason; cache_kind is empty",
    ),
    Row("kv_cache_events_active_subscribers", "gauge", (), "streams that are listened to"),
    Row(
        "kv_cache_events_subscriber_messages_received_total",
        "counter",
        ("pod_identifier",),
        "warmroute_stream_batches_total; pod_identifier is ip:port",
    ),
    Row("datalayer_poll_errors_total", "counter", ("source_type",), "warmroute_scrapes_total other than ok"),
    Row("extproc_streams_inflight", "gauge", (), "warmroute_extproc_streams_open"),
    Row("extproc_streams_total", "counter", ("code",), 'warmroute_extproc_total{event="streams"}; code is always OK'),
    Row("flow_control_queue_size", "gauge", ("inference_pool",), "warmroute_queue_waiting"),
    Row(
        "flow_control_requests_total", "counter", ("outcome", "inference_pool"), "warmroute_queue_wait_seconds, counted"
    ),
    Row(
        "flow_control_request_queue_duration_seconds",
        "histogram",
        ("outcome", "inference_pool"),
        "warmroute_queue_wait_seconds by llm-d's outcomes; requests that went at once are not in it",
    ),
    Row("info", "gauge", ("commit", "build_ref"), "the version"),
)

ABSENT: dict[str, str] = {
    "request_streaming_itl_seconds": "single tokens are not timed; request_streaming_tpot_seconds is their mean",
    "request_processing_duration_seconds, response_processing_duration_seconds": "warmroute_decision_step_seconds has every step",
    "plugin_duration_seconds": "scorers are a few microseconds each; `explain` shows what they said",
    "prefix_indexer_hit_bytes": "matches are in tokens: warmroute_match_tokens",
    "kv_cache_index_max_pod_hit_count_total": 'warmroute_match_tokens_sum{which="best"}, in tokens',
    "kv_cache_events_removals_skipped_total, kv_cache_events_dedup_*": "warmroute_events_skipped_total has removals too",
    "kv_cache_events_pool_*": "there is no queue between socket and index",
    "kv_cache_events_subscriber_reconnections_total, kv_cache_events_zmq_errors_total": "warmroute_stream_trust says it by state",
    "flow_control_* other than the three above, encoder_cache_*, program_aware_*, request_predicted_*, "
    "disaggregatedset_*": "the features do not exist here",
    "names with the older prefixes (inference_extension_, inference_pool_, llm_d_inference_scheduler_)": "llm-d itself is "
    "removing them",
}
