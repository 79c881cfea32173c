"""The doctor with a gateway and a real Envoy running in front of the simulated engines."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.commands.envoy import parameters
from gateway.doctor.examination import known
from gateway.doctor.findings import Report
from gateway.envoy_binary import EnvoyNotFoundError, find_envoy
from gateway.envoy_config import envoy_bootstrap

Patch = Callable[[dict[str, Any]], None]


def ids(report: Report) -> set[str]:
    return {finding.id for finding in report.findings}


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


async def followed(world: Any) -> None:
    """Until the gateway vouches for every stream."""
    gateway = world.gateway
    await until(lambda: all(state.state == "exact" for state in gateway.streams.states()), "streams in order")


async def start_envoy(world: Any, folder: Path, patch: Patch = lambda bootstrap: None) -> Path:
    try:
        binary = find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    port = world.free_port()
    config = world.config(envoy={"address": "127.0.0.1", "port": port, "adminPort": world.envoy_admin})
    bootstrap = envoy_bootstrap(parameters(config, await known(config)))
    patch(bootstrap)
    file = folder / "envoy.yaml"
    file.write_text(yaml.safe_dump(bootstrap))
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
            [str(binary), "-c", str(file), "-l", "warning", "--concurrency", "1", "--disable-hot-restart"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    world.stack.callback(process.wait)
    world.stack.callback(process.terminate)
    stat = f"http://127.0.0.1:{world.envoy_admin}/stats?filter=^cluster.picker.membership_healthy$"
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                async with session.get(stat) as response:
                    if (await response.text()).strip().endswith(": 1"):
                        return file
            except aiohttp.ClientConnectionError:
                pass  # not up yet
            await asyncio.sleep(0.05)
    pytest.fail((folder / "envoy.log").read_text())


def ext_proc(bootstrap: dict[str, Any]) -> Any:
    return next(it for it in filters(bootstrap) if it["name"].endswith("ext_proc"))["typed_config"]


def filters(bootstrap: dict[str, Any]) -> Any:
    chain = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]
    return chain["filters"][0]["typed_config"]["http_filters"]


# --- healthy


@pytest.mark.envoy
async def test_a_healthy_fleet_with_gateway_and_envoy_gets_a_clean_bill(world: Any, tmp_path: Path) -> None:
    for _ in range(2):
        await world.engine()
    await world.start_gateway()
    await followed(world)
    await start_envoy(world, tmp_path)
    started = time.monotonic()
    report = await world.examine()
    assert report.findings == []
    assert {checked.skipped for checked in report.checks if not checked.ok} == {
        "the configuration has no warmroute.dynamo"
    }
    assert time.monotonic() - started < 30
    again = await world.examine()
    assert again.findings == [], "the first examination left nothing behind"


async def test_a_fleet_in_use_is_as_healthy(world: Any) -> None:
    """Others' requests go on while the doctor looks."""
    engine, _ = await world.engine(), await world.engine()
    await world.start_gateway()
    await followed(world)

    async def traffic() -> None:
        for number in range(10_000):
            await engine.complete(f"{number} " + "some words " * 60, tokens=4)

    task = asyncio.create_task(traffic())
    await asyncio.sleep(0.3)
    report = await world.examine()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert report.findings == []


# --- gateway


async def test_a_stale_index_after_a_restart_that_nobody_heard_of(world: Any) -> None:
    engine = await world.engine()
    await world.start_gateway()
    await followed(world)
    for number in range(8):
        await engine.complete(f"{number} " + "words " * 60)
    await until(lambda: world.gateway.streams.states()[0].sequence >= 7, "the gateway has heard")
    await engine.post("/sim/faults", {"silent": True})
    await engine.post("/sim/restart", {})
    report = await world.examine()
    assert ids(report) == {"stale-index", "events-silent"}
    assert "applied batches up to 7, the engine's newest is" in next(
        finding.evidence for finding in report.findings if finding.id == "stale-index"
    )


async def test_a_restart_that_the_gateway_noticed_is_healthy(world: Any) -> None:
    engine = await world.engine()
    await world.start_gateway()
    await followed(world)
    for number in range(8):
        await engine.complete(f"{number} " + "words " * 60)
    await until(lambda: world.gateway.streams.states()[0].sequence >= 7, "the gateway has heard")
    await engine.post("/sim/restart", {})
    assert (await world.examine()).findings == []


