"""A real Envoy, a real ext-proc server and model servers that say what they received."""

import asyncio
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from gateway.envoy_binary import EnvoyNotFoundError, find_envoy
from gateway.envoy_config import EnvoyParameters, envoy_bootstrap
from gateway.extproc.grpc_server import Server, ServerSettings

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.envoy)


def _load_picker() -> Any:
    spec = importlib.util.spec_from_file_location("e2e_picker", HERE / "picker.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Upstream:
    """A model server: answers with what it received, or with a stream."""

    def __init__(self) -> None:
        self.address = ""
        self.requests = 0
        self.disconnects = 0
        self._runner: web.AppRunner | None = None

    async def start(self, port: int) -> None:
        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", self.answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.address = f"127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        body = await request.read()
        if "events" not in request.query:
            return web.json_response(
                {
                    "server": self.address,
                    "method": request.method,
                    "path": request.path_qs,
                    "headers": [[name.lower(), value] for name, value in request.headers.items()],
                    "bytes": len(body),
                    "md5": hashlib.md5(body).hexdigest(),
                }
            )
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "x-server": self.address})
        await response.prepare(request)
        try:
            for number in range(int(request.query["events"])):
                await response.write(f"data: {number}\n\n".encode())
                await asyncio.sleep(float(request.query.get("gap", "0.1")))
            await response.write_eof()
        except (ConnectionResetError, asyncio.CancelledError):
            self.disconnects += 1
            raise
        return response


class Envoy:
    """One Envoy process and its addresses."""

    def __init__(self, url: str, admin: str, plain_url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.plain_url = plain_url
        self.process = process
        self.log = log
        self._admin = admin

    async def stat(self, name: str) -> int:
        """One counter or gauge of Envoy's."""
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/stats?filter=^{name}$") as response:
            text = await response.text()
        return int(text.rpartition(": ")[2] or 0)

    async def ready(self, healthy_pickers: int | None) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                pytest.fail(f"Envoy ended with {self.process.returncode}: {self.log.read_text()}")
            try:
                async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/ready") as response:
                    live = response.status == 200
                if live and healthy_pickers in (None, await self.healthy_pickers()):
                    return
            except aiohttp.ClientConnectionError:
                live = False
            await asyncio.sleep(0.05)
        pytest.fail(f"Envoy is not ready: {self.log.read_text()}")

    async def healthy_pickers(self) -> int:
        return await self.stat("cluster.picker.membership_healthy")


class Fleet:
    """Everything a test starts; stopped by the fixture, in reverse order."""

    def __init__(self, directory: Path, free_port: Callable[[], int]) -> None:
        self.upstreams: list[Upstream] = []
        self.picker_module = _load_picker()
        self.server: Server
        self.decider: Any = None
        self.envoy: Envoy
        self.session: aiohttp.ClientSession
        self.free_port = free_port
        self.directory = directory
        self.stack = AsyncExitStack()

    @property
    def addresses(self) -> list[str]:
        return [upstream.address for upstream in self.upstreams]

    async def start_upstreams(self, count: int = 3) -> None:
        for _ in range(count):
            upstream = Upstream()
            await upstream.start(self.free_port())
            self.stack.push_async_callback(upstream.stop)
            self.upstreams.append(upstream)
        connector = aiohttp.TCPConnector(limit=0)
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession(connector=connector))

    async def start_picker(self, **settings: Any) -> Server:
        """The picker inside this process, so that the test sees what it saw."""
        self.decider = self.picker_module.HeaderDecider(self.addresses)
        self.server = Server(self.decider, ServerSettings(address=f"127.0.0.1:{self.free_port()}", **settings))
        await self.server.start()
        await self.server.set_serving(True)
        self.stack.push_async_callback(self.server.stop)
        return self.server

    def spawn_picker(
        self, port: int, *, tls: Path | None = None, transport: str = "http2"
    ) -> "subprocess.Popen[bytes]":
        """The picker as a process of its own, so that it can be killed."""
        options = ["--tls", str(tls)] if tls else []
        process = subprocess.Popen(
            [sys.executable, str(HERE / "picker.py"), transport, *options, str(port), *self.addresses], cwd=REPOSITORY
        )
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)  # runs first; draining is for the tests about it
        return process

    async def start_envoy(
        self, picker: str, *, patch: Callable[[Any], None] | None = None, healthy: int | None = 1, **parameters: Any
    ) -> Envoy:
        listen, admin, plain = (f"127.0.0.1:{self.free_port()}" for _ in range(3))
        bootstrap = envoy_bootstrap(
            EnvoyParameters(
                **{"endpoints": self.addresses, "plain_listen": plain, **parameters},
                listen=listen,
                admin=admin,
                picker=picker,
            )
        )
        if patch is not None:
            patch(bootstrap)
        file = self.directory / "envoy.yaml"
        file.write_text(yaml.safe_dump(bootstrap))
        log = self.directory / "envoy.log"
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: ASYNC220 - returns at once
                [
                    *(str(find_envoy()), "-c", str(file), "-l", os.environ.get("ENVOY_LOG", "warning")),
                    *("--concurrency", "1", "--disable-hot-restart"),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.stack.callback(_end, process)
        self.envoy = Envoy(f"http://{listen}", f"http://{admin}", f"http://{plain}", process, log)
        await self.envoy.ready(healthy)
        return self.envoy

    async def post(self, body: bytes = b"{}", path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """POST through Envoy: status and decoded answer (bytes where it is not JSON). Underscores become hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.post(self.envoy.url + path, data=body, headers=named) as response:
            data = await response.read()
            try:
                return response.status, json.loads(data)
            except ValueError:
                return response.status, data

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 10.0) -> None:
        """Wait until the condition, which may be a coroutine function, holds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            held = condition()
            if await held if isinstance(held, Awaitable) else held:
                return
            await asyncio.sleep(0.02)
        pytest.fail(f"not within {seconds:g} s: {what}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@pytest.fixture
async def fleet(tmp_path: Path, free_port: Callable[[], int]) -> AsyncIterator[Fleet]:
    """Three model servers and a client session; pickers and Envoys are started by the tests."""
    try:
        find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    fleet = Fleet(tmp_path, free_port)
    async with fleet.stack:
        await fleet.start_upstreams()
        yield fleet
