"""Dynamo's events over a real NATS server: every form of subject and body into the index, and what silence is taken for."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client

from event_ingest.dynamo_listener import DynamoListener, DynamoSource
from event_ingest.dynamo_stream import request_keys, sequence_key
from event_ingest.pipeline import EventPath
from indexer.dynamo_hash import local_hashes
from indexer.index import Index

MODEL = "m"
TOKENS = list(range(1, 97))
LOCAL = local_hashes(TOKENS, 16)
KEYS = request_keys(MODEL, TOKENS, 16)
AGGREGATED = "namespace.prod.component.backend.kv-events"
WORKER = (1 << 63) + 5


def event(event_id: int, data: Any, worker: int = WORKER, rank: int = 0) -> dict[str, Any]:
    return {
        "worker_id": worker,
        "storage_tier": "device",
        "residency_domain": "worker",
        "event": {"event_id": event_id, "dp_rank": rank, "data": data},
    }


def stored(first: int, end: int) -> dict[str, Any]:
    """Blocks first..end-1 of TOKENS; their engine hashes are 1000 + number."""
    blocks = [{"block_hash": 1000 + n, "tokens_hash": LOCAL[n], "mm_extra_info": None} for n in range(first, end)]
    parent = 1000 + first - 1 if first else None
    return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}


def envelope(payload: Any, sequence: int = 0) -> bytes:
    inner = msgspec.msgpack.encode(payload)
    fields = {"publisher_id": 5, "sequence": sequence, "published_at": 1_795_968_000_000 + sequence}
    return msgspec.msgpack.encode({**fields, "topic": "kv-events", "payload": inner})


class World:
    """An index, a listener, and a client that publishes as workers do."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.index = Index()
        self.listener: DynamoListener
        self.client: Client

    def listen(self, *workers: tuple[int, int], **settings: Any) -> list[EventPath]:
        self.listener = DynamoListener(
            DynamoSource(servers=(self.server.url,), **{"namespace": "prod", "block_tokens": 16, **settings})
        )
        paths = [self.path(slot) for slot in range(len(workers))]
        for (worker, rank), path in zip(workers, paths, strict=True):
            self.listener.assign(worker, rank, path)
        self.listener.start()
        return paths

    def path(self, slot: int) -> EventPath:
        key = sequence_key(MODEL)
        return EventPath(
            self.index, slot, name=f"s{slot}", model=MODEL, can_replay=False, counted=False, sequence_key=key
        )

    async def connected(self) -> None:
        await self.until(lambda: self.listener.state(0.0).connected, "a connection")
        await asyncio.sleep(0.1)  # subscriptions are on their way to the server

    async def publish(self, subject: str, *bodies: bytes) -> None:
        for body in bodies:
            await self.client.publish(subject, body)
        await self.client.flush()

    def blocks(self, slot: int, keys: list[int] = KEYS) -> int:
        return self.index.match(keys).by_slot().get(slot, 0)

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"not within {seconds:g} s: {what}")


@pytest.fixture
async def world(nats_server: Any) -> AsyncIterator[World]:
    world = World(nats_server)
    world.client = await nats.connect(nats_server.url)
    yield world
    if hasattr(world, "listener"):
        await asyncio.to_thread(world.listener.stop)
    await world.client.close()


# Silence and strangers


async def test_a_subscription_that_hears_nothing_raises_an_alarm(world: World) -> None:
    world.listen((WORKER, 0), silent_after_s=0.3)
    await world.connected()
    await world.until(lambda: "nothing heard" in world.listener.alarm(time.monotonic()), "the alarm")
    assert "DYN_EVENT_PLANE=nats" in world.listener.alarm(time.monotonic())
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 1))))
    await world.until(lambda: world.listener.alarm(time.monotonic()) == "", "the alarm's end")


async def test_a_wrong_namespace_is_named_in_the_alarm(world: World) -> None:
    world.listen((WORKER, 0), namespace="staging", silent_after_s=0.3)
    await world.connected()
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 1))))
    await world.until(lambda: "only of others" in world.listener.alarm(time.monotonic()), "the alarm")
    assert world.blocks(0) == 0


