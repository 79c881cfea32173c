"""Self-watching in a gateway that runs: alarms as metrics, log lines and on the admin port."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web

from gateway.config import load_text
from gateway.extproc.decision import Decided, Head
from gateway.runtime import Gateway
from gateway.self_watch import Limits, SelfWatch
from simulator.server import EngineServer
from simulator.settings import ServerSettings
from tokenization.local import LocalTokenizer

MODEL_FILES = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3"


@pytest.fixture
async def running(free_port: Callable[[], int]) -> AsyncIterator[Any]:
    """A gateway over one engine, whose events can be silenced."""
    http, events, replay, admin = (free_port() for _ in range(4))
    engine = EngineServer(
        ServerSettings(port=http, events=f"tcp://*:{events}", replay=f"tcp://*:{replay}", speed=100.0),
        LocalTokenizer.from_directory(MODEL_FILES, encoder="tokenizers"),
    )
    runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", http).start()
    entry = {"name": "a", "address": "127.0.0.1", "port": http, "events": events, "replay": replay, "model": "sim"}
    producer = {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"}
    document = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "static-discovery", "parameters": {"endpoints": [entry]}},
            {"type": "token-producer", "parameters": {"local": {"path": str(MODEL_FILES)}}},
            {"type": "precise-prefix-cache-producer"},
            {"type": "expected-work-scorer", "parameters": producer},
        ],
        "dataLayer": {"discovery": {"pluginRef": "static-discovery"}},
        "warmroute": {
            "listen": "127.0.0.1",
            "grpcPort": free_port(),
            "metricsListen": "127.0.0.1",
            "metricsPort": free_port(),
            "adminPort": admin,
            "decideTimeout": "5s",
            "drainTimeout": "100ms",
        },
    }
    gateway = Gateway(load_text(yaml.safe_dump(document)))
    gateway.watch.rules = SelfWatch(Limits(requests=3, settle_s=0.2))
    await gateway.start()
    holder = Running(gateway, engine, http, admin)
    await holder.until(lambda: gateway.streams.states()[0].state == "exact", "the stream")
    yield holder
    await gateway.stop()
    await runner.cleanup()


class Running:
    def __init__(self, gateway: Gateway, engine: EngineServer, port: int, admin: int) -> None:
        self.gateway, self.engine = gateway, engine
        self.where = f"127.0.0.1:{port}/0"
        self._url, self._admin = f"http://127.0.0.1:{port}/v1/completions", f"http://127.0.0.1:{admin}"

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.02)

    async def request(self, number: int) -> None:
        """What Envoy would do: ask, send, pass the response by."""
        body = {"model": "sim", "prompt": f"{number} " + "some words " * 40, "max_tokens": 1}
        raw = msgspec.json.encode(body)
        head = Head(method="POST", path="/v1/completions", headers={"content-type": "application/json"},
                    request_id=f"r{number}")  # fmt: skip
        decided = await self.gateway.path.decide(head, raw)
        assert isinstance(decided, Decided)
        assert decided.observer is not None
        async with aiohttp.ClientSession() as session, session.post(self._url, json=body) as response:
            data = await response.read()
        decided.observer.response_headers(200, {"content-type": "application/json"}, None)
        decided.observer.response_chunk(data)
        decided.observer.finished()

    def alarm(self, name: str, where: str | None = None) -> float | None:
        return self.gateway.registry.get_sample_value(
            "warmroute_alarm", {"alarm": name, "where": self.where if where is None else where}
        )

    async def page(self, name: str) -> Any:
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/{name}") as response:
            return await response.json()


async def test_a_silent_stream_is_an_alarm_until_it_speaks(running: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    faults = running.engine.publisher.faults
    faults.silent = faults.deaf = True  # else the gateway asks for what it misses
    for number in range(4):
        await running.request(number)
    await running.until(lambda: running.alarm("no_events") == 1, "the alarm")
    assert [it["alarm"] for it in await running.page("state/alarms")] == ["no_events"]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("alarm alarm=no_events")]
    assert said == [
        f"alarm alarm=no_events where={running.where} detail='4 prompts with new blocks and no event in 120 s'"
    ]

    faults.silent = faults.deaf = False
    await running.request(100)
    await running.until(lambda: running.alarm("no_events") == 0, "the end of the alarm")
    assert await running.page("state/alarms") == []
    assert f"alarm_over alarm=no_events where={running.where}" in caplog.text


async def test_a_healthy_stream_raises_nothing_and_has_a_rate(running: Any) -> None:
    for number in range(6):
        await running.request(number)
        await running.request(number)
    await asyncio.sleep(1.5)
    assert await running.page("state/alarms") == []
    (stream,) = await running.page("state/streams")
    assert (stream["state"], stream["reason"], stream["endpoint"]) == ("exact", "none", running.where[:-2])
    assert stream["events_per_s"] > 0
    assert stream["keys"] > 0
    assert stream["sequence"] >= 5
    assert 0 <= stream["last_event_age_s"] < 10
    assert abs(stream["lag_s"]) < 5


async def test_a_background_task_that_dies_is_an_alarm_at_once(running: Any) -> None:
    async def fail() -> None:
        raise RuntimeError("no reason")

    running.gateway._task(fail(), "housekeeping")
    await running.until(lambda: running.alarm("thread_died", "housekeeping") == 1, "the alarm")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_listening_thread_that_dies_is_an_alarm(running: Any) -> None:
    subscriber = running.gateway.streams._subscriber

    def die() -> None:
        raise SystemExit

    subscriber._commands.put(die)
    subscriber._wake.send(b"\0")
    await running.until(lambda: running.alarm("thread_died", "kv-events") == 1, "the alarm")
    subscriber._context.destroy(linger=0)  # what the thread would have done


async def test_the_configuration_in_force_is_on_the_admin_port(running: Any) -> None:
    shown = await running.page("config")
    assert shown["document"]["warmroute"]["metricsListen"] == "127.0.0.1"
