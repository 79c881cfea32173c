"""Prefill and decode on different simulated engines, behind a real Envoy: with llm-d's sidecar protocol and without one."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from deciders.handoff import decode_body, prefill_body, transfer_params
from gateway.config import load
from gateway.fleet_dump import read_dump
from gateway.offline import explain_offline
from gateway.runtime import Gateway
from simulator.reply import ReplyWriter
from simulator.server import EngineServer
from simulator.settings import ServerSettings
from tokenization.local import LocalTokenizer

MODEL = "sim"
FILES = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3"
CHAT = "/v1/chat/completions"
LONG = "Tell me about prefix caches and who fills them. " * 30
VARIANTS = {
    "sidecar": ("sidecar", "BUFFERED"),
    "gateway": ("gateway", "BUFFERED"),
    "duplex": ("gateway", "FULL_DUPLEX_STREAMED"),
}
SOURCE = "x-kv-cache-source-host-port"
DROPPED = ("host", "content-length", "transfer-encoding")

Json = dict[str, Any]


@pytest.fixture(scope="module")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer.from_directory(FILES)


@pytest.fixture(scope="module")
def writer(tokenizer: LocalTokenizer) -> ReplyWriter:
    return ReplyWriter(tokenizer, typical_tokens=24)


class Engine:
    """A simulated engine that remembers what it was asked to generate."""

    def __init__(self, name: str, server: EngineServer) -> None:
        self.name = name
        self.server = server
        self.address = f"127.0.0.1:{server.settings.port}"
        self.asked: list[tuple[dict[str, str], Json]] = []
        self.answered: list[Json] = []
        self.delay_s = 0.0
        self.cancelled = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = self.server.app()
        app.middlewares.append(self._remember)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.server.settings.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _remember(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.method != "POST" or not request.path.endswith("completions"):
            return await handler(request)  # type: ignore[no-any-return]
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.asked.append((headers, json.loads(await request.read())))
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        response: web.StreamResponse = await handler(request)
        if isinstance(response, web.Response) and isinstance(response.body, bytes):
            self.answered.append(json.loads(response.body))
        return response


class Sidecar:
    """What llm-d's routing sidecar does for its `nixlv2` connector, in front of one decode engine."""

    def __init__(self, port: int, engine: str) -> None:
        self.address = f"127.0.0.1:{port}"
        self.told: list[str | None] = []
        self._port, self._engine = port, engine

    async def start(self, stack: AsyncExitStack) -> None:
        self._session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", self._port).start()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items() if name.lower() not in DROPPED}
        prefiller = headers.pop("x-prefiller-host-port", None)
        if request.path.endswith("completions"):
            self.told.append(prefiller)
        if prefiller is not None:
            leg = prefill_body(request.path, body)
            async with self._session.post(f"http://{prefiller}{request.path}", data=leg, headers=headers) as first:
                answer = await first.read()
                if first.status != 200:
                    return web.Response(status=first.status, body=answer)
            body = decode_body(body, transfer_params(answer))
        url = f"http://{self._engine}{request.path_qs}"
        async with self._session.request(request.method, url, data=body or None, headers=headers) as second:
            response = web.StreamResponse(status=second.status)
            response.content_type = second.content_type
            response.headers["x-sim-engine"] = second.headers.get("x-sim-engine", "")
            await response.prepare(request)
            async for piece in second.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response


