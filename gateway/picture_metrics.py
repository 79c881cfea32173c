"""Metrics of the gateway's picture, read when it is scraped: the index, the event streams, the endpoints."""

from collections.abc import Iterable
from typing import Protocol

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.metrics import Definition, families


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
        found = families(PICTURE)

        def put(key: str, labels: tuple[str, ...], value: float) -> None:
            found[key].add_metric(labels, value)

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
        yield from found.values()
