"""`warmroute demo`: four simulated engines, the gateway and a real Envoy; the same chats by round robin and by Warmroute.

Everything listens on 127.0.0.1 and ends with the demo. Exit codes: 0 done; 1 a process ended early or requests failed;
2 a port is taken or Envoy is missing; 130 and 143 for Ctrl-C and SIGTERM before the report.
"""

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console

from gateway import demo_report
from gateway.demo_children import ChildDied, Children
from gateway.demo_progress import Display
from gateway.demo_report import Overhead, PhaseResult, Report
from gateway.demo_setup import (
    HOST,
    MODEL,
    Ports,
    PortTaken,
    choose_ports,
    engine_command,
    envoy_command,
    gateway_command,
    write_configs,
)
from gateway.demo_traffic import Observation, Shape, ask, client_session, drive, plan
from gateway.envoy_binary import EnvoyNotFoundError, find_envoy

_READY_S = 60.0
_OVERHEAD_PAIRS = 60
_ERRORS_SHOWN = 3


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`requests` are sent twice, once each way. `blocks`: KV blocks per engine; small enough that caches compete."""

    keep: bool = False
    json: bool = False
    port: int = 8080
    requests: int = 240
    engines: int = 4
    blocks: int = 2200
    seed: int = 7
    logs: Path = Path("demo-logs")


class DemoFailed(Exception):
    """Something that should have come up did not; the message says what to look at."""


def run_demo(options: DemoOptions) -> int:
    """Run a demo to its end; the exit code. With `json` the report is all that goes to stdout."""
    console = Console(stderr=options.json)
    try:
        return asyncio.run(_interruptible(options, console))
    except PortTaken as error:
        console.print(f"demo: {error}", style="red", highlight=False, soft_wrap=True)
        return 2
    except EnvoyNotFoundError as error:
        console.print(f"demo: {error}", style="red", highlight=False, soft_wrap=True)
        return 2
    except (ChildDied, DemoFailed) as error:
        console.print(f"demo: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1


async def _interruptible(options: DemoOptions, console: Console) -> int:
    """Turn SIGINT and SIGTERM into an orderly end with the usual exit code."""
    received: list[signal.Signals] = []
    demo = _Demo(options, console)
    running = asyncio.create_task(demo.run())

    def stop(number: signal.Signals) -> None:
        received.append(number)
        running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await running
    except asyncio.CancelledError:
        console.print(f"demo: stopped by {received[0].name if received else 'cancellation'}, everything is down")
        if demo.result is not None:  # with --keep that is how it ends
            return demo.result
        return 128 + (received[0] if received else signal.SIGINT)


class _Demo:
    """One run, from an empty machine to a report. `result`: the exit code, once the report is printed."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._display = Display(console)
        self._started = time.monotonic()
        whole = Shape()
        spread_s = whole.spread_s * min(1.0, options.requests / whole.requests)  # the same rate for fewer requests
        turns = max(2, min(whole.turns, options.requests // 8))
        self._shape = Shape(requests=options.requests, turns=turns, seed=options.seed, spread_s=spread_s)
        self.result: int | None = None

    async def run(self) -> int:
        envoy = find_envoy()
        ports = choose_ports(self._options.port, self._options.engines)
        async with Children(self._options.logs) as children:
            await self._start(children, ports, envoy)
            return await self._beside(children, self._play(children, ports))

    async def _start(self, children: Children, ports: Ports, envoy: Path) -> None:
        options = self._options
        picker_file, envoy_file = write_configs(ports, options.logs)
        self._display.say(f"starting {options.engines} engines, the gateway and Envoy; logs in {options.logs}/")
        for number in range(options.engines):
            command = engine_command(number, ports, options.blocks, reply_tokens=40)
            await children.start(f"engine-{number}", command)
        await children.start("gateway", gateway_command(picker_file))
        await children.start("envoy", envoy_command(envoy, envoy_file))

    async def _beside(self, children: Children, work: Coroutine[Any, Any, int]) -> int:
        """Do the work while watching the children: the first that dies ends the demo."""
        playing = asyncio.create_task(work)
        watching = asyncio.create_task(children.first_death())
        try:
            await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await watching  # raises
            return await playing
        finally:
            for task in (playing, watching):
                task.cancel()
            await asyncio.gather(playing, watching, return_exceptions=True)

    async def _play(self, children: Children, ports: Ports) -> int:
        front, plain = f"http://{HOST}:{ports.front}", f"http://{HOST}:{ports.plain}"
        async with client_session() as session:
            await self._until_ready(session, ports, front)
            names = [f"engine-{number}" for number in range(self._options.engines)]
            await self._reset(session, ports)
            first, one = await self._phase("round robin", plain, names)
            await self._reset(session, ports)
            before = await self._metrics(session, ports)
            second, two = await self._phase("Warmroute", front, names)
            after = await self._metrics(session, ports)
            overhead = await self._overhead(session, front, plain, (before, after))
        report = Report(
            round_robin=one,
            warmroute=two,
            prediction=demo_report.prediction(second),
            overhead=overhead,
            errors=[o.error for o in [*first, *second] if o.error is not None][:_ERRORS_SHOWN],
            duration_s=time.monotonic() - self._started,
        )
        self._print(report)
        self.result = 1 if report.errors else 0
        if self._options.keep:
            await self._keep(ports)
        return self.result

    async def _until_ready(self, session: aiohttp.ClientSession, ports: Ports, front: str) -> None:
        pages = {f"engine-{n}": f"http://{HOST}:{own.http}/health" for n, own in enumerate(ports.engines)}
        pages["gateway"] = f"http://{HOST}:{ports.metrics}/healthz"
        pages["envoy"] = f"http://{HOST}:{ports.envoy_admin}/ready"
        for name, url in pages.items():
            await self._until(name, partial(_answers, session, url))
        # Envoy asks the picker only after its first health check; a few requests through it also warm everything up.
        for _ in range(3):
            await self._until("the gateway behind Envoy", partial(_routed, session, front))

    async def _until(self, name: str, ready: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + _READY_S
        while not await ready():
            if time.monotonic() > deadline:
                raise DemoFailed(f"{name} is not ready after {_READY_S:.0f} s; look into {self._options.logs}/")
            await asyncio.sleep(0.2)

    async def _reset(self, session: aiohttp.ClientSession, ports: Ports) -> None:
        """Empty every engine's cache. The news travels with the next step, so each gets a request that stores nothing."""
        for own in ports.engines:
            base = f"http://{HOST}:{own.http}"
            await self._until("the cache reset", partial(_reset_once, session, base))
            body = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 1}
            async with session.post(f"{base}/v1/completions", json=body) as answer:
                await answer.read()
        await asyncio.sleep(0.3)

    async def _phase(self, label: str, url: str, engines: Sequence[str]) -> tuple[list[Observation], PhaseResult]:
        started = time.monotonic()
        with self._display.phase(label, self._options.requests) as progress:
            observations = await drive(url, MODEL, plan(self._shape), progress.add)
        return observations, demo_report.phase(observations, engines, time.monotonic() - started)

    async def _overhead(
        self, session: aiohttp.ClientSession, front: str, plain: str, pages: tuple[str, str]
    ) -> Overhead:
        """One short cached chat again and again, through the gateway and past it in turns."""
        times: dict[str, list[float]] = {front: [], plain: []}
        messages = [{"role": "user", "content": "How long does this take? " * 40}]
        for _ in range(_OVERHEAD_PAIRS):
            for url in (front, plain):
                observation, _ = await ask(session, url, MODEL, messages, max_tokens=1)
                if observation.error is None:
                    times[url].append(observation.total_s * 1e3)
        decision = demo_report.histogram_percentiles(*pages, "warmroute_decision_step_seconds", 'step="total"')
        return Overhead(
            decision_ms={name: value * 1e3 for name, value in decision.items()},
            through_ms=demo_report.percentiles(times[front]),
            past_ms=demo_report.percentiles(times[plain]),
        )

    async def _metrics(self, session: aiohttp.ClientSession, ports: Ports) -> str:
        async with session.get(f"http://{HOST}:{ports.metrics}/metrics") as answer:
            return await answer.text()

    def _print(self, report: Report) -> None:
        if self._options.json:
            sys.stdout.write(report.as_json().decode() + "\n")
            sys.stdout.flush()
        else:
            self._console.print(demo_report.table(report))

    async def _keep(self, ports: Ports) -> None:
        self._display.say(
            f"everything stays up until Ctrl-C. Try:\n"
            f"  curl -i http://{HOST}:{ports.front}/v1/chat/completions -H 'content-type: application/json' "
            f"""-d '{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}]}}'\n"""
            f"  curl http://{HOST}:{ports.metrics}/metrics\n"
            f"round robin without the gateway: port {ports.plain}; Envoy's admin page: port {ports.envoy_admin}"
        )
        await asyncio.Event().wait()


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(2)) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _routed(session: aiohttp.ClientSession, front: str) -> bool:
    """Does a chat through Envoy come back with the picker's own header?"""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 1}
    try:
        async with session.post(f"{front}/v1/chat/completions", json=body) as answer:
            return answer.status == 200 and "x-warmroute-endpoint" in answer.headers
    except (aiohttp.ClientError, TimeoutError):
        return False


async def _reset_once(session: aiohttp.ClientSession, base: str) -> bool:
    async with session.post(f"{base}/reset_prefix_cache") as answer:
        return bool((await answer.json())["success"])
