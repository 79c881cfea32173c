"""What the running gateway itself knows of its streams, and whether that is still true."""

from collections.abc import Iterator

from fleet.endpoint import Endpoint
from gateway.doctor.facts import Facts, Gateway, Stream
from gateway.doctor.findings import PAGE, Finding, check, found

TRANSIENT = ("syncing", "catching_up")
REPORTED_ELSEWHERE = ("lost_batches", "no_replay", "no_events")
"""Trust reasons whose cause another check looks for in the engine itself."""
BLIND_SHARE = 0.05
"""Up to this share of blindly routed requests is no finding: cold starts and odd requests."""
HARMLESS = ("no_prompt",)


def gateway_needed(facts: Facts) -> str:
    gateway = facts.gateway
    if gateway is None or not gateway.running:
        return f"the gateway is not running ({gateway.error})" if gateway else "the gateway was not asked"
    return ""


@check("index-freshness", "the gateway follows what the engines publish now", {"stale-index": "error"}, gateway_needed)
def index_freshness(facts: Facts) -> Iterator[Finding]:
    assert facts.gateway is not None  # gateway_needed says so
    for stream in facts.streams:
        newest = _newest(stream)
        before = _sequence(facts.gateway, stream.endpoint, first=True)
        after = _sequence(facts.gateway, stream.endpoint)
        # Read before the engine was asked and after it: a gateway that noticed in between has fallen back by itself.
        if newest is not None and before is not None and after is not None and newest < before <= after:
            yield found(
                "stale-index",
                stream.endpoint.name,
                f"the gateway has applied batches up to {after:.0f}, the engine's newest is {newest}: it was restarted, and "
                "the gateway still believes in the old cache",
                "make the engine's events reach the gateway (see the findings about this stream); restarting the gateway forgets "
                "the old cache at once",
            )


def _newest(stream: Stream) -> int | None:
    numbers = [heard.seq for heard in stream.heard if heard.seq is not None][-1:]
    if stream.replay is not None and stream.replay.complete and stream.replay.last is not None:
        numbers.append(stream.replay.last)
    return max(numbers, default=None)


def _sequence(gateway: Gateway, endpoint: Endpoint, *, first: bool = False) -> float | None:
    labels = {"endpoint": endpoint.address, "rank": str(endpoint.rank)}
    return gateway.value("warmroute_stream_sequence", labels, first=first)


@check(
    "trust",
    "the gateway vouches for its streams",
    {"stream-distrusted": "warning", "gateway-lags": "error"},
    gateway_needed,
)
def trust(facts: Facts) -> Iterator[Finding]:
    assert facts.gateway is not None  # gateway_needed says so
    for endpoint in facts.endpoints:
        labels = {"endpoint": endpoint.address, "rank": str(endpoint.rank)}
        for sample in facts.gateway.after:
            if (
                sample.name != "warmroute_stream_trust"
                or not sample.value
                or not labels.items() <= sample.labels.items()
            ):
                continue
            state, reason = sample.labels.get("state", ""), sample.labels.get("reason", "")
            steady = facts.gateway.value(
                "warmroute_stream_trust", {**labels, "state": state, "reason": reason}, first=True
            )
            if state == "exact" or reason in REPORTED_ELSEWHERE or (reason in TRANSIENT and not steady):
                continue
            yield found(
                "stream-distrusted",
                endpoint.name,
                f"the gateway's trust in this stream is {state}({reason})",
                f"{PAGE}#trust-{reason} says what the reason means and what ends it",
            )
        yield from _deaf(facts, endpoint)


def _deaf(facts: Facts, endpoint: Endpoint) -> Iterator[Finding]:
    """We heard new batches which the gateway has not applied, and is not just about to."""
    assert facts.gateway is not None  # gateway_needed says so
    stream = facts.stream_of(endpoint)
    newest = max((heard.seq for heard in stream.heard if heard.seq is not None), default=None) if stream else None
    before, after = _sequence(facts.gateway, endpoint, first=True), _sequence(facts.gateway, endpoint)
    if stream and stream.heard and newest is not None and after is not None and after < newest:
        if before is not None and newest - after < after - before:
            return  # it applied more than that while we looked: these are under way
        topics = {heard.topic for heard in stream.heard}
        if not any(topic.startswith(endpoint.topic) for topic in topics):
            return  # wrong-topic says so
        yield found(
            "gateway-lags",
            endpoint.name,
            f"batch {newest} was heard here, the gateway has applied up to {after:.0f}",
            "compare the running gateway's configuration (admin page /config) with this file; its log names the stream",
        )


@check(
    "alarms",
    "no alarm of the gateway is on",
    {"gateway-alarm": "error", "routed-blind": "warning"},
    gateway_needed,
)
def alarms(facts: Facts) -> Iterator[Finding]:
    gateway = facts.gateway
    assert gateway is not None  # gateway_needed says so
    for sample in gateway.after:
        if sample.name == "warmroute_alarm" and sample.value:
            alarm, where = sample.labels.get("alarm", ""), sample.labels.get("where", "")
            yield found(
                "gateway-alarm",
                f"{alarm} {where}".strip(),
                f'warmroute_alarm{{alarm="{alarm}",where="{where}"}} is 1 at {gateway.where}',
                f"{PAGE}#alarm-{alarm} says what it means",
            )
    requests = gateway.value("warmroute_requests_total", {"outcome": "routed"}) or 0.0
    for sample in gateway.after:
        reason = sample.labels.get("reason", "")
        if sample.name != "warmroute_routed_blind_total" or reason in HARMLESS:
            continue
        if requests and sample.value > max(5.0, BLIND_SHARE * requests):
            yield found(
                "routed-blind",
                f"reason {reason}",
                f"{sample.value:.0f} of {requests:.0f} routed requests went by load only",
                f"{PAGE}#blind-{reason} says what the reason means",
            )
