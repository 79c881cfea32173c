"""Is every event stream connected to the engine it belongs to?

What arrives is believed before what anybody says: an engine's own list of event sources only explains a silence.
"""

import json
from collections.abc import Iterator, Sequence

from event_ingest.events import BlockStored
from event_ingest.sockets import BIND, port_of
from fleet.endpoint import Endpoint
from gateway.doctor.facts import Facts, Probe, Source, Stream
from gateway.doctor.findings import Finding, check, found


def without_events(facts: Facts) -> str:
    """Event checks need somebody who wants events, and endpoints."""
    if not facts.endpoints:
        return "no endpoints are known"
    return (
        "" if facts.config.precise else "the configuration has no precise-prefix-cache-producer, so no events are used"
    )


def streams_needed(facts: Facts) -> str:
    return without_events(facts) or ("" if facts.streams else "no endpoint has an event address")


def events_flag(port: int, replay: int | None = None) -> str:
    """The engine's option that publishes events on a port."""
    settings: dict[str, object] = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
    if replay:
        settings["replay_endpoint"] = f"tcp://*:{replay}"
    return f"--kv-events-config '{json.dumps(settings)}'"


def base_ports(endpoint: Endpoint) -> tuple[int, int | None]:
    """What rank 0 of this endpoint's engine should publish and replay on."""
    port = (port_of(endpoint.events) if endpoint.events else 5557) - endpoint.rank
    replay = port_of(endpoint.replay) - endpoint.rank if endpoint.replay else None
    return port, replay if replay and replay != port else port + 100


def entry(facts: Facts, endpoint: Endpoint) -> str:
    """Words that locate an endpoint's entry for whoever has to change it."""
    return f"endpoint {endpoint.name!r} ({facts.config.file}, or the file that its discovery reads)"


def own_events(stream: Stream, probe: Probe | None) -> list[BlockStored]:
    """Blocks heard on a stream that hold this probe's prompt; any block where the prompt's ids are not known."""
    stored = [event for heard in stream.heard for event in heard.stored()]
    if probe is None or not probe.engine_ids:
        return stored
    prompt = ids_bytes(probe.engine_ids)
    return [event for event in stored if event.tokens and _holds(prompt, event.tokens)]


def heard_own(stream: Stream, probe: Probe | None, probes: Sequence[Probe]) -> bool:
    """Whether a stream announced this probe's own part, and not only blocks that other engines' prompts have too."""
    events = own_events(stream, probe)
    if probe is None or not probe.engine_ids:
        return bool(events)
    others = [ids_bytes(it.engine_ids) for it in probes if it is not probe and it.engine_ids]
    return any(not any(_holds(prompt, event.tokens) for prompt in others) for event in events)


def ids_bytes(ids: Sequence[int]) -> bytes:
    return b"".join(int(token).to_bytes(4, "little") for token in ids)


def _holds(prompt: bytes, tokens: bytes) -> bool:
    at = prompt.find(tokens)
    while at >= 0 and at % 4:
        at = prompt.find(tokens, at + 1)
    return at >= 0


def publishes(facts: Facts, endpoint: Endpoint) -> bool:
    """Whether this endpoint's engine is there and has not said that it publishes nothing: those are findings of their own."""
    engine, source = facts.engine_of(endpoint), facts.source_of(endpoint)
    if engine is not None and (engine.error or (engine.sources is not None and not engine.sources)):
        return False
    return source is None or source.enabled


# --- published at all?


@check("events-enabled", "engines publish KV events", {"events-not-enabled": "error"}, without_events)
def events_enabled(facts: Facts) -> Iterator[Finding]:
    for endpoint in facts.endpoints:
        source, engine = facts.source_of(endpoint), facts.engine_of(endpoint)
        stream = facts.stream_of(endpoint)
        if (stream is not None and stream.heard) or facts.by_dynamo(endpoint):
            continue
        silent = engine is not None and engine.sources is not None and not engine.sources
        if silent or (source is not None and not source.enabled):
            yield found(
                "events-not-enabled",
                endpoint.name,
                f"GET {endpoint.url}/kv_event_sources: "
                + ("{}" if silent else "enable_kv_cache_events is false, or the publisher is null"),
                f"start the engine with {events_flag(*base_ports(endpoint))}",
            )


