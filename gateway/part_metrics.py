"""Metrics of what the parts count themselves, read at scrape time: tokenizers, key chains, scraper, books, breaker, ext-proc.

The parts know nothing of Prometheus: each has plain counters, and PARTS says what they are called. A reload makes new
tokenizers, whose counters begin at zero again; Prometheus takes that as a restart.
"""

import platform
from collections.abc import Iterable
from importlib.metadata import version
from typing import Protocol

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fleet.books import Counts as BookCounts
from gateway.metrics import Definition, families

Sample = tuple[str, tuple[str, ...], float]
"""Key in PARTS, label values, value."""


def _definitions(*rows: tuple[str, str, tuple[str, ...], str]) -> dict[str, Definition]:
    return {
        key: Definition(f"warmroute_{key}" + ("_total" if kind == "counter" else ""), kind, labels, help_)
        for key, kind, labels, help_ in rows
    }


_CACHE = ("tokenizer",)

PARTS = _definitions(
    ("build_info", "gauge", ("version", "python"), "Always 1; the labels say what runs."),
    (
        "tokenizer_outcomes",
        "counter",
        ("tokenizer", "backend", "outcome"),
        "Requests by what their tokenizer made of them: ok, given (the prompt was token ids), or the reason of an error or a "
        "fallback. Anything else growing: the prefix cache is not used for these requests; image_* and media: not behind the "
        "first image, audio or video that only the engine can read.",
    ),
    ("segment_cache_hits", "counter", _CACHE, "Pieces of prompts (turns) whose token ids were remembered."),
    (
        "segment_cache_misses",
        "counter",
        _CACHE,
        "Pieces of prompts that had to be encoded. As many as hits in chat traffic: the cache is too small, or the template "
        "rewrites history.",
    ),
    ("segment_cache_hit_tokens", "counter", _CACHE, "Tokens that came out of the segment cache."),
    ("segment_cache_miss_tokens", "counter", _CACHE, "Tokens that were encoded."),
    ("segment_cache_evicted", "counter", _CACHE, "Pieces given up because the cache was full."),
    (
        "tokenizer_images",
        "counter",
        ("tokenizer", "outcome"),
        "Images in prompts: known (seen before), read, unreadable. Far more read than known in chat traffic: clients encode the "
        "same image anew every turn.",
    ),
    ("segment_cache_bytes", "gauge", _CACHE, "Bytes held by the segment cache."),
    ("key_chain_hit_keys", "counter", (), "Block keys taken from the chains of earlier turns."),
    (
        "key_chain_computed_keys",
        "counter",
        (),
        "Block keys that were hashed. Far more than hit keys in chat traffic: turns are not recognized.",
    ),
    ("key_chain_keys", "gauge", (), "Block keys held by the key-chain cache."),
    (
        "scrapes",
        "counter",
        ("page", "outcome"),
        "Answers of model servers to the scraper, by page and outcome: ok, or timeout, connection, status-4xx, status-5xx, "
        "unreadable, internal. Load is stale where ok does not grow.",
    ),
    (
        "books",
        "counter",
        ("event",),
        "What happened to reservations: reserved, finished, expired (nothing was heard of it), reconciled (the engine was "
        "idle), forgotten (its endpoint went away), unknown. expired or reconciled growing: responses do not come by the "
        "gateway, look at Envoy's processing mode.",
    ),
    ("books_open", "gauge", (), "Requests in the books."),
    ("breaker_trips", "counter", (), "Times an endpoint's circuit opened. The log says which and why."),
    (
        "extproc",
        "counter",
        ("event",),
        "ext-proc streams and what became of them: streams, decided, rejected, finished, aborted, decide_timeouts, "
        "decide_cancelled, and our own faults decide_errors, observer_errors, protocol_errors, internal_errors, which should "
        "stay at zero. With transport http2 also connections, connection_errors (a peer that broke HTTP/2), refused_calls "
        "and resets (the proxy ends every stream with one).",
    ),
    (
        "extproc_transport",
        "gauge",
        ("transport", "configured"),
        "Always 1; what carries ext-proc (http2 or grpcio), and what warmroute.transport says. grpcio where auto is configured: "
        "libnghttp2 cannot be loaded, and gateway and Envoy need more CPU; the log's transport_fallback says why.",
    ),
    (
        "event_errors",
        "counter",
        (),
        "Messages of event streams that our own code failed on. Should stay at zero: see the log.",
    ),
    (
        "predicted_blocks",
        "counter",
        ("end",),
        "Blocks that were expected of an engine because a prompt was just sent to it (speculativeIndexing), by how that "
        "ended: confirmed by its events, expired, released (the request failed), evicted. Many expired: events come late, "
        "raise speculativeTTL, or not at all.",
    ),
    ("predicted_blocks_open", "gauge", (), "Blocks expected now."),
    (
        "dynamo_up",
        "gauge",
        (),
        "1 while events of Dynamo workers can be heard, 0 while something is wrong with the subscription as a whole: look at "
        "the log and at /state/dynamo.",
    ),
    (
        "dynamo_messages",
        "counter",
        ("source",),
        "Messages with events of Dynamo workers: wanted, or of elsewhere (another namespace or component).",
    ),
    (
        "dynamo_unknown_worker_events",
        "counter",
        (),
        "Events of workers that no endpoint stands for. Growing: add them to warmroute.dynamo.endpoints or its file.",
    ),
    (
        "dynamo_skipped",
        "counter",
        ("reason",),
        "What could not be used of those messages before it was known whose it is. Should not grow.",
    ),
)

EXTPROC_EVENTS = (
    *("streams", "decided", "rejected", "finished", "aborted", "decide_timeouts", "decide_cancelled"),
    *("decide_errors", "observer_errors", "protocol_errors", "internal_errors"),
    *("connections", "connection_errors", "refused_calls", "resets"),
)


class Parts(Protocol):
    """Whoever can list the samples of all parts."""

    def samples(self) -> Iterable[Sample]: ...


class PartCollector(Collector):
    """Exports PARTS."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        found = families(PARTS)
        found["build_info"].add_metric((version("warmroute"), platform.python_version()), 1)
        for key, labels, value in self._parts.samples():
            found[key].add_metric(labels, value)
        yield from found.values()


def of_books(counts: BookCounts, still_open: int) -> Iterable[Sample]:
    """The samples of the books."""
    for event, count in msgspec.structs.asdict(counts).items():
        yield "books", (event,), count
    yield "books_open", (), still_open