async def test_batches_that_are_lost_for_good(world: Any) -> None:
    engine = await world.engine(buffer_steps=2)
    await world.start_gateway()
    await followed(world)
    await engine.complete("words " * 60)
    await until(lambda: world.gateway.streams.states()[0].sequence >= 0, "the gateway has heard")
    await engine.post("/sim/faults", {"drop_next": 6})
    for number in range(8):
        await engine.complete(f"{number} " + "words " * 60)
    await until(lambda: world.gateway.streams.states()[0].reason == "lost_batches", "the gap was noticed")
    report = await world.examine()
    assert ids(report) == {"gap-older-than-buffer"}
    assert "the gateway lost batches of this stream for good" in report.findings[0].evidence


async def test_an_alarm_of_the_gateway(world: Any) -> None:
    await world.engine()
    gateway = await world.start_gateway()
    await followed(world)
    gateway.metrics.alarm.labels("no_match", "decode").set(1)
    report = await world.examine()
    assert [(finding.id, finding.where) for finding in report.findings] == [("gateway-alarm", "no_match decode")]


async def test_many_requests_by_load_only(world: Any) -> None:
    await world.engine()
    gateway = await world.start_gateway()
    await followed(world)
    gateway.metrics.requests.labels("sim", "routed").inc(100)
    gateway.metrics.blind.labels("tokenizer_timeout").inc(50)
    gateway.metrics.blind.labels("no_prompt").inc(50)
    report = await world.examine()
    assert [(finding.id, finding.where) for finding in report.findings] == [
        ("routed-blind", "reason tokenizer_timeout")
    ]


# --- Envoy, by its admin page


def without_metadata(bootstrap: dict[str, Any]) -> None:
    del ext_proc(bootstrap)["metadata_options"]


def without_timeout(bootstrap: dict[str, Any]) -> None:
    del ext_proc(bootstrap)["message_timeout"]


def without_stripping(bootstrap: dict[str, Any]) -> None:
    del filters(bootstrap)[0]


def without_picker(bootstrap: dict[str, Any]) -> None:
    filters(bootstrap).remove(next(it for it in filters(bootstrap) if it["name"].endswith("ext_proc")))


FAULTS: list[tuple[Patch, set[str]]] = [
    (without_metadata, {"envoy-drops-metadata", "envoy-drops-subset-hint"}),
    (without_timeout, {"envoy-short-timeout"}),
    (without_stripping, {"envoy-destination-spoofable"}),
    (without_picker, {"envoy-without-ext-proc"}),
]


@pytest.fixture(params=FAULTS, ids=lambda fault: fault[0].__name__)
def fault(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.envoy
async def test_a_wrong_envoy_is_seen_by_its_admin_page(world: Any, tmp_path: Path, fault: Any) -> None:
    patch, expected = fault
    await world.engine()
    await world.start_gateway()
    await followed(world)
    await start_envoy(world, tmp_path, patch)
    assert ids(await world.examine()) == expected


async def test_a_wrong_envoy_is_seen_in_its_file(world: Any, tmp_path: Path, fault: Any) -> None:
    patch, expected = fault
    await world.engine()
    config = world.config()
    bootstrap = envoy_bootstrap(parameters(config, await known(config)))
    patch(bootstrap)
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(bootstrap))
    assert ids(await world.examine(envoy_file=file)) == expected


@pytest.mark.envoy
async def test_an_envoy_that_asks_another_picker(world: Any, tmp_path: Path) -> None:
    """The right filters, and a cluster that leads elsewhere: requests go by round robin, and are answered with 200."""

    def elsewhere(bootstrap: dict[str, Any]) -> None:
        picker = next(it for it in bootstrap["static_resources"]["clusters"] if it["name"] == "picker")
        picker.pop("health_checks")
        address = picker["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        address["socket_address"]["port_value"] = world.free_port()

    await world.engine()
    await world.start_gateway()
    await followed(world)
    await start_envoy(world, tmp_path, elsewhere)
    assert ids(await world.examine()) == {"envoy-bypasses-gateway"}
