"""The product as a user runs it: `warmroute serve` and `warmroute envoy-config` from one file, engines, real HTTP through Envoy.

Everything is a process of its own. One set of processes per body mode serves all tests of that mode; tests that kill
something start their own.
"""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from gateway.envoy_binary import EnvoyNotFoundError, find_envoy

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_FILES = REPOSITORY / "configs" / "models" / "qwen3"
MODEL = "sim"
CHAT = "/v1/chat/completions"
HOST = "127.0.0.1"
QUESTION = "What does a prefix cache of an inference engine hold, and who may use it again? " * 12


def ports(count: int) -> list[int]:
    held = [socket.create_server((HOST, 0)) for _ in range(count)]
    found = [int(probe.getsockname()[1]) for probe in held]
    for probe in held:
        probe.close()
    return found


class Stack:
    """Two engines, the gateway and Envoy."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, mode
        front, admin, grpc, metrics, *own = ports(10)
        self.url, self.metrics_url = f"http://{HOST}:{front}", f"http://{HOST}:{metrics}/metrics"
        self._ready_url = f"http://{HOST}:{admin}/ready"
        self.engines = [own[0:3], own[3:6]]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.config = folder / "warmroute.yaml"
        self.config.write_text(yaml.safe_dump(self._document(front, admin, grpc, metrics)))

    def _document(self, front: int, admin: int, grpc: int, metrics: int) -> dict[str, Any]:
        endpoints = [
            {"name": f"engine-{n}", "address": HOST, "port": http, "events": events, "replay": replay}
            for n, (http, events, replay) in enumerate(self.engines)
        ]
        return {
            "apiVersion": "llm-d.ai/v1alpha1",
            "kind": "EndpointPickerConfig",
            "plugins": [
                {"type": "static-discovery", "parameters": {"endpoints": endpoints}},
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
                "grpcPort": grpc,
                "metricsListen": HOST,
                "metricsPort": metrics,
                "responseHeaders": True,
                "maxBodyBytes": 16 << 20,
                "drainTimeout": "5s",
                "decideTimeout": "5s",
                "envoy": {"address": HOST, "port": front, "adminPort": admin, "mode": self.mode},
            },
        }

    def spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT)

    def spawn_engine(self, number: int) -> None:
        http, events, replay = self.engines[number]
        self.spawn(
            f"engine-{number}",
            *(sys.executable, "-m", "simulator", "--name", f"engine-{number}", "--model", MODEL, "--speed", "20"),
            *("--port", str(http), "--events-port", str(events), "--replay-port", str(replay)),
            *("--tokenizer", str(MODEL_FILES), "--reply-tokens", "24", "--die-with-parent"),
        )

    def warmroute(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from gateway.cli import main; main()", *arguments]

    def spawn_gateway(self) -> None:
        self.spawn("gateway", *self.warmroute("serve", "-c", str(self.config)))

    def start(self) -> None:
        envoy = self.folder / "envoy.yaml"
        subprocess.run(
            self.warmroute("envoy-config", "-c", str(self.config), "-o", str(envoy)), cwd=REPOSITORY, check=True
        )
        for number in range(len(self.engines)):
            self.spawn_engine(number)
        self.spawn_gateway()
        self.spawn("envoy", str(find_envoy()), "-c", str(envoy), "-l", "warning", "--concurrency", "1",
                   "--disable-hot-restart")  # fmt: skip

    def stop(self) -> None:
        for process in reversed(self.processes.values()):
            process.kill()
            process.wait()

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    async def until_routed(self, session: aiohttp.ClientSession, seconds: float = 60.0) -> None:
        """Until a chat comes back with the gateway's own header, and both streams are exact."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                _, headers, _ = await ask(session, self, "Are you there?")
                page = await text(session, self.metrics_url)
                if "x-warmroute-endpoint" in headers and page.count('state="exact"} 1.0') == 2:
                    return
            await asyncio.sleep(0.2)
        pytest.fail(f"not routed within {seconds} s\n{self.logs()}")


async def text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as answer:
        return await answer.text()


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


async def post(session: aiohttp.ClientSession, stack: Stack, data: bytes, path: str = CHAT, **headers: str) -> Any:
    named = {"content-type": "application/json", **headers}
    async with session.post(stack.url + path, data=data, headers=named) as answer:
        raw = await answer.read()
        return answer.status, answer.headers, raw


async def ask(session: aiohttp.ClientSession, stack: Stack, content: str, **fields: Any) -> Any:
    status, headers, raw = await post(session, stack, json.dumps(chat(content, **fields)).encode())
    return status, headers, json.loads(raw)