@check(
    "event-addresses",
    "every publishing engine has an event address",
    {"event-address-missing": "error"},
    without_events,
)
def event_addresses(facts: Facts) -> Iterator[Finding]:
    for endpoint in facts.endpoints:
        source = facts.source_of(endpoint)
        if endpoint.events is None and source is not None and source.enabled and not facts.by_dynamo(endpoint):
            yield found(
                "event-address-missing",
                endpoint.name,
                f"the engine publishes on {source.endpoint}, the configuration has no event address for it",
                f"write events: {_written(source)} at {entry(facts, endpoint)}",
            )


# --- heard by us?


@check(
    "event-wires",
    "every stream is connected to its own engine",
    {
        "wrong-event-port": "error",
        "event-address-unreachable": "error",
        "publisher-connects": "error",
        "both-bind": "error",
        "events-silent": "error",
    },
    streams_needed,
)
def event_wires(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams:
        source, probe = facts.source_of(stream.endpoint), facts.probe_of(stream.endpoint)
        if heard_own(stream, probe, facts.probes) or not publishes(facts, stream.endpoint):
            continue
        serving = facts.gateway is not None and facts.gateway.running
        engine_binds = source is not None and (source.binds or (source.loopback_bound and not serving))
        if stream.link == "bind_failed" and not engine_binds:
            yield from _shared(facts, stream)
            continue
        yield from _crossed(facts, stream, probe) or _unheard(facts, stream, source, probe)


def _shared(facts: Facts, stream: Stream) -> Iterator[Finding]:
    """We cannot listen there. That is as it should be where the gateway does."""
    same = [it.name for it in facts.endpoints if it.events == stream.endpoint.events and it != stream.endpoint]
    if same:
        yield found(
            "wrong-event-port",
            stream.endpoint.name,
            f"{stream.endpoint.events} is the event address of {', '.join(same)} too",
            f"give every engine an address of its own at {entry(facts, stream.endpoint)}, and in its --kv-events-config",
        )


def _crossed(facts: Facts, stream: Stream, probe: Probe | None) -> list[Finding]:
    """The prompt sent here was announced on another endpoint's socket."""
    if probe is None or not probe.engine_ids:
        return []
    for other in facts.streams:
        if other is not stream and heard_own(other, probe, facts.probes):
            return [
                found(
                    "wrong-event-port",
                    stream.endpoint.name,
                    f"a prompt sent to {stream.endpoint.address} was announced on {other.endpoint.events}, which is "
                    f"configured for {other.endpoint.name}, and not on {stream.endpoint.events}",
                    f"write events: {other.endpoint.events} at {entry(facts, stream.endpoint)}",
                )
            ]
    return []


def _unheard(facts: Facts, stream: Stream, source: Source | None, probe: Probe | None) -> Iterator[Finding]:
    endpoint = stream.endpoint
    said = (
        f"the engine says it publishes on {source.endpoint}" if source else "the engine does not list its event sources"
    )
    declared = port_of(source.endpoint or "") if source else 0
    configured = port_of(endpoint.events or "")
    seen = {
        "up": "a publisher is there",
        "bound": "we listen, and nobody came",
        "refused": "nobody listens there",
        "no_publisher": f"something listens there that is no event publisher {stream.detail}".rstrip(),
        "unanswered": "no answer",
        "bind_failed": stream.detail,
    }[stream.link]
    evidence = f"{endpoint.events}: {seen}; {said}"
    at = entry(facts, endpoint)
    if source is not None and source.binds and stream.binds:
        yield found("both-bind", endpoint.name, evidence, f"write events: {declared} at {at}, without bind:")
    elif (
        declared
        and declared != configured
        and (stream.binds or source is None or source.binds or source.loopback_bound)
    ):
        yield found("wrong-event-port", endpoint.name, evidence, f"write events: {_written(source)} at {at}")
    elif source is not None and not source.binds and not stream.binds and stream.link != "up":
        where = _host_and_port(source.endpoint or "")
        yield found(
            "publisher-connects",
            endpoint.name,
            f"{evidence}: an address without * is connected to, not bound, and this side connects too",
            f"let the engine bind: {events_flag(*base_ports(endpoint))}; or let the gateway bind: write events: "
            f"{BIND}tcp://{where} at {at}",
        )
    elif stream.link in ("refused", "no_publisher", "unanswered"):
        start = events_flag(*base_ports(endpoint))
        if declared == configured:
            fix = f"open {endpoint.events} between the gateway and the engine"
            yield found("event-address-unreachable", endpoint.name, evidence, fix)
        else:
            fix = f"write the port of the engine's --kv-events-config at {at}, or start it with {start}"
            yield found("wrong-event-port", endpoint.name, evidence, fix)
    elif probe is not None and probe.usage and not stream.heard and not _caches_nothing(facts, endpoint):
        yield found(
            "events-silent",
            endpoint.name,
            f"{evidence}; a new prompt of {probe.prompt_tokens} tokens was computed by {endpoint.address} and announced nowhere",
            "restart the engine: its publisher has stopped; if another engine answers at this address, correct the address",
        )


def _caches_nothing(facts: Facts, endpoint: Endpoint) -> bool:
    engine = facts.engine_of(endpoint)
    cache = engine.cache.get(endpoint.rank, {}) if engine else {}
    return cache.get("enable_prefix_caching") == "False"


def _written(source: Source | None) -> str:
    """How a source's address is written in an endpoint's entry."""
    if source is None or not source.endpoint:
        return "PORT"
    return str(port_of(source.endpoint)) if source.binds or source.loopback_bound else f"{BIND}{source.endpoint}"


def _host_and_port(address: str) -> str:
    return address.removeprefix("tcp://")


@check("event-topics", "topic filters let the engines' events through", {"wrong-topic": "error"}, streams_needed)
def event_topics(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams:
        wanted = stream.endpoint.topic
        topics = sorted({heard.topic for heard in stream.heard})
        if wanted and topics and not any(topic.startswith(wanted) for topic in topics):
            yield found(
                "wrong-topic",
                stream.endpoint.name,
                f"{len(stream.heard)} messages came with topic {', '.join(map(repr, topics[:3]))}, the filter is {wanted!r}",
                f'write topic: "{topics[0]}" (or "" for every topic) at {entry(facts, stream.endpoint)}',
            )


@check("event-ranks", "every data-parallel rank is listened to", {"rank-not-subscribed": "error"}, without_events)
def event_ranks(facts: Facts) -> Iterator[Finding]:
    for engine in facts.engines.values():
        ranks = sorted({*(engine.sources or {}), *engine.cache})
        missing = [rank for rank in ranks if rank not in {endpoint.rank for endpoint in engine.endpoints}]
        if missing and len(ranks) > 1 and engine.endpoints:
            ports = [f"{rank}: {source.endpoint}" for rank, source in (engine.sources or {}).items()]
            yield found(
                "rank-not-subscribed",
                engine.names,
                f"{engine.address} has data-parallel ranks {', '.join(map(str, ranks))}"
                + (f" ({'; '.join(ports)})" if ports else "")
                + f", configured are {', '.join(str(endpoint.rank) for endpoint in engine.endpoints)}",
                f"write dataParallelSize: {max(ranks) + 1} at {entry(facts, engine.endpoints[0])}",
            )
