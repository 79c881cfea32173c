"""Is what comes on an event stream whole and in order, and can it be repaired?"""

from collections.abc import Iterator
from itertools import pairwise

from event_ingest.sockets import BIND, port_of
from fleet.endpoint import Endpoint
from gateway.doctor.event_checks import base_ports, entry, events_flag, publishes, streams_needed
from gateway.doctor.facts import Facts, Stream
from gateway.doctor.findings import Finding, check, found

SHORT_BUFFER_S = 10.0
"""A replay buffer that holds less engine time than this does not survive a reconnection."""


# --- whole and in order?


@check(
    "event-order",
    "sequence numbers and clocks only go forward",
    {"sequence-backwards": "error", "clock-backwards": "warning", "events-unreadable": "warning"},
    streams_needed,
)
def event_order(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams:
        numbers = [heard.seq for heard in stream.heard if heard.seq is not None]
        fell = next((at for at in range(1, len(numbers)) if numbers[at] <= numbers[at - 1]), None)
        if fell is not None:
            around = ", ".join(map(str, numbers[max(0, fell - 3) : fell + 2]))
            yield found(
                "sequence-backwards",
                stream.where,
                f"live batches came in the order {around}",
                "let every engine (and rank) publish on an address of its own; two publishers share this one, or the engine "
                "restarted during the examination",
            )
        elif (back := _clock_fell(stream)) is not None:
            yield found(
                "clock-backwards",
                stream.where,
                f"batch {back[0]} carries an engine time {back[1]:.3f} s before the batch in front of it",
                "let the engine's host slew its clock (chrony, without makestep after boot); the gateway takes the same number "
                "with another time for a restarted engine",
            )
        skipped = sorted({reason for heard in stream.heard for reason in heard.skipped})
        if skipped:
            yield found(
                "events-unreadable",
                stream.where,
                f"parts of {sum(bool(heard.skipped) for heard in stream.heard)} of {len(stream.heard)} messages could not be "
                f"used: {', '.join(skipped)}",
                "compare the engine's release with docs/events.md; `warmroute events record` keeps the messages for a report",
            )


def _clock_fell(stream: Stream) -> tuple[int, float] | None:
    """(sequence, seconds) of the first batch whose engine time lies before that of an earlier one."""
    times = dict(stream.replay.times) if stream.replay else {}
    times |= {heard.seq: heard.batch.ts for heard in stream.heard if heard.seq is not None and heard.batch is not None}
    ordered = sorted(times.items())
    for (_, earlier), (seq, later) in pairwise(ordered):
        if later < earlier - 0.001:
            return seq, earlier - later
    return None


# --- repairable?


@check(
    "event-replay",
    "lost batches can be asked for again",
    {
        "replay-missing": "warning",
        "replay-port-collision": "error",
        "replay-unanswered": "error",
        "gap-older-than-buffer": "warning",
    },
    streams_needed,
)
def event_replay(facts: Facts) -> Iterator[Finding]:
    for stream in facts.streams:
        if not publishes(facts, stream.endpoint):
            continue
        collision = list(_collision(facts, stream.endpoint))
        yield from collision
        if not collision:
            yield from _replay_address(facts, stream)
        yield from _short_buffer(facts, stream)


def _collision(facts: Facts, endpoint: Endpoint) -> Iterator[Finding]:
    source, engine = facts.source_of(endpoint), facts.engine_of(endpoint)
    event_ports = {port_of(it.events or ""): it.rank for it in (engine.endpoints if engine else [endpoint])}
    event_ports |= {port_of(it.endpoint or ""): rank for rank, it in ((engine and engine.sources) or {}).items()}
    ranks = len({endpoint.rank, *event_ports.values()})
    port, _ = base_ports(endpoint)
    for whose, address in (("configured", endpoint.replay), ("the engine's", source.replay if source else None)):
        if address and port_of(address) in event_ports and _same_host(endpoint, address):
            rank = event_ports[port_of(address)]
            yield found(
                "replay-port-collision",
                endpoint.name,
                f"{whose} replay address {address} is where rank {rank} publishes its events",
                f"keep the replay port at least {max(ranks, 2)} away from the event port: {events_flag(port, port + 100)}, and "
                f"replay: {port + 100} at {entry(facts, endpoint)}",
            )
            return


def _same_host(endpoint: Endpoint, address: str) -> bool:
    host = address.removeprefix(BIND).removeprefix("tcp://").rpartition(":")[0]
    return host in ("*", "0.0.0.0", "[::]", endpoint.address.rpartition(":")[0])


def _replay_address(facts: Facts, stream: Stream) -> Iterator[Finding]:
    endpoint, source = stream.endpoint, facts.source_of(stream.endpoint)
    offered = source.replay if source else None
    if endpoint.replay is None:
        port, replay = base_ports(endpoint)
        yield found(
            "replay-missing",
            endpoint.name,
            "no replay address is configured; the engine "
            + (f"offers {offered}" if offered else "offers none" if source else "does not say whether it offers one"),
            f"write replay: {port_of(offered)} at {entry(facts, endpoint)}"
            if offered
            else f"start the engine with {events_flag(port, replay)} and write replay: {replay} at {entry(facts, endpoint)}",
        )
    elif stream.replay is not None and not stream.replay.answered:
        wrong = offered is not None and port_of(offered) != port_of(endpoint.replay)
        port, replay = base_ports(endpoint)
        yield found(
            "replay-unanswered",
            endpoint.name,
            f"{endpoint.replay} did not answer; the engine "
            + (f"offers {offered}" if offered else "offers no replay" if source else "does not say what it offers"),
            f"write replay: {port_of(offered or '')} at {entry(facts, endpoint)}"
            if wrong
            else f"start the engine with {events_flag(port, replay)}, or open {endpoint.replay}",
        )


def _short_buffer(facts: Facts, stream: Stream) -> Iterator[Finding]:
    endpoint, replay, source = stream.endpoint, stream.replay, facts.source_of(stream.endpoint)
    gateway, evidence = facts.gateway, ""
    labels = {"endpoint": endpoint.address, "rank": str(endpoint.rank), "reason": "lost_batches"}
    if gateway and gateway.running and gateway.value("warmroute_stream_trust", labels):
        evidence = "the gateway lost batches of this stream for good (trust degraded, lost_batches)"
        if replay and replay.first is not None:
            evidence += f"; the engine's buffer begins at batch {replay.first} of {replay.last}"
    elif replay and replay.start == 0 and replay.first and replay.span_s < SHORT_BUFFER_S:
        evidence = (
            f"the engine keeps batches {replay.first} to {replay.last}, {replay.span_s:.1f} s of its life; whoever is away "
            "longer, or starts now, cannot learn what was stored before"
        )
    if evidence:
        steps = source.buffer_steps if source else None
        yield found(
            "gap-older-than-buffer",
            endpoint.name,
            evidence + (f" (buffer_steps {steps})" if steps else ""),
            f'raise "buffer_steps" in the engine\'s --kv-events-config to {max(10_000, 10 * (steps or 0))}; the trust recovers '
            "when the engine's cache is reset or its reports agree again",
        )