def metric(page: str, name: str, label: str = "") -> float:
    """Sum over all label sets, or over those that have `label`."""
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.fixture(scope="module", params=["BUFFERED", "FULL_DUPLEX_STREAMED"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    try:
        find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    stack = Stack(tmp_path_factory.mktemp("gateway"), request.param)
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "sim", "messages"', 400, "malformed_json"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', 400, "invalid_request"),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, "model_not_found"),
    ],
)
async def test_a_bad_request_gets_an_answer_in_openais_shape(
    running: Stack, session: aiohttp.ClientSession, body: bytes, status: int, code: str
) -> None:
    await running.until_routed(session)
    got, _, raw = await post(session, running, body)
    error = json.loads(raw)["error"]
    assert (got, error["code"]) == (status, code)
    assert error["message"]
    assert error["type"]


async def test_a_body_over_the_limit_is_413(running: Stack, session: aiohttp.ClientSession) -> None:
    await running.until_routed(session)
    status, _, raw = await post(session, running, json.dumps(chat("x" * (17 << 20))).encode())
    assert status == 413, raw[:200]


async def test_a_body_of_ten_megabytes_reaches_an_engine(running: Stack, session: aiohttp.ClientSession) -> None:
    await running.until_routed(session)
    status, headers, raw = await post(session, running, json.dumps(chat("word " * (2 << 20), max_tokens=1)).encode())
    # The engine itself says that so many tokens do not fit; it was asked, and its words came back.
    assert "x-sim-engine" in headers
    assert status in (200, 400), raw[:200]


async def test_the_second_turn_finds_the_first_where_it_was_predicted(
    running: Stack, session: aiohttp.ClientSession
) -> None:
    await running.until_routed(session)
    history: list[dict[str, str]] = []
    engines = set()
    for turn in range(3):
        history.append({"role": "user", "content": f"{running.mode} {turn}: {QUESTION}"})
        body = {"model": MODEL, "messages": history, "max_tokens": 24}
        status, headers, raw = await post(session, running, json.dumps(body).encode())
        assert status == 200, raw
        answer = json.loads(raw)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert headers["x-warmroute-trust"] == "exact"
        assert int(headers["x-warmroute-predicted-cached-tokens"]) == cached
        if turn:
            assert cached > 150 * turn
        engines.add(headers["x-sim-engine"])
        history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        await asyncio.sleep(0.3)  # events of this turn arrive
    assert len(engines) == 1


async def test_a_stream_arrives_as_it_is_produced(running: Stack, session: aiohttp.ClientSession) -> None:
    await running.until_routed(session)
    body = chat("Tell me more.", stream=True, max_tokens=64, stream_options={"include_usage": True}, ignore_eos=True)
    arrived: list[float] = []
    async with session.post(running.url + CHAT, json=body) as answer:
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = b""
        async for chunk in answer.content.iter_any():
            arrived.append(time.monotonic())
            events += chunk
    assert events.rstrip().endswith(b"data: [DONE]")
    assert b'"cached_tokens"' in events
    assert len(arrived) > 3


async def test_requests_without_a_prompt_are_routed(running: Stack, session: aiohttp.ClientSession) -> None:
    await running.until_routed(session)
    async with session.get(running.url + "/v1/models") as answer:
        assert answer.status == 200
        assert MODEL in await answer.text()
        assert "x-warmroute-endpoint" in answer.headers


async def test_a_client_cannot_choose_its_destination(running: Stack, session: aiohttp.ClientSession) -> None:
    await running.until_routed(session)
    spoof = {"x-gateway-destination-endpoint": f"{HOST}:1", "x-prefiller-host-port": f"{HOST}:1"}
    for _ in range(4):
        status, headers, _ = await post(session, running, json.dumps(chat("Hello")).encode(), **spoof)
        assert status == 200
        assert headers["x-warmroute-endpoint"] != f"{HOST}:1"


async def test_metrics_tell_what_happened(running: Stack, session: aiohttp.ClientSession) -> None:
    await running.until_routed(session)
    await ask(session, running, f"{running.mode}: count me. {QUESTION}")
    deadline = time.monotonic() + 20  # sampled token ids are compared a second after the response
    while (
        metric(page := await text(session, running.metrics_url), "warmroute_token_parity_total", 'result="equal"') == 0
    ):
        assert time.monotonic() < deadline, page
        await asyncio.sleep(0.3)
    assert metric(page, "warmroute_token_parity_total", 'result="differs"') == 0
    assert metric(page, "warmroute_requests_total") > 0
    assert metric(page, "warmroute_decision_step_seconds_count") > 0
    assert metric(page, "warmroute_events_total") > 0
    assert metric(page, "warmroute_index_keys") > 0
    # Too few may be predicted where events lag behind on a busy machine; too many never.
    assert metric(page, "warmroute_cached_tokens_error_sum", 'direction="over"') == 0
    assert metric(page, "warmroute_endpoint_in_flight") == 0


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    try:
        find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    stack = Stack(tmp_path, "BUFFERED")
    stack.start()
    yield stack
    stack.stop()


