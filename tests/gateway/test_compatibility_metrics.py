"""llm-d's names: there only when asked for, complete, and with the numbers llm-d's users expect."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.compatibility_metrics import MAX_FAIRNESS_IDS, CompatibilityMetrics
from gateway.compatibility_names import ABSENT, PREFIX, ROWS
from gateway.extproc.usage import Usage
from gateway.metrics import Metrics
from gateway.part_metrics import Sample
from gateway.picture_metrics import EndpointState, IndexState, StreamState
from gateway.request_events import Customer, DecidedRequest, EndedResponse


class Picture:
    def streams(self) -> list[StreamState]:
        skipped = {"tokens_do_not_fit": 3, "unsupported_cache_kind": 2, "bad_event": 1}
        return [
            StreamState(
                endpoint=f"10.0.0.{n}:8000", rank=0, state="exact", reason="none", detail="", events={"BlockStored": 5},
                skipped=skipped if n == 1 else {}, gaps=0, replays=0, sequence=7, last_event_age_s=0.1, batches=8,
            )
            for n in (1, 2)
        ]  # fmt: skip

    def index(self) -> IndexState:
        return IndexState(keys=10, entries=12, evicted_keys=0, evicted_holders=0)

    def endpoints(self) -> list[EndpointState]:
        return [
            EndpointState(
                name=f"engine-{n}", namespace="default", endpoint=f"10.0.0.{n}:8000", rank=0, role="", up=n == 1,
                in_flight=n, in_flight_tokens=100.0 * n, waiting=2.0 * n, running=n, kv_usage=0.25 * n, scrape_age_s=0.1,
            )
            for n in (1, 2)
        ]  # fmt: skip


class Parts:
    def samples(self) -> Iterable[Sample]:
        yield "scrapes", ("metrics", "ok"), 100
        yield "scrapes", ("metrics", "timeout"), 4
        yield "extproc", ("streams",), 50


class World:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        CompatibilityMetrics(self.registry, self.metrics, Picture(), Parts())

    def values(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sample.labels.items() if value)
                found[f"{sample.name}{{{labels}}}"] += sample.value  # type: ignore[assignment]
        return found

    def decide(self, rejected: int | None = None, stages: str | None = None, fairness: str = "tenant") -> None:
        customer = Customer(model="m", fairness_id=fairness, priority=1)
        decided = DecidedRequest(customer=customer, rejected=rejected, seconds=0.0004, body_bytes=900, stages=stages)
        for tell in self.metrics.when_decided:
            tell(decided)
        for told in self.metrics.when_sent if rejected is None else ():
            told(customer)

    def end(self, end: str = "finished") -> None:
        usage = Usage(prompt_tokens=100, completion_tokens=11, cached_tokens=64) if end == "finished" else None
        for tell in self.metrics.when_ended:
            tell(
                EndedResponse(
                    customer=Customer(model="m", fairness_id="tenant", priority=1),
                    end=end,
                    status=500 if end == "error" else 200,
                    streaming=True,
                    sent_at=10.0,
                    first_token_at=10.5,
                    ended_at=11.5,
                    body_bytes=4000,
                    usage=usage,
                )
            )


OF = "model_name=m,target_model_name=m,fairness_id=tenant,priority=1"


def labelled(values: Counter[str], name: str, labels: str) -> float:
    """The value of a series; the order of labels does not matter."""
    wanted = sorted(labels.split(",")) if labels else []
    for key, value in values.items():
        found, _, rest = key.partition("{")
        if found == PREFIX + name and sorted(filter(None, rest.rstrip("}").split(","))) == wanted:
            return value
    raise AssertionError(f"no {name}{{{labels}}}")


def test_without_the_switch_nothing_of_llmd_is_exported() -> None:
    registry = CollectorRegistry()
    Metrics(registry)
    assert PREFIX not in generate_latest(registry).decode()


def test_every_name_of_the_table_is_exported_with_its_kind_and_help() -> None:
    text = generate_latest(World().registry).decode()
    types = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {row.full: row.kind for row in ROWS} == {
        name: kind for name, kind in types.items() if name.startswith(PREFIX)
    }
    assert not {row.name for row in ROWS} & {name.strip() for names in ABSENT for name in names.split(",")}


def test_rejections_are_errors_with_llmds_codes_and_run_nowhere() -> None:
    world = World()
    for status in (400, 404, 429, 503, 500):
        world.decide(rejected=status)
    values = world.values()
    assert labelled(values, "request_total", OF) == 5
    codes = {"BadRequest": 2, "InferencePoolResourceExhausted": 1, "ServiceUnavailable": 1, "Internal": 1}
    for code, count in codes.items():
        assert labelled(values, "request_error_total", f"{OF},error_code={code}") == count
    assert labelled(values, "scheduler_attempts_total", "status=failure,target_model_name=m") == 5


def test_a_finished_response_gives_durations_and_tokens_of_its_customer() -> None:
    world = World()
    world.decide(stages="prefill-decode")
    assert labelled(world.values(), "request_running", OF) == 1
    world.end()
    values = world.values()
    assert labelled(values, "request_running", OF) == 0
    assert labelled(values, "request_duration_seconds_sum", OF) == 1.5
    assert labelled(values, "request_ttft_seconds_sum", f"{OF},streaming=true") == 0.5
    assert labelled(values, "request_streaming_tpot_seconds_sum", OF) == 0.1
    assert labelled(values, "request_cached_tokens_sum", OF) == 64
    plugin = "plugin_name=disagg-profile-handler,plugin_type=disagg-profile-handler,model_name=m"
    for name in ("disagg_decision_total", "pd_decision_total"):
        assert labelled(values, name, f"{plugin},decision_type=prefill-decode") == 1


def test_an_engines_error_is_counted_and_its_duration_is_not() -> None:
    world = World()
    world.decide()
    world.end("error")
    values = world.values()
    assert labelled(values, "request_error_total", f"{OF},error_code=ModelServerError") == 1
    assert not [key for key in values if key.startswith(f"{PREFIX}request_duration_seconds_count")]


def test_fairness_ids_beyond_the_limit_share_one_label() -> None:
    world = World()
    for number in range(MAX_FAIRNESS_IDS + 20):
        world.decide(fairness=f"t{number}")
    series = [key for key in world.values() if key.startswith(f"{PREFIX}request_total{{")]
    assert len(series) == MAX_FAIRNESS_IDS + 1
    assert sum("fairness_id=other" in key for key in series) == 1


def test_what_is_derived_follows_from_picture_and_parts() -> None:
    world = World()
    world.metrics.match_fraction.labels("10.0.0.1:8000", "chosen").observe(0.5)
    world.metrics.match_fraction.labels("10.0.0.2:8000", "chosen").observe(0.9)
    world.metrics.match_fraction.labels("10.0.0.2:8000", "best").observe(1.0)
    for tokens in (0, 0, 128):
        world.metrics.match_tokens.labels("best").observe(tokens)
    world.metrics.decisions.labels("10.0.0.2:8000", "most_cached").inc(3)
    world.metrics.decisions.labels("10.0.0.2:8000", "part_cached").inc(1)
    world.metrics.queue_wait.labels("sent").observe(0.2)
    values = world.values()
    plugin = "plugin_name=precise-prefix-cache-producer,plugin_type=precise-prefix-cache-producer"
    for name, labels, value in (
        ("ready_endpoints", "name=warmroute", 1),
        ("average_queue_size", "name=warmroute", 3),
        ("std_dev_queue_size", "name=warmroute", 1),
        ("average_kv_cache_utilization", "name=warmroute", 0.375),
        ("per_endpoint_queue_size", "name=warmroute,model_server_endpoint=engine-2", 4),
        ("prefix_indexer_size", plugin, 12),
        ("prefix_indexer_hit_ratio_count", plugin, 2),
        ("prefix_indexer_hit_ratio_bucket", f"{plugin},le=0.5", 1),
        ("kv_cache_index_lookup_requests_total", "", 3),
        ("kv_cache_index_lookup_hits_total", "", 1),
        ("kv_cache_index_admissions_total", "", 10),
        ("kv_cache_events_stores_skipped_total", "reason=unsupported_cache_kind", 2),
        ("kv_cache_events_stores_skipped_total", "reason=non_dense_block_span", 3),
        ("kv_cache_events_stores_skipped_total", "reason=invalid_block_size", 0),
        ("kv_cache_events_subscriber_messages_received_total", "pod_identifier=10.0.0.1:8000", 8),
        ("datalayer_poll_errors_total", "source_type=metrics-data-source", 4),
        ("scheduler_attempts_total", "status=success,endpoint_name=10.0.0.2:8000,namespace=10.0.0.2,port=8000", 4),
        ("flow_control_requests_total", "outcome=Dispatched,inference_pool=warmroute", 1),
        ("extproc_streams_total", "code=OK", 50),
    ):
        assert labelled(values, name, labels) == value, name