async def test_no_server_is_an_alarm_and_not_an_end(world: World) -> None:
    world.server.kill()
    world.listen((WORKER, 0), silent_after_s=0.1)
    await world.until(lambda: "no connection" in world.listener.alarm(time.monotonic()), "the alarm")
    world.server.start()
    await world.connected()


async def test_events_of_unknown_workers_are_counted_until_somebody_knows_them(world: World) -> None:
    world.listen()
    await world.connected()
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 1), worker=7)))
    await world.until(lambda: world.listener.state(0.0).strangers == {"backend/7": 1}, "the stranger")
    assert "none of them known" in world.listener.alarm(time.monotonic())
    path = world.path(0)
    world.listener.assign(7, 0, path)
    await world.publish(AGGREGATED, envelope(event(2, stored(0, 3), worker=7), 1))
    await world.until(lambda: world.blocks(0) == 3, "the blocks")
    assert str(path.trust) == "degraded(no_replay)", "what came before was not heard"


async def test_garbage_costs_itself(world: World) -> None:
    (path,) = world.listen((WORKER, 0))
    await world.connected()
    await world.publish(AGGREGATED, b"\xc1", b"", b"{", envelope([5, event(1, stored(0, 2))]))
    await world.until(lambda: world.blocks(0) == 2, "the good event beside the bad one")
    assert sum(world.listener.state(0.0).skipped.values()) == 4
    assert path.trust.state == "exact"


# Forms


@pytest.mark.parametrize(
    "subject",
    [
        AGGREGATED,
        "namespace.prod.component.backend.endpoint.generate.kv-events",
        "namespace.prod-0a1b2c3d4e.component.backend.kv-events",
        "namespace.prod-0a1b2c3d4e.component.decode.endpoint.generate.kv-events",
    ],
)
@pytest.mark.parametrize("form", ["single", "list", "json"])
async def test_both_subject_forms_with_every_kind_of_body(world: World, subject: str, form: str) -> None:
    (path,) = world.listen((WORKER, 0))
    await world.connected()
    first, second = event(1, stored(0, 2)), event(2, stored(2, 6))
    if form == "list":
        bodies = [envelope([first, second])]
    elif form == "single":
        bodies = [envelope(first), envelope(second, 1)]
    else:
        bodies = [json.dumps(first).encode(), json.dumps(second).encode()]
    await world.publish(subject, *bodies)
    await world.until(lambda: world.blocks(0) == 6, "all blocks")
    assert path.trust.state == "exact"


async def test_a_fleet_split_into_prefill_and_decode_is_heard_in_full(world: World) -> None:
    world.listen((1, 0), (2, 0), (2, 1))
    await world.connected()
    await world.publish(
        "namespace.prod.component.prefill.endpoint.generate.kv-events", envelope([event(1, stored(0, 6), 1)])
    )
    await world.publish("namespace.prod.component.decode.kv-events", envelope(event(1, stored(0, 4), 2)))
    await world.publish("namespace.prod.component.decode.kv-events", envelope(event(1, stored(0, 2), 2, rank=1), 1))
    await world.until(lambda: [world.blocks(slot) for slot in range(3)] == [6, 4, 2], "every worker and rank")
    await world.publish(
        "namespace.prod.component.prefill.endpoint.generate.kv-events",
        envelope([event(2, {"removed": {"block_hashes": [1005, 1004]}}, 1)], 1),
    )
    await world.publish("namespace.prod.component.decode.kv-events", envelope(event(2, "cleared", 2), 2))
    await world.until(lambda: [world.blocks(slot) for slot in range(3)] == [4, 0, 2], "the removals")


async def test_other_components_may_be_left_out(world: World) -> None:
    world.listen((1, 0), components=("decode",))
    await world.connected()
    await world.publish("namespace.prod.component.prefill.kv-events", envelope(event(1, stored(0, 6), 1)))
    await world.until(lambda: world.listener.state(0.0).elsewhere == 1, "the message")
    assert world.blocks(0) == 0


# Losses


