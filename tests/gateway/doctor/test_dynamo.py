"""Dynamo workers that publish over a real NATS server, and what the configuration may get wrong about them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import nats
import pytest

from gateway.doctor.findings import Report

DECODE, PREFILL = 5, (1 << 63) + 7
OLD = "namespace.{ns}.component.{comp}.kv-events"
NEW = "namespace.{ns}.component.{comp}.endpoint.generate.kv-events"


def ids(report: Report) -> set[str]:
    return {finding.id for finding in report.findings}


def body(worker: int) -> bytes:
    """One stored block, as 1.6 sends it."""
    stored = {"parent_hash": None, "start_position": None, "blocks": [{"block_hash": 1, "tokens_hash": 2}]}
    event = {
        "worker_id": worker,
        "storage_tier": "device",
        "residency_domain": "worker",
        "event": {"event_id": 1, "dp_rank": 0, "data": {"stored": stored}},
    }
    inner = msgspec.msgpack.encode([event])
    return msgspec.msgpack.encode(
        {"publisher_id": 5, "sequence": 0, "published_at": 1_795_968_000_000, "topic": "kv-events", "payload": inner}
    )


class Workers:
    """Engines that answer HTTP, and publishers that speak for them on NATS."""

    def __init__(self, world: Any, server: Any) -> None:
        self.world, self.server = world, server
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    async def add(self, role: str, **settings: Any) -> str:
        entry = {"events": None, "replay": None, "role": role}
        engine = await self.world.engine(entry, events=None, replay=None, **settings)
        return f"127.0.0.1:{engine.entry['port']}"

    def publish(self, subject: str, worker: int) -> None:
        self._tasks.append(asyncio.create_task(self._publish(subject, worker)))

    async def _publish(self, subject: str, worker: int) -> None:
        client = await nats.connect(self.server.url)
        while not self._stopped:  # nats-py takes a cancellation for a lost connection, so the loop must end by itself
            await client.publish(subject, body(worker))
            await asyncio.sleep(0.1)
        await client.close()

    async def examine(self, endpoints: Mapping[int, str], **settings: Any) -> Report:
        named = {str(worker): address for worker, address in endpoints.items()}
        report: Report = await self.world.examine(
            self.world.config(dynamo={"servers": [self.server.url], "endpoints": named, **settings})
        )
        return report

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def workers(world: Any, nats_server: Any) -> AsyncIterator[Workers]:
    them = Workers(world, nats_server)
    yield them
    await them.stop()


@pytest.fixture(params=[OLD, NEW], ids=["1.0", "1.6"])
def form(request: pytest.FixtureRequest) -> Any:
    """Both forms of subject."""
    return request.param


async def test_a_split_fleet_that_is_known_is_healthy(workers: Workers, form: str) -> None:
    prefill, decode = await workers.add("prefill"), await workers.add("decode")
    workers.publish(form.format(ns="prod", comp="prefill"), PREFILL)
    workers.publish(form.format(ns="prod", comp="decode"), DECODE)
    assert (await workers.examine({PREFILL: prefill, DECODE: decode}, namespace="prod")).findings == []


async def test_a_worker_hash_suffix_that_is_not_configured_is_healthy(workers: Workers, form: str) -> None:
    address = await workers.add("decode")
    workers.publish(form.format(ns="prod-0a1b2c3d", comp="backend"), DECODE)
    assert (await workers.examine({DECODE: address}, namespace="prod")).findings == []


async def test_the_aggregated_component_while_the_fleet_is_split(workers: Workers, form: str) -> None:
    prefill, decode = await workers.add("prefill"), await workers.add("decode")
    workers.publish(form.format(ns="prod", comp="prefill"), PREFILL)
    workers.publish(form.format(ns="prod", comp="decode"), DECODE)
    report = await workers.examine({PREFILL: prefill, DECODE: decode}, components=["backend"])
    assert ids(report) == {"dynamo-wrong-component"}
    assert "the fleet is split" in report.findings[0].evidence
    assert form.format(ns="prod", comp="prefill") in report.findings[0].evidence


async def test_only_the_decode_component_while_the_fleet_is_split(workers: Workers, form: str) -> None:
    prefill, decode = await workers.add("prefill"), await workers.add("decode")
    workers.publish(form.format(ns="prod", comp="prefill"), PREFILL)
    workers.publish(form.format(ns="prod", comp="decode"), DECODE)
    report = await workers.examine({PREFILL: prefill, DECODE: decode}, components=["decode"])
    assert ids(report) == {"dynamo-wrong-component"}
    assert "components: [decode, prefill]" in report.findings[0].fix


async def test_the_component_of_somebody_elses_fleet_is_no_fault(workers: Workers) -> None:
    address = await workers.add("decode")
    workers.publish(OLD.format(ns="prod", comp="backend"), DECODE)
    workers.publish(OLD.format(ns="prod", comp="other"), 99)
    assert (await workers.examine({DECODE: address}, components=["backend"])).findings == []


async def test_a_namespace_with_the_suffix_of_an_earlier_rollout(workers: Workers, form: str) -> None:
    address = await workers.add("decode")
    workers.publish(form.format(ns="prod-99aabbcc", comp="backend"), DECODE)
    report = await workers.examine({DECODE: address}, namespace="prod-0a1b2c3d")
    assert ids(report) == {"dynamo-namespace-suffix"}
    assert "write namespace: prod " in report.findings[0].fix


async def test_another_namespace(workers: Workers) -> None:
    address = await workers.add("decode")
    workers.publish(OLD.format(ns="prod", comp="backend"), DECODE)
    assert ids(await workers.examine({DECODE: address}, namespace="dynamo")) == {"dynamo-wrong-namespace"}


async def test_only_decode_workers_known(workers: Workers, form: str) -> None:
    decode = await workers.add("decode")
    workers.publish(form.format(ns="prod", comp="prefill"), PREFILL)
    workers.publish(form.format(ns="prod", comp="decode"), DECODE)
    report = await workers.examine({DECODE: decode})
    assert ids(report) == {"only-decode-workers"}
    assert f'"{PREFILL}": "IP:PORT"' in report.findings[0].fix


async def test_workers_that_nobody_knows(workers: Workers) -> None:
    address = await workers.add("both")
    workers.publish(OLD.format(ns="prod", comp="backend"), DECODE)
    workers.publish(OLD.format(ns="prod", comp="backend"), 99)
    report = await workers.examine({DECODE: address})
    assert ids(report) == {"dynamo-worker-unknown"}
    assert "backend/99" in report.findings[0].evidence


async def test_workers_that_publish_elsewhere(workers: Workers) -> None:
    address = await workers.add("both")
    report = await workers.examine({DECODE: address})
    assert ids(report) == {"dynamo-silent"}
    assert "DYN_EVENT_PLANE=nats" in report.findings[0].fix


async def test_a_server_that_does_not_answer(workers: Workers) -> None:
    address = await workers.add("both")
    workers.server.kill()
    assert ids(await workers.examine({DECODE: address})) == {"dynamo-unreachable"}


async def test_another_block_size(workers: Workers) -> None:
    address = await workers.add("both", block_tokens=32)
    workers.publish(OLD.format(ns="prod", comp="backend"), DECODE)
    report = await workers.examine({DECODE: address})
    assert ids(report) == {"block-size-not-expressible"}
    assert report.findings[0].fix == "write blockTokens: 32"


async def test_what_jetstream_keeps_is_looked_at(workers: Workers) -> None:
    address = await workers.add("both")
    client = await nats.connect(workers.server.url)
    name = "namespace-prod-component-backend-kv-events"
    await client.jetstream().add_stream(name=name, subjects=[f"{name}.>"])
    stored = {"parent_hash": None, "blocks": [{"block_hash": 1, "tokens_hash": 2}]}
    event = {"worker_id": 99, "event": {"event_id": 1, "dp_rank": 0, "data": {"stored": stored}}}
    await client.jetstream().publish(f"{name}.kv-events", msgspec.json.encode(event))
    await client.close()
    assert ids(await workers.examine({DECODE: address})) == {"dynamo-worker-unknown"}
