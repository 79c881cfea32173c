"""The simulated engines behind all routers: started once, emptied before each run, killed and made to refuse in between."""

import asyncio
import os
import signal
from itertools import count

import aiohttp
import msgspec

from gateway.demo_children import Child, ChildDied, Children
from gateway.demo_setup import HOST, MODEL, Ports, engine_command
from gateway.demo_traffic import Shape, ask, plan

_READY_S = 60.0
_GAP_S = 8.0
_JOB = Shape(requests=1, turns=1, groups=1, system_words=1, document_words=6000, user_words=3)
"""One prompt of the batch job: a document of 3,000 to 6,000 words that nobody else sends."""


class Fleet:
    """`speed`: step times of the engines are divided by it."""

    def __init__(self, children: Children, ports: Ports, *, blocks: int, speed: float, reply_tokens: int) -> None:
        self.ports = ports
        self._children = children
        # No topic, as vLLM's default: vllm-router's kv_aware takes no notice of events under any other.
        self._options = (blocks, reply_tokens, ["--speed", str(speed), "--topic", ""])
        self._engines: dict[int, Child] = {}
        self._session: aiohttp.ClientSession
        self._seeds = count(1_000_000)  # far from the seeds of conversations

    @property
    def names(self) -> list[str]:
        return [f"engine-{number}" for number in range(len(self.ports.engines))]

    async def start(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        await asyncio.gather(*(self.start_engine(number) for number in range(len(self.names))))

    async def start_engine(self, number: int) -> None:
        """Start one engine and wait until it is healthy."""
        blocks, reply_tokens, more = self._options
        command = [*engine_command(number, self.ports, blocks, reply_tokens), *more]
        engine = self._engines[number] = await self._children.start(f"engine-{number}", command)
        async with asyncio.timeout(_READY_S):
            while not await self._healthy(number):
                if engine.process.returncode is not None:
                    raise ChildDied(engine.obituary())
                await asyncio.sleep(0.05)

    async def kill(self, number: int) -> None:
        """As by the out-of-memory killer."""
        process = self._engines[number].process
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def restart_all(self) -> None:
        """Empty caches and queues, event numbers from 0: what a router that starts now finds at freshly started engines."""
        await asyncio.gather(*(self._post(number, "/sim/restart", {}) for number in range(len(self.names))))

    async def refuse(self, number: int, status: int, seconds: float) -> None:
        await self._post(number, "/sim/refuse", {"status": status, "seconds": seconds})

    async def reset_cache(self, number: int) -> bool:
        """Drop the prefix cache by the engine's own route. As in vLLM that fails while anything runs there, so wait for a gap;
        False if there was none."""
        try:
            async with asyncio.timeout(_GAP_S):
                while not (await self._post(number, "/reset_prefix_cache", {}))["success"]:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    async def batch_job(self, number: int, workers: int) -> None:
        """Long prompts that no router sees, until cancelled."""

        async def work() -> None:
            while True:
                (job,) = plan(msgspec.structs.replace(_JOB, seed=next(self._seeds)))
                message = [{"role": "user", "content": job.turns[0]}]
                await ask(self._session, self._url(number), MODEL, message, max_tokens=4)

        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())

    def _url(self, number: int) -> str:
        return f"http://{HOST}:{self.ports.engines[number].http}"

    async def _healthy(self, number: int) -> bool:
        try:
            async with self._session.get(f"{self._url(number)}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def _post(self, number: int, path: str, body: dict[str, float]) -> dict[str, bool]:
        async with self._session.post(f"{self._url(number)}{path}", json=body) as answer:
            answer.raise_for_status()
            found: dict[str, bool] = await answer.json()
            return found
