"""What is played: the shape of the traffic, and what happens to the engines meanwhile."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from bench.peers.fleet import Fleet
from bench.peers.traffic import Traffic
from gateway.demo_traffic import Shape


class Stage:
    """One run from the inside: what a scenario can wait for and do. `struck`: the engine that something was done to."""

    def __init__(self, fleet: Fleet, traffic: Traffic) -> None:
        self.fleet = fleet
        self.traffic = traffic
        self.struck: str | None = None
        self.phases: list[tuple[str, float]] = []

    def phase(self, name: str) -> None:
        """A new phase begins now."""
        self.phases.append((name, self.traffic.now()))

    def strike_busiest(self) -> int:
        """Choose the engine that matters most to this router; its number."""
        self.struck = self.traffic.busiest()
        return self.fleet.names.index(self.struck)


Script = Callable[[Stage], Coroutine[Any, Any, None]]


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """`script` runs beside the traffic; its phases are reported one by one."""

    name: str
    title: str
    shape: Shape
    users: int
    script: Script


async def nothing(stage: Stage) -> None:
    stage.phase("all")


async def kill_and_restart(stage: Stage) -> None:
    """The busiest engine dies, and comes back empty."""
    stage.phase("before")
    await stage.traffic.reached(0.25)
    number = stage.strike_busiest()
    stage.phase("engine dead")
    await stage.fleet.kill(number)
    await asyncio.sleep(2.0)
    await stage.fleet.start_engine(number)
    stage.phase("engine back")


async def refusals(stage: Stage) -> None:
    """The busiest engine refuses for 1.5 s at a time: bad requests, then full queues of both kinds."""
    stage.phase("before")
    await stage.traffic.reached(0.2)
    number = stage.strike_busiest()
    for status in (400, 429, 503):
        stage.phase(f"{status} from it")
        await stage.fleet.refuse(number, status, 1.5)
        await asyncio.sleep(1.5)
        stage.phase(f"after {status}")
        await asyncio.sleep(1.5)


async def behind_its_back(stage: Stage) -> None:
    """A batch job that bypasses the router fills the busiest engine's cache; then another engine's cache is reset."""
    stage.phase("before")
    await stage.traffic.reached(0.25)
    number = stage.strike_busiest()
    stage.phase("batch job")
    job = asyncio.create_task(stage.fleet.batch_job(number, workers=2))
    await stage.traffic.reached(0.65)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    done = await stage.fleet.reset_cache((number + 1) % len(stage.fleet.names))
    stage.phase("after a reset" if done else "after (no reset)")


def scenarios(size: float) -> dict[str, Scenario]:
    """By name. `size` scales the number of conversations."""
    chats = Shape(turns=5, groups=6, system_words=700, document_words=1200, user_words=120, pause_s=0.8)

    def requests(number: int) -> int:
        return max(10, round(number * size / 5) * 5)

    def scenario(name: str, title: str, number: int, script: Script, shape: Shape = chats, users: int = 20) -> Scenario:
        sized = msgspec.structs.replace(shape, requests=requests(number))
        return Scenario(name=name, title=title, shape=sized, users=users, script=script)

    hot = msgspec.structs.replace(chats, groups=1, system_words=1850, document_words=300, pause_s=0.6)
    # Nobody shares a system prompt: for a new conversation an engine that has come back empty is as good as any other.
    single = msgspec.structs.replace(chats, groups=1000, system_words=200)
    all_of_them = [
        scenario("conversations", "multi-turn conversations, six system prompts, moderate load", 140, nothing),
        scenario("hot-prefix", "everybody's prompt begins with the same 2,000 tokens", 150, nothing, hot, users=24),
        scenario("engine-killed", "the busiest engine is killed and started again", 230, kill_and_restart, single),
        scenario("refusals", "the busiest engine answers 400, then 429, then 503 for a while", 170, refusals),
        scenario(
            "behind-its-back",
            "a batch job past the router evicts what the busiest engine held; then another one's cache is reset",
            160,
            behind_its_back,
        ),
    ]
    return {each.name: each for each in all_of_them}