async def test_a_gap_is_named_and_what_was_held_counts_less(world: World) -> None:
    (path,) = world.listen((WORKER, 0))
    await world.connected()
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 2))), envelope(event(4, stored(2, 3)), 3))
    await world.until(lambda: path.trust.state == "degraded", "the loss")
    assert str(path.trust) == "degraded(lost_batches)"


async def test_a_worker_that_begins_anew_drops_what_it_had(world: World) -> None:
    (path,) = world.listen((WORKER, 0))
    await world.connected()
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 6))), envelope(event(2, stored(0, 1)), 1))
    await world.until(lambda: world.blocks(0) == 6, "the blocks")
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 1)), 1000))
    await world.until(lambda: world.blocks(0) == 1, "only what the new process holds")
    assert path.trust.state == "exact"


async def test_what_passed_while_the_server_was_away_is_not_forgotten_silently(world: World) -> None:
    (path,) = world.listen((WORKER, 0))
    await world.connected()
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 3))))
    await world.until(lambda: path.trust.state == "exact", "the first event")
    world.server.kill()
    await world.until(lambda: str(path.trust) == "degraded(disconnected)", "the loss of the connection")
    world.server.start()
    await world.until(lambda: str(path.trust) == "degraded(lost_batches)", "the reconnection")


async def test_a_released_worker_leaves_nothing_behind(world: World) -> None:
    world.listen((WORKER, 0))
    await world.connected()
    await world.publish(AGGREGATED, envelope(event(1, stored(0, 3))))
    await world.until(lambda: world.blocks(0) == 3, "the blocks")
    await asyncio.wrap_future(world.listener.release(WORKER, 0))
    assert len(world.index) == 0


# JetStream


async def add_stream(world: World, name: str) -> Any:
    context = world.client.jetstream()
    await context.add_stream(name=name, subjects=[f"{name}.kv-events"])
    return context


async def test_an_older_stream_is_read_from_its_first_message_on(world: World) -> None:
    name = "namespace-prod-component-backend-kv-events"
    context = await add_stream(world, name)
    for number in range(3):
        body = json.dumps(event(number, stored(2 * number, 2 * number + 2)))
        await context.publish(f"{name}.kv-events", body.encode())
    (path,) = world.listen((WORKER, 0))
    await world.until(lambda: world.blocks(0) == 6, "what was published before we came")
    assert path.trust.state == "exact"
    await context.publish(f"{name}.kv-events", json.dumps(event(3, "cleared")).encode())
    await world.until(lambda: world.blocks(0) == 0, "what is published now")
    assert world.listener.state(0.0).streams == (name,)


async def test_a_stream_that_appears_later_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("event_ingest.nats_transport._LOOK_S", 0.1)
    world.listen((WORKER, 0))
    await world.connected()
    name = "namespace-prod-component-prefill-kv-events"
    context = await add_stream(world, name)
    await context.publish(f"{name}.kv-events", json.dumps(event(0, stored(0, 6))).encode())
    await world.until(lambda: world.blocks(0) == 6, "the blocks")
    await context.delete_stream(name)
    await world.until(lambda: world.listener.state(0.0).streams == (), "its end")


async def test_a_stored_stream_loses_nothing_while_the_server_restarts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("event_ingest.dynamo_listener._REPEATED_S", 2.0)
    name = "namespace-prod-component-backend-kv-events"
    context = await add_stream(world, name)
    await context.publish(f"{name}.kv-events", json.dumps(event(0, stored(0, 2))).encode())
    (path,) = world.listen((WORKER, 0))
    await world.until(lambda: world.blocks(0) == 2, "the first event")
    world.server.kill()
    await world.until(lambda: str(path.trust) == "degraded(disconnected)", "the loss of the connection")
    world.server.start()
    deadline = time.monotonic() + 10
    while True:
        try:
            await context.publish(f"{name}.kv-events", json.dumps(event(1, stored(2, 6))).encode())
            break
        except Exception:  # noqa: BLE001 - the test's own client is reconnecting
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
    await world.until(lambda: world.blocks(0) == 6, "what was published after the restart", 30.0)
    await world.until(lambda: path.trust.state == "exact", "the end of the doubt")
    assert path.stream.counters.lost_batches == 0