async def test_a_killed_gateway_loses_no_request_and_comes_back_with_its_picture(
    own_stack: Stack, session: aiohttp.ClientSession
) -> None:
    await own_stack.until_routed(session)
    statuses: list[int] = []
    stop = asyncio.Event()

    async def client(number: int) -> None:
        while not stop.is_set():
            status, _, _ = await ask(session, own_stack, f"client {number}: {QUESTION}")
            statuses.append(status)

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    await asyncio.sleep(1.5)
    own_stack.processes["gateway"].kill()
    await asyncio.sleep(3)
    stop.set()
    await asyncio.gather(*clients)
    assert len(statuses) > 8
    assert set(statuses) == {200}

    own_stack.spawn_gateway()
    await own_stack.until_routed(session)
    _, headers, answer = await ask(session, own_stack, f"client 0: {QUESTION}")
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    # The replay of the engines' buffers told it what it had missed.
    assert int(headers["x-warmroute-predicted-cached-tokens"]) == cached > 100


async def test_an_engine_that_dies_is_skipped_and_taken_back_empty(
    own_stack: Stack, session: aiohttp.ClientSession
) -> None:
    await own_stack.until_routed(session)
    _, headers, _ = await ask(session, own_stack, QUESTION)
    dead = int(headers["x-sim-engine"].removeprefix("engine-"))
    own_stack.processes[f"engine-{dead}"].kill()
    await asyncio.sleep(0.3)  # Envoy drops its idle connections; a request already on one of them would be lost
    for _ in range(8):
        status, headers, _ = await ask(session, own_stack, QUESTION)
        assert status == 200
        assert headers["x-sim-engine"] != f"engine-{dead}"
    own_stack.processes[f"engine-{dead}"].wait()
    own_stack.spawn_engine(dead)
    await own_stack.until_routed(session)
    # Nothing of the old process's cache is believed: what it gets is predicted as it reports it.
    seen = set()
    for number in range(8):
        _, headers, answer = await ask(session, own_stack, f"{number} {QUESTION}")
        seen.add(headers["x-sim-engine"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(headers["x-warmroute-predicted-cached-tokens"]) <= cached
    assert len(seen) == 2


async def test_an_engine_that_says_it_cannot_serve_is_left_for_the_next_one_and_a_busy_one_is_believed(
    own_stack: Stack, session: aiohttp.ClientSession
) -> None:
    await own_stack.until_routed(session)
    _, headers, _ = await ask(session, own_stack, QUESTION)
    number = int(headers["x-sim-engine"].removeprefix("engine-"))
    place, other = own_stack.engines[number][0], own_stack.engines[1 - number][0]
    refuse = f"http://{HOST}:{place}/sim/refuse"

    async with session.post(refuse, json={"status": 503, "seconds": 60}) as answer:
        assert answer.status == 200
    status, headers, _ = await ask(session, own_stack, QUESTION)
    assert status == 200
    assert headers["x-warmroute-endpoint"] == f"{HOST}:{place}", "its cache is known"
    assert headers["x-warmroute-served-by"] == f"{HOST}:{other}"

    async with session.post(refuse, json={"status": 429, "seconds": 60}) as answer:
        assert answer.status == 200
    async with session.post(own_stack.url + CHAT, json=chat(f"Something new. {QUESTION}")) as answer:
        assert answer.status in (200, 429)
    statuses = set()
    for _ in range(12):
        async with session.post(own_stack.url + CHAT, json=chat(QUESTION)) as answer:
            statuses.add(answer.status)
    assert statuses <= {200, 429}, "no breaker opens for it, and nobody is told of anything worse"


async def test_sigterm_drains_and_ends_with_zero(own_stack: Stack, session: aiohttp.ClientSession) -> None:
    await own_stack.until_routed(session)
    body = chat("A long one.", stream=True, max_tokens=200, ignore_eos=True)
    async with session.post(own_stack.url + CHAT, json=body) as answer:
        assert answer.status == 200
        own_stack.processes["gateway"].terminate()
        events = await answer.read()
    assert events.rstrip().endswith(b"data: [DONE]")
    assert await asyncio.to_thread(own_stack.processes["gateway"].wait, 30) == 0
