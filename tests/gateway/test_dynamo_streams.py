"""Endpoints that are Dynamo workers: from the configuration and a real NATS server to matches, trust and observations."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import nats
import numpy as np
import pytest

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import load_text
from gateway.config_source import ConfigError
from gateway.dynamo_workers import WorkerMapError, discovered, read_workers, worker_id
from gateway.event_streams import EventStreams
from gateway.matching import Matcher
from gateway.served_models import Served, ServedModels
from indexer.dynamo_hash import local_hashes
from indexer.index import Index
from tokenization.tokenized import Tokenized

TOKENS = np.arange(1, 101, dtype=np.uint32)
LOCAL = local_hashes(TOKENS, 16)
SERVED = Served("m", "m")
PROMPT = Tokenized(token_ids=TOKENS)
PREFILL = "namespace.prod.component.prefill.endpoint.generate.kv-events"
DECODE = "namespace.prod.component.decode.kv-events"

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
warmroute:
  models: {m: {}}
  dynamo:
"""


def configured(**settings: Any) -> Any:
    lines = [f"    {key}: {json.dumps(value)}" for key, value in settings.items()]
    return load_text(CONFIG + "\n".join(lines) + "\n")


# What is written wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"servers": []}, "at least one"),
        ({"endpoints": {"x": "10.0.0.1:8000"}}, "endpoints: x: invalid literal"),
        ({"endpoints": {"-1": "10.0.0.1:8000"}}, "64 bits"),
        ({"endpoints": {"5": "10.0.0.1"}}, "expected ip:port"),
        ({"blockTokens": 0}, "blockTokens"),
        ({"namespaces": ["a"]}, "namespaces"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused_with_its_place(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        configured(**settings)
    assert "warmroute.dynamo" in str(refused.value)


@pytest.mark.parametrize("text", ["[1]", "{1: {}}", "{abc: '10.0.0.1:80'}", "{", "{true: '10.0.0.1:80'}"])
def test_a_file_that_is_no_map_says_so(text: str) -> None:
    with pytest.raises(WorkerMapError, match=r"workers\.json"):
        read_workers(text, "workers.json")


def test_worker_ids_are_read_as_people_write_them() -> None:
    assert [worker_id(text) for text in (5, "5", "0x2f", str((1 << 64) - 1))] == [5, 5, 47, (1 << 64) - 1]


def test_the_folder_of_dynamos_file_discovery_names_workers_by_ip(tmp_path: Path) -> None:
    def instance(namespace: str, worker: int, ip: str) -> None:
        folder = tmp_path / "v1" / "instances" / namespace / "backend" / "generate"
        folder.mkdir(parents=True, exist_ok=True)
        entry = {
            "type": "Endpoint",
            "component": "backend",
            "endpoint": "generate",
            "namespace": namespace,
            "instance_id": worker,
            "transport": {"tcp": f"{ip}:41000/{worker:x}/{namespace}/backend/generate"},
        }
        (folder / f"{worker:x}").write_text(json.dumps(entry))

    instance("prod", 1 << 63, "10.0.0.1")
    instance("prod-0a1b2c3d", 7, "10.0.0.2")
    instance("staging", 8, "10.0.0.3")
    (tmp_path / "v1" / "instances" / "prod" / "backend" / "generate" / "broken").write_text("{")
    assert discovered(tmp_path, "prod") == {1 << 63: "10.0.0.1", 7: "10.0.0.2"}
    assert len(discovered(tmp_path, "")) == 3


# In the running gateway's parts


class World:
    """Two Dynamo workers and one endpoint that is none, over one NATS server."""

    def __init__(self, server: Any, **settings: Any) -> None:
        self.fleet, self.index = Fleet(), Index()
        config = configured(servers=[server.url], namespace="prod", silentAfter="300ms", **settings)
        models = ServedModels(config.settings.models, self.fleet)
        self.streams = EventStreams(self.fleet, self.index, models, config)
        assert self.streams.dynamo is not None
        self.matcher = Matcher(self.fleet, self.index, self.streams, dynamo=self.streams.dynamo.slots)
        self.client: Any = None

    def add(self, *addresses: str) -> None:
        for address in addresses:
            self.streams.added(self.fleet.add(Endpoint(name=address, address=address)))

    def tokens(self, prompt: Tokenized = PROMPT, served: Served = SERVED) -> list[float]:
        return self.matcher.match(self.matcher.keys(prompt, served)).match.tokens[:3].tolist()

    async def publish(self, subject: str, worker: int, event_id: int, data: Any) -> None:
        event = {
            "worker_id": worker,
            "storage_tier": "device",
            "event": {"event_id": event_id, "dp_rank": 0, "data": data},
        }
        fields = {"publisher_id": worker, "sequence": event_id, "published_at": 1_795_968_000_000 + event_id}
        payload = msgspec.msgpack.encode([event])
        await self.client.publish(subject, msgspec.msgpack.encode({**fields, "topic": "kv-events", "payload": payload}))
        await self.client.flush()

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            self.streams.follow_models()
            if condition():
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"not within 15 s: {what}")


def stored(first: int, end: int, local: list[int] = LOCAL) -> dict[str, Any]:
    blocks = [{"block_hash": 1000 + n, "tokens_hash": local[n]} for n in range(first, end)]
    return {"stored": {"parent_hash": 1000 + first - 1 if first else None, "blocks": blocks}}


@pytest.fixture
async def start(nats_server: Any) -> AsyncIterator[Callable[..., Any]]:
    worlds: list[World] = []
    client = await nats.connect(nats_server.url)

    async def make(**settings: Any) -> World:
        world = World(nats_server, **settings)
        world.client = client
        worlds.append(world)
        world.streams.start()
        assert world.streams.dynamo is not None
        dynamo = world.streams.dynamo
        await world.until(lambda: dynamo.state().connected, "a connection")
        await asyncio.sleep(0.1)
        return world

    yield make
    for world in worlds:
        await asyncio.to_thread(world.streams.stop)
    await client.close()


async def test_silence_is_an_alarm_in_the_trust_of_every_worker(start: Any) -> None:
    world = await start(endpoints={"1": "10.0.0.1:8000"})
    world.add("10.0.0.1:8000")
    await world.until(lambda: "DYN_EVENT_PLANE" in world.streams.trust(0).detail, "the alarm")
    assert str(world.streams.trust(0)) == "blind(no_events)"


async def test_a_split_fleet_is_matched_by_its_own_hashes_beside_ordinary_endpoints(start: Any) -> None:
    world = await start(endpoints={"1": "10.0.0.1:8000", "0x2": "10.0.0.2:8000"})
    world.add("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
    world.index.add(2, 0, world.matcher.keys(PROMPT, SERVED).by_block[16][:1])
    await world.publish(PREFILL, 1, 1, stored(0, 6))
    await world.publish(DECODE, 2, 1, stored(0, 3))
    await world.until(lambda: world.tokens()[:2] == [96, 48], "both workers' blocks")
    assert world.matcher.match(world.matcher.keys(PROMPT, SERVED)).raw_tokens[:3].tolist() == [96, 48, 16]
    assert world.streams.trust(0).state == "exact"
    keys = world.matcher.keys(PROMPT, SERVED)
    assert world.matcher.match(keys).predicted(0, keys) == 96
    await world.publish(PREFILL, 1, 2, {"removed": {"block_hashes": [1005]}})
    await world.until(lambda: world.tokens()[0] == 80, "the removal")


async def test_models_and_adapters_do_not_share_and_what_the_hashes_cannot_say_matches_nothing(start: Any) -> None:
    world = await start(endpoints={"1": "10.0.0.1:8000"})
    world.add("10.0.0.1:8000")
    await world.publish(DECODE, 1, 1, stored(0, 6))
    await world.until(lambda: world.tokens()[0] == 96, "the blocks")
    assert world.tokens(served=Served("n", "n"))[0] == 0
    assert world.tokens(served=Served("ad", "m", "ad"))[0] == 0
    assert world.tokens(Tokenized(token_ids=TOKENS, salt="s"))[0] == 0


async def test_a_map_in_a_file_is_followed_and_a_new_worker_drops_the_old_ones_entries(
    start: Any, tmp_path: Path
) -> None:
    file = tmp_path / "workers.json"
    file.write_text('{"1": "10.0.0.1:8000"}')
    world = await start(discovery=str(file))
    world.add("10.0.0.1:8000")
    await world.publish(DECODE, 1, 1, stored(0, 6))
    await world.until(lambda: world.tokens()[0] == 96, "the blocks")
    file.write_text("not a map")
    world.streams.follow_models()
    assert world.tokens()[0] == 96, "a file that cannot be read changes nothing"
    file.write_text('{"9": "10.0.0.1:8000"}')
    await world.until(lambda: world.tokens()[0] == 0, "the old worker's end")
    await world.publish(DECODE, 9, 1, stored(0, 2))
    await world.until(lambda: world.tokens()[0] == 32, "the new worker's blocks")


async def test_what_engines_report_reaches_the_workers_path(start: Any) -> None:
    world = await start(endpoints={"1": "10.0.0.1:8000"})
    world.add("10.0.0.1:8000")
    await world.publish(DECODE, 1, 1, stored(0, 6))
    await world.until(lambda: world.tokens()[0] == 96, "the blocks")
    keys = world.matcher.keys(PROMPT, SERVED).for_slot(0)
    for _ in range(8):
        world.streams.confirmed(0, keys, 100, 96, 0, time.monotonic())
    await world.until(lambda: str(world.streams.trust(0)) == "degraded(overpredicted)", "the doubt")
    world.streams.confirmed(0, keys, 100, 96, 0, time.monotonic())
    await world.until(lambda: world.tokens()[0] == 0, "what was disproved is dropped")


async def test_an_endpoint_that_leaves_gives_its_slot_back_when_the_index_has_forgotten_it(start: Any) -> None:
    world = await start(endpoints={"1": "10.0.0.1:8000"})
    world.add("10.0.0.1:8000")
    await world.publish(DECODE, 1, 1, stored(0, 6))
    await world.until(lambda: len(world.index) == 6, "the blocks")
    done: list[bool] = []
    world.fleet.remove(0)
    world.streams.removed(0, lambda: done.append(len(world.index) == 0))
    await world.until(lambda: done, "the end")
    assert done == [True]