class World:
    """One prefill and two decode engines, a gateway in this process, Envoy, and an engine that does everything alone."""

    def __init__(self, fleet: Any, tokenizer: LocalTokenizer, writer: ReplyWriter) -> None:
        self.fleet = fleet
        self.stack: AsyncExitStack = fleet.stack
        self.engines: dict[str, Engine] = {}
        self.sidecars: dict[str, Sidecar] = {}
        self._tokenizer, self._writer = tokenizer, writer

    @property
    def prefill(self) -> Engine:
        return self.engines["prefill-0"]

    @property
    def decodes(self) -> list[Engine]:
        return [self.engines["decode-0"], self.engines["decode-1"]]

    async def start(
        self, handoff: Json, body_mode: str, scrape: str, plugins: Sequence[Json] = (), **settings: Any
    ) -> None:
        free_port = self.fleet.free_port
        endpoints = []
        for name in ("prefill-0", "decode-0", "decode-1", "alone"):
            events, replay, port = free_port(), free_port(), free_port()
            server = EngineServer(
                ServerSettings(
                    name=name,
                    port=port,
                    model=MODEL,
                    events=f"tcp://127.0.0.1:{events}",
                    replay=f"tcp://127.0.0.1:{replay}",
                    bind_events=True,
                    speed=20.0,
                    blocks=2048,
                    load_failure_recompute=True,
                ),
                self._tokenizer,
                self._writer,
            )
            engine = self.engines[name] = Engine(name, server)
            await engine.start()
            self.stack.push_async_callback(engine.stop)
            if name == "alone":
                continue
            if handoff.get("mode") == "sidecar" and name.startswith("decode"):
                sidecar = self.sidecars[name] = Sidecar(port := free_port(), engine.address)
                await sidecar.start(self.stack)
            role = name.partition("-")[0]
            endpoints.append(
                {"name": name, "address": "127.0.0.1", "port": port, "role": role, "events": events, "replay": replay}
            )
        grpc_port, self.metrics_port, self.admin_port = free_port(), free_port(), free_port()
        config = {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [
                {"type": "static-discovery", "parameters": {"endpoints": endpoints}},
                {"type": "metrics-data-source", "parameters": {"interval": scrape}},
                {"type": "core-metrics-extractor"},
                {"type": "precise-prefix-cache-producer"},
                {"type": "prefill-filter"},
                {"type": "decode-filter"},
                {
                    "type": "prefix-cache-scorer",
                    "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
                },
                {"type": "active-request-scorer"},
                {
                    "type": "prefix-based-pd-decider",
                    "parameters": {
                        "nonCachedTokens": 100,
                        "prefixMatchInfoProducerName": "precise-prefix-cache-producer",
                    },
                },
                {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}},
                *plugins,
            ],
            "schedulingProfiles": [
                {
                    "name": "prefill",
                    "plugins": [{"pluginRef": "prefill-filter"}, {"pluginRef": "active-request-scorer"}],
                },
                {
                    "name": "decode",
                    "plugins": [
                        {"pluginRef": "decode-filter"},
                        {"pluginRef": "prefix-cache-scorer", "weight": 2},
                        {"pluginRef": "active-request-scorer"},
                    ],
                },
            ],
            "dataLayer": {
                "discovery": {"pluginRef": "static-discovery"},
                "sources": [
                    {"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "core-metrics-extractor"}]}
                ],
            },
            "warmroute": {
                "listen": "127.0.0.1",
                "grpcPort": grpc_port,
                "metricsListen": "127.0.0.1",
                "metricsPort": self.metrics_port,
                "adminPort": self.admin_port,
                "responseHeaders": True,
                "drainTimeout": "100ms",
                "decideTimeout": "5s",  # engines, Envoy and the gateway start on the same processor
                "models": {MODEL: {"tokenizer": str(FILES)}},
                "handoff": handoff,
                **settings,
            },
        }
        file = self.fleet.directory / "warmroute.yaml"
        file.write_text(yaml.safe_dump(config))
        self.gateway = Gateway(load(file))
        self.stack.push_async_callback(self.gateway.stop)
        await self.gateway.start()
        addresses = [f"127.0.0.1:{endpoint['port']}" for endpoint in endpoints]
        await self.fleet.start_envoy(f"127.0.0.1:{grpc_port}", endpoints=addresses, mode=body_mode)
        await self.fleet.until(
            lambda: all(state.state == "exact" for state in self.gateway.streams.states()), "every stream is exact"
        )

    async def post(self, body: Json, path: str = CHAT, **headers: str) -> tuple[int, Json, dict[str, str]]:
        url = self.fleet.envoy.url + path
        async with self.fleet.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.json(), {k.lower(): v for k, v in response.headers.items()}

    async def alone(self, body: Json, path: str = CHAT) -> Json:
        url = f"http://{self.engines['alone'].address}{path}"
        async with self.fleet.session.post(url, json=body) as response:
            assert response.status == 200
            answer: Json = await response.json()
            return answer

    async def stream(self, url: str, body: Json) -> list[Json]:
        async with self.fleet.session.post(url + CHAT, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = (await response.text()).strip().split("\n\n")
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def count(self, metric: str, **labels: str) -> float:
        return self.gateway.registry.get_sample_value(f"warmroute_{metric}", labels) or 0.0

    def decoded(self) -> tuple[Engine, dict[str, str], Json]:
        """The one decode engine that was asked, and its last request."""
        asked = [engine for engine in self.decodes if engine.asked]
        assert len(asked) == 1
        return asked[0], *asked[0].asked[-1]

    async def released(self) -> None:
        await self.fleet.until(lambda: not len(self.gateway.books), "the books are empty")
        assert float(self.gateway.fleet.in_flight.sum()) == 0


Build = Callable[..., Awaitable[World]]


@pytest.fixture
async def build(fleet: Any, tokenizer: LocalTokenizer, writer: ReplyWriter, monkeypatch: pytest.MonkeyPatch) -> Build:
    # The gateway shares the engines' tokenizer: loading takes longer than all the rest of a test.
    monkeypatch.setattr(LocalTokenizer, "from_directory", lambda path, **options: tokenizer)

    async def make(variant: str, **changes: Any) -> World:
        mode, body_mode = VARIANTS[variant]
        world = World(fleet, tokenizer, writer)
        handoff = {"mode": mode, **changes.pop("handoff", {})}
        scrape = changes.pop("scrape", "60s")  # nobody notices a dead engine before a request does
        await world.start(handoff, body_mode, scrape, **changes)
        return world

    return make


def chat(*texts: str, **fields: Any) -> Json:
    """Texts in turns, the user's first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return {"model": MODEL, "messages": messages, **fields}


def text_of(chunks: list[Json]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


# --- what goes wrong


async def test_a_dead_prefill_engine_is_the_routers_secret(build: Build) -> None:
    world = await build("gateway")
    await world.prefill.stop()
    body = chat(LONG)
    status, answer, headers = await world.post(body)
    assert status == 200
    assert headers["x-warmroute-handoff"] == "local: connect"
    assert answer["choices"] == (await world.alone(body))["choices"]
    engine, _, sent = world.decoded()
    assert sent == body  # nothing of the failed leg is left in it
    assert world.count("handoffs_total", outcome="local", reason="connect") == 1
    assert f"{engine.address}" == headers["x-warmroute-endpoint"]
    await world.released()


async def test_with_sidecars_a_dead_prefill_engine_is_left_out_once_it_is_known(build: Build) -> None:
    world = await build("sidecar", scrape="50ms")
    await world.prefill.stop()
    slot = world.gateway.fleet.slot_of(world.prefill.address)
    await world.fleet.until(lambda: not world.gateway.fleet.healthy[slot], "the scraper noticed")
    status, _, _ = await world.post(chat(LONG))
    assert status == 200
    assert [told for sidecar in world.sidecars.values() for told in sidecar.told] == [None]
    await world.released()


async def test_a_slow_prefill_engine_is_given_up(build: Build) -> None:
    world = await build("gateway", handoff={"timeout": "200ms"})
    world.prefill.delay_s = 30.0
    status, _, _ = await world.post(chat(LONG, max_tokens=4))
    assert status == 200
    assert world.count("handoffs_total", outcome="local", reason="timeout") == 1
    await world.fleet.until(lambda: world.prefill.cancelled == 1, "the prefill engine was told to stop")
    await world.released()


async def test_a_client_that_leaves_during_the_prefill_leg_ends_it(build: Build) -> None:
    world = await build("gateway")
    world.prefill.delay_s = 30.0
    asking = asyncio.create_task(world.post(chat(LONG)))
    await world.fleet.until(lambda: world.prefill.asked, "the prefill leg is under way")
    assert float(world.gateway.fleet.in_flight.sum()) == 2
    asking.cancel()
    await world.fleet.until(lambda: world.prefill.cancelled == 1, "the prefill leg was ended")
    await world.released()
    assert not any(engine.asked for engine in world.decodes)


async def test_a_prefill_answer_without_parameters_is_not_passed_on(build: Build) -> None:
    world = await build("gateway")
    world.prefill.server.completions.offer = lambda sequence: None  # type: ignore[method-assign]
    body = chat(LONG)
    status, _, _ = await world.post(body)
    assert status == 200
    assert world.decoded()[2] == body
    assert world.count("handoffs_total", outcome="local", reason="no_transfer_params") == 1


async def test_a_client_can_neither_name_a_prefiller_nor_another_engines_memory(build: Build) -> None:
    world = await build("gateway")
    forged = {"do_remote_prefill": True, "remote_host": "10.9.9.9"}
    status, _, _ = await world.post(
        chat("Hi", max_tokens=2, kv_transfer_params=forged),
        **{"x-prefiller-host-port": "10.9.9.9:1", SOURCE: "10.9.9.9:1"},
    )
    assert status == 200
    _, headers, sent = world.decoded()
    assert not {"x-prefiller-host-port", SOURCE} & headers.keys()
    assert "kv_transfer_params" not in sent


# --- what goes right


@pytest.mark.parametrize("variant", VARIANTS)
async def test_a_long_prompt_is_computed_elsewhere_and_the_answer_is_that_of_one_engine(
    build: Build, variant: str
) -> None:
    world = await build(variant)
    body = chat(LONG, max_tokens=20, temperature=0.5)
    status, answer, _ = await world.post(
        body,
        **{"x-request-id": "the-request", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "authorization": "Bearer x"},
    )
    assert status == 200
    assert answer["choices"] == (await world.alone(body))["choices"]

    [(headers, first)] = world.prefill.asked
    assert {key: first[key] for key in ("max_tokens", "max_completion_tokens", "stream")} == {
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
    }
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    engine, later_headers, second = world.decoded()
    [offered] = [it["kv_transfer_params"] for it in world.prefill.answered]
    assert second == {**body, "kv_transfer_params": offered}
    for name, value in (("x-request-id", "the-request"), ("authorization", "Bearer x")):
        assert headers[name] == later_headers[name] == value
    assert headers["traceparent"].split("-")[1] == later_headers["traceparent"].split("-")[1] == "a" * 32
    if variant == "sidecar":
        assert world.sidecars[engine.name].told == [world.prefill.address]
        assert world.count("handoffs_total", outcome="transferred", reason="ok") == 0
    else:
        assert "x-prefiller-host-port" not in later_headers
        assert world.count("handoffs_total", outcome="transferred", reason="ok") == 1
    decided = {"decider": "prefix-based-pd-decider", "outcome": "disaggregate", "reason": "uncached"}
    assert world.count("decider_decisions_total", **decided) == 1
    await world.released()


@pytest.mark.parametrize("variant", VARIANTS)
async def test_streams_and_their_options_are_restored_for_the_decode_leg(build: Build, variant: str) -> None:
    world = await build(variant)
    body = chat(LONG, max_tokens=12, stream_options={"include_usage": True})
    chunks = await world.stream(world.fleet.envoy.url, body)
    assert text_of(chunks) == text_of(await world.stream(f"http://{world.engines['alone'].address}", body))
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert "stream_options" not in world.prefill.asked[0][1]
    assert world.decoded()[2]["stream_options"] == {"include_usage": True}
    await world.released()


@pytest.mark.parametrize("variant", ["sidecar", "gateway"])
async def test_completions_are_handed_off_too(build: Build, variant: str) -> None:
    world = await build(variant)
    body = {"model": MODEL, "prompt": LONG, "max_tokens": 10}
    status, answer, _ = await world.post(body, "/v1/completions")
    assert status == 200
    assert answer["choices"] == (await world.alone(body, "/v1/completions"))["choices"]
    assert len(world.prefill.asked) == 1


@pytest.mark.parametrize("variant", VARIANTS)
async def test_the_second_turn_goes_straight_back_to_the_decode_endpoint(build: Build, variant: str) -> None:
    world = await build(variant)
    status, answer, _ = await world.post(chat(LONG))
    assert status == 200
    engine, _, _ = world.decoded()
    held = await announced(world, engine, answer)
    reply = answer["choices"][0]["message"]["content"]
    body = chat(LONG, reply, "Thanks, makes sense.", max_tokens=8)
    status, again, headers = await world.post(body)
    assert status == 200
    assert again["choices"] == (await world.alone(body))["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= held * 16
    assert len(world.prefill.asked) == 1
    assert world.decoded()[0] is engine
    assert "kv_transfer_params" not in world.decoded()[2]
    assert int(headers["x-warmroute-predicted-cached-tokens"]) >= held * 16
    decided = {"decider": "prefix-based-pd-decider", "outcome": "local", "reason": "cached"}
    assert world.count("decider_decisions_total", **decided) == 1
    page = await text(world, f"http://127.0.0.1:{world.metrics_port}/metrics")
    assert (
        'warmroute_decider_decisions_total{decider="prefix-based-pd-decider",outcome="local",reason="cached"} 1.0'
        in page
    )
    assert 'warmroute_template_rewrites_history{model="sim"} 1.0' in page
    await world.released()


@pytest.mark.parametrize("variant", VARIANTS)
async def test_who_computes_the_prompt_is_told_which_endpoint_holds_the_reply(build: Build, variant: str) -> None:
    world = await build(variant, plugins=[{"type": "p2p-source-producer"}])
    status, answer, _ = await world.post(chat(LONG), **{SOURCE: "10.9.9.9:1"})
    assert status == 200
    engine, headers, _ = world.decoded()
    assert not any(SOURCE in it for it in (headers, world.prefill.asked[0][0])), "nobody holds anything yet"
    await announced(world, engine, answer)
    reply = answer["choices"][0]["message"]["content"]
    status, _, _ = await world.post(chat(LONG, reply, LONG, max_tokens=8), **{SOURCE: "10.9.9.9:1"})
    assert status == 200
    source = world.sidecars[engine.name].address if world.sidecars else engine.address
    assert [it[0].get(SOURCE) for it in world.prefill.asked] == [None, source]
    if variant != "sidecar":
        assert SOURCE not in engine.asked[-1][0], "it fetches from the prefill endpoint"
    assert world.count("request_hints_total", plugin="p2p-source-producer", outcome="no_better") == 1
    assert world.count("request_hints_total", plugin="p2p-source-producer", outcome="named") == 1
    await world.released()


async def announced(world: World, engine: Engine, answer: Json) -> int:
    """Waits until the index knows what `engine` keeps of prompt and reply; returns how many blocks that is at least."""
    held = int(answer["usage"]["total_tokens"] // 16 - 1)
    slot = world.gateway.fleet.slot_of(world.sidecars[engine.name].address if world.sidecars else engine.address)
    assert slot is not None
    await world.fleet.until(
        lambda: sum(bool(world.gateway.index.holders(key) >> slot & 1) for key in keys_of(world)) >= held,
        "the reply's blocks were announced",
    )
    return held


def keys_of(world: World) -> list[int]:
    return [key for shard in world.gateway.index._shards for key in list(shard.holders)]


async def text(world: World, url: str) -> str:
    async with world.fleet.session.get(url) as response:
        answer: str = await response.text()
        return answer


async def test_many_hand_offs_at_once_get_their_own_answers(build: Build) -> None:
    world = await build("gateway")
    bodies = [chat(f"Story {number}. {LONG}", max_tokens=6) for number in range(12)]
    answers = await asyncio.gather(*map(world.post, bodies))
    for body, (status, answer, _) in zip(bodies, answers, strict=True):
        assert status == 200
        assert answer["choices"] == (await world.alone(body))["choices"]
    assert world.count("handoffs_total", outcome="transferred", reason="ok") == 12
    ids = [headers["x-request-id"] for headers, _ in world.prefill.asked]
    assert sorted(ids) == sorted(headers["x-request-id"] for engine in world.decodes for headers, _ in engine.asked)
    assert len(set(ids)) == 12
    await world.released()


async def test_a_decision_is_explained_as_it_was_made_and_again_from_a_dump(build: Build, tmp_path: Path) -> None:
    world = await build("gateway", explain=True)
    status, answer, headers = await world.post(chat(LONG), **{"x-warmroute-explain": "1", "x-request-id": "first"})
    assert status == 200
    told = json.loads(headers["x-warmroute-explain"])
    admin = f"http://127.0.0.1:{world.admin_port}/state"
    kept = json.loads(await text(world, f"{admin}/decisions?request=first"))
    assert (told["prefill"], kept["prefill"]) == ("prefill-0", "prefill-0")
    assert kept["deciders"]["prefill"]["numbers"]["held_tokens"] == 0
    assert kept["profiles"]["decode"]["removed"] == {"prefill-0": "decode-filter"}
    assert kept["rewritesHistory"] is True

    usage = answer["usage"]
    held = (usage["total_tokens"] - 1) // 16  # nothing is computed after the last token
    stored = usage["prompt_tokens"] // 16 + held
    await world.fleet.until(
        lambda: world.gateway.index.stats().entries == stored, "both engines' blocks were announced"
    )
    await world.released()
    dump = read_dump((await text(world, f"{admin}/dump")).encode())
    body = json.dumps(chat(LONG, answer["choices"][0]["message"]["content"], "Thanks.")).encode()
    offline = await explain_offline(load(world.fleet.directory / "warmroute.yaml"), body, CHAT, {}, dump)
    _, _, headers = await world.post(json.loads(body), **{"x-request-id": "second"})
    online = json.loads(await text(world, f"{admin}/decisions?request=second"))
    for part in ("endpoints", "prefill", "deciders", "promptTokens"):
        assert offline[part] == online[part]
    assert online["deciders"]["prefill"]["reason"] == "cached"
    picked = online["profiles"]["decode"]["candidates"][0]
    assert picked["trust"] == "exact"
    assert picked["cachedTokens"]["precise-prefix-cache-producer"] >= held * 16
    assert "x-warmroute-explain" not in headers


async def test_the_routers_token_ids_reach_both_legs_where_they_are_asked_for(build: Build) -> None:
    world = await build("gateway", forwardTokenIds=True)
    body = chat(LONG, max_tokens=6)
    status, answer, _ = await world.post(body)
    assert status == 200
    alone = await world.alone({**body, "return_token_ids": True})
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    ids = alone["prompt_token_ids"]
    assert world.prefill.asked[0][1]["kv_transfer_params"]["prompt_token_ids"] == ids
    sent = world.decoded()[2]["kv_transfer_params"]
    assert (sent["prompt_token_ids"], sent["do_remote_prefill"]) == (ids, True)
    await world.post(chat("Short."))
    short = [
        asked for engine in world.decodes for _, asked in engine.asked if asked["messages"][0]["content"] == "Short."
    ]
    assert set(short[0]["kv_transfer_params"]) == {"prompt_token_ids"}
    assert world.count("token_ids_forwarded_total", forwarded="yes") == 2
