"""Reloading: what is invalid changes nothing, what is asked for twice is done twice, endpoints follow."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.config import load
from gateway.extproc.decision import Decided, Head, Rejected
from gateway.runtime import Gateway, StartError

HOST = "127.0.0.1"


class Running:
    """A gateway over a file of endpoints that nobody answers at; estimates stand for a tokenizer."""

    def __init__(self, folder: Path, free_port: Callable[[], int]) -> None:
        self.folder = folder
        self.endpoints = folder / "endpoints.yaml"
        self.file = folder / "warmroute.yaml"
        self.document: dict[str, Any] = {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [
                {"type": "file-discovery", "parameters": {"path": "endpoints.yaml", "watchFile": True}},
                {"type": "token-producer", "parameters": {"estimate": {}}},
                {"type": "queue-scorer"},
            ],
            "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
            "dataLayer": {"discovery": {"pluginRef": "file-discovery"}},
            "warmroute": {
                "listen": HOST,
                "grpcPort": free_port(),
                "metricsListen": HOST,
                "metricsPort": free_port(),
                "drainTimeout": "100ms",
            },
        }
        self.write_endpoints(1)
        self.write()
        self.gateway = Gateway(load(self.file), self.file)

    def write(self, **settings: Any) -> None:
        self.document["warmroute"].update(settings)
        new = self.folder / "new.yaml"
        new.write_text(yaml.safe_dump(self.document))
        new.rename(self.file)  # at once: the gateway may be reading it

    def write_endpoints(self, count: int) -> None:
        entries = [{"name": f"e{n}", "address": HOST, "port": str(9000 + n)} for n in range(count)]
        self.endpoints.write_text(json.dumps({"endpoints": entries}))

    def reloads(self, result: str) -> float:
        return self.gateway.registry.get_sample_value("warmroute_config_reloads_total", {"result": result}) or 0.0

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            await asyncio.sleep(0.05)


@pytest.fixture
async def running(tmp_path: Path, free_port: Callable[[], int]) -> AsyncIterator[Running]:
    running = Running(tmp_path, free_port)
    await running.gateway.start()
    yield running
    await running.gateway.stop()


async def test_an_invalid_file_is_refused_and_everything_stays(running: Running) -> None:
    before = running.gateway.path.scheduler
    running.document["plugins"][2]["type"] = "queue-scorrer"
    running.write()
    await running.until(lambda: running.reloads("refused") == 1, "a refusal")
    assert running.gateway.path.scheduler is before
    running.write_endpoints(2)
    await running.until(lambda: len(running.gateway.fleet.slots()) == 2, "the old discovery still follows its file")


async def test_a_discovery_that_cannot_be_read_refuses_the_whole_reload(running: Running) -> None:
    before = running.gateway.path.scheduler
    running.document["plugins"][0]["parameters"]["path"] = "missing.yaml"
    running.write()
    await running.until(lambda: running.reloads("refused") == 1, "a refusal")
    assert running.gateway.path.scheduler is before
    running.write_endpoints(3)
    await running.until(lambda: len(running.gateway.fleet.slots()) == 3, "the old discovery still follows its file")


async def test_a_change_during_a_reload_is_not_lost(running: Running) -> None:
    running.write(responseHeaders=True)
    running.gateway.reload()
    await asyncio.sleep(0)  # the first one has begun
    running.write(responseHeaders=False, explain=True)
    running.gateway.reload()
    await running.until(lambda: running.gateway.path.decisions is not None, "the second change is in force")
    assert not running.gateway.path.settings.response_headers
    assert running.reloads("refused") == 0


async def test_endpoints_come_and_go_with_their_file(running: Running) -> None:
    fleet = running.gateway.fleet
    running.write_endpoints(4)
    await running.until(lambda: len(fleet.slots()) == 4, "four endpoints")
    running.write_endpoints(2)
    await running.until(lambda: len(fleet.slots()) == 2, "two endpoints")
    running.write_endpoints(4)
    await running.until(lambda: len(fleet.slots()) == 4, "the slots are used again")
    assert sorted(fleet.slots().tolist()) == [0, 1, 2, 3]


async def test_a_taken_port_is_named_by_its_setting(tmp_path: Path, free_port: Callable[[], int]) -> None:
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    taken = server.sockets[0].getsockname()[1]
    running = Running(tmp_path, free_port)
    running.write(metricsPort=taken)
    gateway = Gateway(load(running.file), running.file)
    with pytest.raises(StartError, match=rf"warmroute\.metricsPort: cannot listen on {HOST}:{taken}"):
        await gateway.start()
    await gateway.stop()
    server.close()


def with_burst(running: Running) -> None:
    running.document["plugins"] += [
        {"type": "burst-prefix-cache-producer", "parameters": {"windowDurationMs": 10000, "blockSizeTokens": 16}},
        {"type": "prefix-cache-scorer", "parameters": {"prefixMatchInfoProducerName": "burst-prefix-cache-producer"}},
    ]
    running.document["schedulingProfiles"][0]["plugins"].append({"pluginRef": "prefix-cache-scorer"})


def ask(running: Running, name: str) -> "asyncio.Task[Decided | Rejected]":
    body = json.dumps({"model": "m", "prompt": "one prompt of many rollouts " * 20}).encode()
    head = Head(method="POST", path="/v1/completions", headers={"content-type": "application/json"}, request_id=name)
    return asyncio.create_task(running.gateway.path.decide(head, body))


async def two_alike(running: Running) -> None:
    """Nobody answers the scraper; when it has given up on both, requests have a choice again."""
    fleet = running.gateway.fleet
    await running.until(lambda: len(fleet.slots()) == 2 and not fleet.healthy[fleet.slots()].any(), "two of a kind")


async def held(running: Running, count: int) -> None:
    sample = running.gateway.registry.get_sample_value
    await running.until(lambda: sample("warmroute_burst_waiting") == count, f"{count} requests in a window")


async def test_a_burst_window_that_is_open_ends_with_a_reload(running: Running) -> None:
    running.write_endpoints(2)
    with_burst(running)
    running.write()
    await running.until(lambda: bool(running.gateway.path.producers.bursts), "the producer is in force")
    await two_alike(running)
    asked = [ask(running, str(number)) for number in range(3)]
    await held(running, 3)
    running.write(responseHeaders=True)
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*asked)
    assert len({it.destination[0] for it in answers if isinstance(it, Decided)}) == 1
    later = ask(running, "later")
    await held(running, 1)
    later.cancel()
    await held(running, 0)


async def test_a_burst_window_that_is_open_ends_with_the_gateway(tmp_path: Path, free_port: Callable[[], int]) -> None:
    running = Running(tmp_path, free_port)
    running.write_endpoints(2)
    with_burst(running)
    running.write()
    running.gateway = Gateway(load(running.file), running.file)
    await running.gateway.start()
    try:
        await two_alike(running)
        asked = [ask(running, str(number)) for number in range(3)]
        await held(running, 3)
    finally:
        await running.gateway.stop()
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*asked)
    assert len({it.destination[0] for it in answers if isinstance(it, Decided)}) == 1


async def test_what_was_sent_where_and_whose_session_it_was_outlive_a_reload(running: Running) -> None:
    running.document["plugins"] += [
        {"type": "approx-prefix-cache-producer"},
        {"type": "session-affinity-scorer", "parameters": {"strategy": "session_id"}},
    ]
    running.document["schedulingProfiles"][0]["plugins"].append({"pluginRef": "session-affinity-scorer"})
    running.write()
    await running.until(lambda: running.reloads("ok") == 1, "the first reload")
    path = running.gateway.path
    sent = path.producers.approximate["approx-prefix-cache-producer"]
    old = running.gateway._config.plugins["session-affinity-scorer"]
    running.write(responseHeaders=True)
    await running.until(lambda: running.reloads("ok") == 2, "the second reload")
    assert path.producers.approximate["approx-prefix-cache-producer"] is sent
    new = running.gateway._config.plugins["session-affinity-scorer"]
    assert new is not old
    assert new._sessions is old._sessions  # type: ignore[attr-defined]
    running.document["plugins"][-2]["parameters"] = {"lruCapacityPerServer": 5}
    running.write()
    await running.until(lambda: running.reloads("ok") == 3, "the third reload")
    assert path.producers.approximate["approx-prefix-cache-producer"] is not sent


async def test_what_is_scraped_and_how_often_follows_a_reload_and_what_does_not_is_said(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    scraper = running.gateway._scraper
    assert scraper is not None
    running.document["plugins"] += [
        {"type": "metrics-data-source", "parameters": {"interval": "70ms", "path": "/other"}},
        {"type": "precise-prefix-cache-producer", "parameters": {"speculativeIndexing": True}},
    ]
    with caplog.at_level(logging.WARNING):
        running.write()
        await running.until(lambda: running.reloads("ok") == 1, "the reload")
    assert "config_needs_restart setting=precise-prefix-cache-producer" in caplog.text
    await running.until(lambda: running.gateway.fleet.scrape_interval_s == 0.07, "the new interval")
    assert {target.source.path for (_, page), target in scraper._targets.items() if page == "metrics"} == {"/other"}


async def test_a_plugin_that_cannot_be_made_refuses_the_reload(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("somebody else's plugin")

    monkeypatch.setattr("scorers.load_aware_scorer.LoadAwareScorer.__init__", broken)
    running.document["plugins"].append({"type": "load-aware-scorer"})
    running.write()
    await running.until(lambda: running.reloads("refused") == 1, "the refusal")
    assert "somebody else's plugin" in caplog.text
    running.document["plugins"].pop()
    running.write(responseHeaders=True)
    await running.until(lambda: running.reloads("ok") == 1, "the next reload")
