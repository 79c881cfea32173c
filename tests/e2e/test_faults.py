"""One engine, one gateway process, one Envoy, and faults of every kind planted in the event stream between them.

After each fault two things must hold for every request: cached tokens are not overestimated at full score, and where the
picture may be wrong the trust says why. An engine that reports its own `cached_tokens` is the judge.
"""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.demo_setup import MODEL, choose_ports, engine_command, envoy_command, gateway_command, write_configs
from gateway.envoy_binary import EnvoyNotFoundError, find_envoy

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = 16
BLOCKS = 600
WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "gravel",
    "harbor",
    "island",
    "juniper",
    "kelp",
    "lagoon",
]


class Sent:
    """What became of one request."""

    def __init__(self, predicted: int, cached: int, trust: str, prompt: int) -> None:
        self.predicted, self.cached, self.trust, self.prompt = predicted, cached, trust, prompt

    @property
    def stale_at_full_score(self) -> bool:
        return self.trust == "exact" and self.predicted > self.cached

    @property
    def right(self) -> bool:
        return self.predicted == self.cached

    def __repr__(self) -> str:
        return f"{self.predicted} predicted, {self.cached} of {self.prompt} cached, {self.trust}"


class World:
    def __init__(self, folder: Path, port: int, admin: int) -> None:
        self.folder = folder
        self.ports = choose_ports(port, 1)
        self.admin = admin
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.session: aiohttp.ClientSession

    @property
    def engine_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.engines[0].http}"

    def spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)

    def spawn_engine(self) -> None:
        self.spawn("engine", [*engine_command(0, self.ports, BLOCKS, 24), "--speed", "50", "--die-with-parent"])

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def start(self) -> None:
        picker, envoy = write_configs(self.ports, self.folder)
        config = yaml.safe_load(picker.read_text())
        config["warmroute"].update(adminPort=self.admin, decideTimeout="5s")
        picker.write_text(yaml.safe_dump(config))
        self.spawn_engine()
        self.spawn("gateway", gateway_command(picker))
        self.spawn("envoy", envoy_command(find_envoy(), envoy))

    async def faults(self, **planted: Any) -> None:
        async with self.session.post(f"{self.engine_url}/sim/faults", json=planted) as response:
            assert response.status == 200

    async def post(self, path: str) -> None:
        async with self.session.post(self.engine_url + path) as response:
            assert response.status == 200

    async def stream(self) -> dict[str, Any]:
        async with self.session.get(f"http://127.0.0.1:{self.admin}/state/streams") as response:
            return (await response.json())[0]

    async def trust(self) -> str:
        state = await self.stream()
        return state["state"] if state["state"] == "exact" else f"{state['state']}({state['reason']})"

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 45.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError):
                if await condition():
                    return
            await asyncio.sleep(0.05)
        logs = "\n".join(f"--- {path}\n{path.read_text()[-2500:]}" for path in sorted(self.folder.glob("*.log")))
        pytest.fail(f"not within {seconds:g} s: {what}; trust {await self.trust()}\n{logs}")

    async def until_trust(self, wanted: str, seconds: float = 45.0) -> None:
        async def reached() -> bool:
            return await self.trust() == wanted

        await self.until(reached, wanted, seconds)

    async def ask(self, subject: int, length: int = 12) -> Sent:
        """A prompt of about 100 to 400 tokens, the same for the same subject."""
        text = " ".join(f"{WORDS[(subject * 7 + n) % len(WORDS)]} {subject}-{n}" for n in range(length * 2))
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
        url = f"http://127.0.0.1:{self.ports.front}/v1/chat/completions"
        async with self.session.post(url, json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            headers = response.headers
        usage = answer["usage"]
        await asyncio.sleep(0.05)  # its events are on their way
        return Sent(
            int(headers["x-warmroute-predicted-cached-tokens"]),
            usage["prompt_tokens_details"]["cached_tokens"],
            headers["x-warmroute-trust"],
            usage["prompt_tokens"],
        )

    async def rounds(self, count: int, subjects: int = 6) -> list[Sent]:
        return [await self.ask(number % subjects) for number in range(count)]


@pytest.fixture
async def world(tmp_path: Path, free_port: Callable[[], int]) -> AsyncIterator[World]:
    try:
        find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    world = World(tmp_path, free_port(), free_port())
    try:
        world.start()
        async with aiohttp.ClientSession() as world.session:

            async def ready() -> bool:
                async with world.session.get(f"http://127.0.0.1:{world.ports.front}/v1/models") as response:
                    routed = response.status == 200 and "x-warmroute-endpoint" in response.headers
                    return routed and await world.trust() == "exact"

            await world.until(ready, "everything is up", 90.0)
            yield world
    finally:
        for process in reversed(world.processes.values()):
            process.kill()
            process.wait()


@pytest.mark.timeout(280)
async def test_after_every_fault_no_stale_hit_has_full_score_and_the_trust_names_the_fault(world: World) -> None:
    healthy = await world.rounds(18)
    assert all(sent.right for sent in healthy), healthy
    assert sum(sent.cached > 0 for sent in healthy) >= 12

    # Batches that were published and not received: the engine's buffer has them.
    await world.faults(drop_next=3)
    sent = await world.rounds(12, subjects=9)
    assert not any(s.stale_at_full_score for s in sent), sent
    await world.until_trust("exact")
    assert (await world.stream())["replays"] >= 2
    await asyncio.sleep(2.0)  # questions that responses give reason for are a second apart
    assert all(s.right for s in await world.rounds(9, subjects=9))

    # Batches that exist nowhere: known to be lost, and what was held before counts less until reports settle it.
    await world.faults(lose_next=2)
    sent = [await world.ask(subject) for subject in range(20, 26)]
    assert not any(s.stale_at_full_score for s in sent), sent
    await world.until_trust("degraded(lost_batches)")
    sent = await world.rounds(40, subjects=9)
    assert not any(s.stale_at_full_score for s in sent), sent
    await world.until_trust("exact", 5.0)

    # A wire that says nothing more, though the engine is well: its next response gives it away.
    await world.faults(silent=True)
    sent = [await world.ask(subject) for subject in range(30, 34)]
    assert not any(s.stale_at_full_score for s in sent), sent
    await asyncio.sleep(2.0)
    assert (await world.ask(33)).right
    assert all(s.right for s in await world.rounds(6)), "nothing else was lost"
    await world.faults(silent=False)

    # A process that is killed and started again, on the same ports.
    world.kill("engine")
    await world.until_trust("degraded(disconnected)")
    world.spawn_engine()
    await world.until_trust("exact", 60.0)
    sent = await world.rounds(12)
    assert not any(s.stale_at_full_score for s in sent), sent
    assert all(s.right for s in sent), sent
    assert sum(s.cached == 0 for s in sent[:6]) == 6, "the new process holds nothing"


@pytest.mark.timeout(280)
async def test_a_picture_that_nobody_can_repair_is_doubted_once_reports_contradict_it(world: World) -> None:
    """Neither events nor replays, and a cache that is emptied behind our back: only the engine's reports are left."""
    await world.rounds(12)
    await world.faults(silent=True, deaf=True)
    await world.post("/reset_prefix_cache")
    sent = [await world.ask(subject) for subject in range(6)]
    assert all(s.predicted > s.cached for s in sent), "it cannot be known before the first of these has been answered"
    await world.until_trust("degraded(catching_up)", 10.0)  # asked, and nobody answers
    await world.until_trust("degraded(lost_batches)", 30.0)
    sent = await world.rounds(12)
    assert not any(s.stale_at_full_score for s in sent), sent

    await world.faults(silent=False, deaf=False)
    for _ in range(4):
        await world.rounds(12)
        if await world.trust() == "exact":
            break
    await world.until_trust("exact", 60.0)
    assert all(s.right for s in await world.rounds(6))
