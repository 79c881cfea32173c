"""Small fleets of simulated engines for the doctor to examine, all in this process."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml
from aiohttp import web

from gateway.config import LoadedConfig, load_text
from gateway.doctor.examination import examine
from gateway.doctor.findings import Report
from gateway.runtime import Gateway
from simulator.reply import ReplyWriter
from simulator.server import EngineServer
from simulator.settings import ServerSettings
from tokenization.local import LocalTokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL_FILES = REPOSITORY / "configs" / "models" / "qwen3"
MODEL = "sim"
HOST = "127.0.0.1"

Answer = Callable[[web.Request, Any], Any]


class Engine:
    """A running simulated engine, and its entry in the endpoints of the configuration."""

    def __init__(self, server: EngineServer, entry: dict[str, Any]) -> None:
        self.server, self.entry = server, entry
        self.url = f"http://{HOST}:{entry['port']}"

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        async with aiohttp.ClientSession() as session, session.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def complete(self, prompt: str, tokens: int = 1) -> Any:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": tokens})


class World:
    """What a test examines."""

    def __init__(self, free_port: Callable[[], int], tokenizer: LocalTokenizer, writer: ReplyWriter) -> None:
        self.free_port = free_port
        self.stack = AsyncExitStack()
        self.engines: list[Engine] = []
        self.metrics_port, self.grpc_port = free_port(), free_port()
        self.envoy_admin = free_port()
        self.gateway: Gateway | None = None
        self._tokenizer, self._writer = tokenizer, writer

    async def engine(
        self, entry: dict[str, Any] | None = None, change: dict[str, Answer] | None = None, **settings: Any
    ) -> Engine:
        """Start an engine. `entry`: changes to its configuration entry (None removes a key); `change`: path -> what
        becomes of the decoded answer of that route."""
        number = len(self.engines)
        port, events, replay = self.free_port(), self.free_port(), self.free_port()
        given = {
            "name": f"engine-{number}",
            "host": HOST,
            "port": port,
            "model": MODEL,
            "events": f"tcp://*:{events}",
            "replay": f"tcp://*:{replay}",
            "speed": 100.0,
            **settings,
        }
        tokenizer = self._tokenizer_of(given)
        server = EngineServer(ServerSettings(**given), tokenizer, self._writer)
        app = server.app()
        if change:
            app.middlewares.append(_changing(change))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await runner.setup()
        await web.TCPSite(runner, HOST, port).start()
        self.stack.push_async_callback(runner.cleanup)
        wanted = {
            "name": f"engine-{number}",
            "address": HOST,
            "port": port,
            "events": events,
            "replay": replay,
            "model": MODEL,
            **(entry or {}),
        }
        engine = Engine(server, {key: value for key, value in wanted.items() if value is not None})
        self.engines.append(engine)
        return engine

    def _tokenizer_of(self, settings: dict[str, Any]) -> LocalTokenizer:
        path = settings.pop("tokenizer", None)
        return LocalTokenizer.from_directory(path) if path else self._tokenizer

    def document(self, **warmroute: Any) -> dict[str, Any]:
        return {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [
                {"type": "static-discovery", "parameters": {"endpoints": [engine.entry for engine in self.engines]}},
                {"type": "token-producer", "parameters": {"local": {"path": str(MODEL_FILES)}}},
                {"type": "precise-prefix-cache-producer"},
                {
                    "type": "expected-work-scorer",
                    "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
                },
                {"type": "max-score-picker"},
            ],
            "schedulingProfiles": [
                {
                    "name": "default",
                    "plugins": [{"pluginRef": "expected-work-scorer"}, {"pluginRef": "max-score-picker"}],
                }
            ],
            "dataLayer": {"discovery": {"pluginRef": "static-discovery"}},
            "warmroute": {
                "listen": HOST,
                "grpcPort": self.grpc_port,
                "metricsListen": HOST,
                "metricsPort": self.metrics_port,
                "drainTimeout": "100ms",
                "envoy": {"adminPort": self.envoy_admin},
                # Qwen3's template drops think blocks: known, and accepted.
                "models": {MODEL: {"rewritesHistory": True}},
                **warmroute,
            },
        }

    def config(self, patch: Callable[[dict[str, Any]], None] | None = None, **warmroute: Any) -> LoadedConfig:
        document = self.document(**warmroute)
        if patch is not None:
            patch(document)
        return load_text(yaml.safe_dump(document), "fleet.yaml")

    async def start_gateway(self, config: LoadedConfig | None = None) -> Gateway:
        self.gateway = Gateway(config or self.config())
        await self.gateway.start()
        self.stack.push_async_callback(self.gateway.stop)
        return self.gateway

    async def examine(self, config: LoadedConfig | None = None, **options: Any) -> Report:
        return await examine(config or self.config(), **options)


def _changing(change: dict[str, Answer]) -> Any:
    @web.middleware
    async def middleware(request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        response = await handler(request)
        if request.path not in change or not isinstance(response, web.Response):
            return response
        changed = change[request.path](request, msgspec.json.decode(response.body))  # type: ignore[arg-type]
        if isinstance(changed, web.Response):
            return changed
        return web.json_response(changed)

    return middleware


@pytest.fixture(scope="session")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer.from_directory(MODEL_FILES)


@pytest.fixture(scope="session")
def writer(tokenizer: LocalTokenizer) -> ReplyWriter:
    return ReplyWriter(tokenizer, typical_tokens=40)


@pytest.fixture
async def world(
    free_port: Callable[[], int], tokenizer: LocalTokenizer, writer: ReplyWriter, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[World]:
    """Starts nothing by itself. Qwen3's tokenizer is loaded once: it takes a second, and every examination wants it."""
    load = LocalTokenizer.from_directory

    @functools.cache
    def once(path: Path, **options: Any) -> LocalTokenizer:
        return tokenizer if Path(path) == MODEL_FILES else load(path, **options)

    monkeypatch.setattr(LocalTokenizer, "from_directory", once)
    world = World(free_port, tokenizer, writer)
    async with world.stack:
        yield world
