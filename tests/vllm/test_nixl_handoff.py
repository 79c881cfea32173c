"""Prompts computed on one real engine and continued on another, whose KV cache NIXL carried over TCP.

Every prompt is new to every engine when it is sent. What an answer must be, a third engine says, which knows of no transfer.
Figures go to the file that WARMROUTE_VLLM_REPORT names, with `.nixl` at its end.
"""

import json
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.demo_setup import choose_ports
from tests.vllm.conftest import PYTHON, Engine, Fleet, Served, free_port

WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "gravel", "harbor")
LENGTHS = (12, 90, 300, 900)
"""Words of a prompt: less than one block, several, and more than the engine computes in one step."""
KINDS = [(path, stream) for path in ("/v1/chat/completions", "/v1/completions") for stream in (False, True)]
HANDOFF = "x-warmroute-handoff"

Json = dict[str, Any]


class Answer(NamedTuple):
    """What a client sees, without what differs between any two requests."""

    status: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class World(NamedTuple):
    fleet: Fleet
    alone: Engine

    @property
    def prefill(self) -> Engine:
        return self.fleet.engines[0]

    @property
    def decode(self) -> Engine:
        return self.fleet.engines[1]

    async def ask(self, url: str, path: str, body: Json) -> tuple[Answer, str]:
        """The answer, and what the gateway says became of the prefill leg."""
        async with self.fleet.session.post(url + path, json=body) as response:
            page = await response.text()
            assert response.status == 200, page
            headers = response.headers
        if not body["stream"]:
            return answer_of(200, [json.loads(page)]), headers.get(HANDOFF, "")
        *lines, end = page.strip().split("\n\n")
        assert end == "data: [DONE]"
        return answer_of(200, [json.loads(line.removeprefix("data: ")) for line in lines]), headers.get(HANDOFF, "")

    async def used_again(self) -> None:
        """Ask for little until the gateway hands off: the scraper and the breaker take some seconds to believe it."""
        deadline = time.monotonic() + 120.0
        became = ""
        while not became.startswith("transferred"):
            assert time.monotonic() < deadline, f"still {became!r}"
            _, became = await self.ask(self.fleet.url, "/v1/completions", body_of("/v1/completions", False, "Again?"))

    async def counter(self, engine: Engine, metric: str) -> float:
        """The sum over all labels."""
        return await self._sum(f"{engine.url}/metrics", metric)

    async def failed_open(self) -> int:
        """Requests that Envoy let go on without the gateway, because its stream to it broke."""
        url = f"http://127.0.0.1:{self.fleet.ports.envoy_admin}/stats?filter=ext_proc.failure_mode_allowed"
        async with self.fleet.session.get(url) as response:
            return sum(int(line.rsplit(": ", 1)[1]) for line in (await response.text()).splitlines() if ": " in line)

    async def handoffs(self, outcome: str, reason: str) -> float:
        page = f"http://127.0.0.1:{self.fleet.ports.metrics}/metrics"
        return await self._sum(page, f'warmroute_handoffs_total{{outcome="{outcome}",reason="{reason}"}}')

    async def _sum(self, url: str, start: str) -> float:
        async with self.fleet.session.get(url) as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{start}{{", f"{start} ")))


def answer_of(status: int, parts: Sequence[Json]) -> Answer:
    """Of one answer, or of all chunks of a stream."""
    choices = [choice for part in parts for choice in part["choices"]]
    texts = (choice.get("text") or choice.get("message", choice.get("delta", {})).get("content") for choice in choices)
    usage = parts[-1]["usage"]
    return Answer(
        status,
        "".join(text or "" for text in texts),
        tuple(token for choice in choices for token in choice.get("token_ids") or ()),
        choices[-1]["finish_reason"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def body_of(path: str, stream: bool, prompt: str) -> Json:
    body: Json = {
        "model": "tiny",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if path.endswith("/chat/completions"):
        return {**body, "messages": [{"role": "user", "content": prompt}]}
    return {**body, "prompt": prompt}


def prompts(seed: int, lengths: Sequence[int]) -> list[tuple[str, Json]]:
    """One request of every kind for every length, no two of which begin alike."""
    rng = random.Random(seed)
    return [
        (path, body_of(path, stream, " ".join(rng.choice(WORDS) for _ in range(length))))
        for length in lengths
        for path, stream in KINDS
    ]


def transferring(model: Path, role: str) -> Served:
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "lo",
        **FORK,
    }
    return Served(model, "tiny", 400, ("--kv-transfer-config", json.dumps(config)), environment)


FORK = {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
"""The engine's process starts with what the server has already imported: three of them have two cores."""


def configure(config: Json) -> None:
    """The first engine prefills, the second decodes, and every prompt is handed off."""
    roles = ("prefill", "decode")
    discovery, *others = config["plugins"]
    for endpoint, role in zip(discovery["parameters"]["endpoints"], roles, strict=True):
        endpoint["role"] = role
    config["plugins"] = [
        discovery,
        *others,
        {"type": "metrics-data-source", "parameters": {"interval": "5s"}},
        {"type": "core-metrics-extractor"},
        {"type": "prefill-filter"},
        {"type": "decode-filter"},
        {"type": "always-disagg-pd-decider"},
        {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}},
    ]
    config["schedulingProfiles"] = [
        {
            "name": role,
            "plugins": [{"pluginRef": name} for name in (f"{role}-filter", "expected-work-scorer", "max-score-picker")],
        }
        for role in roles
    ]
    # A dead engine is found by the requests that are sent to it before it is found by the scraper.
    config["dataLayer"]["sources"] = [
        {"pluginRef": "metrics-data-source", "extractors": [{"pluginRef": "core-metrics-extractor"}]}
    ]
    config["warmroute"]["handoff"] = {"mode": "gateway", "connector": "nixl", "timeout": "60s"}


@pytest.fixture
def nixl() -> None:
    tried = subprocess.run([os.environ[PYTHON], "-c", "import nixl._api"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"needs nixl in {os.environ[PYTHON]}: run `make test-vllm` ({tried.stderr.strip()[-200:]})")


@pytest.fixture
async def world(nixl: None, tmp_path: Path, models: Path) -> AsyncIterator[World]:
    model = models / "llama"
    folder = tmp_path / "alone"
    folder.mkdir()
    alone = Engine(0, choose_ports(free_port(), 1), Served(model, "tiny", 400, environment=FORK), folder)
    alone.start()
    try:
        serving = (transferring(model, "kv_producer"), transferring(model, "kv_consumer"))
        async with Fleet(tmp_path, *serving, configure=configure) as fleet:
            await alone.healthy(fleet.session)
            yield World(fleet, alone)
    finally:
        alone.kill()


EXTERNAL = "vllm:external_prefix_cache_hits_total"
BYTES = "vllm:nixl_bytes_transferred_sum"


async def test_a_prompt_computed_elsewhere_is_continued_as_if_it_had_been_computed_here(world: World) -> None:
    began = time.monotonic()
    rows: list[Json] = []

    async def each(
        phase: str, requests: list[tuple[str, Json]], first: Callable[[], None] = lambda: None
    ) -> list[Json]:
        """`first` happens when everything is known that the answers are compared with."""
        answers = [(await world.ask(world.alone.url, path, body))[0] for path, body in requests]
        first()
        for (path, body), expected in zip(requests, answers, strict=True):
            before, sent = await world.counter(world.decode, EXTERNAL), time.monotonic()
            failed_open = await world.failed_open()
            answer, became = await world.ask(world.fleet.url, path, body)
            seconds = time.monotonic() - sent
            rows.append(
                {
                    "phase": phase,
                    "path": path,
                    "stream": body["stream"],
                    "prompt_tokens": answer.prompt_tokens,
                    "equal": answer == expected,
                    "handoff": became,
                    "transferred": await world.counter(world.decode, EXTERNAL) - before,
                    # On a machine without a free core the gateway may answer Envoy's pings too late: it then goes on
                    # without it, and what is left to ask for is the right answer.
                    "failed_open": await world.failed_open() - failed_open,
                    "seconds": round(seconds, 3),
                }
            )
            if answer != expected:
                rows[-1]["difference"] = {"alone": expected, "handed off": answer}
        return [row for row in rows if row["phase"] == phase]

    handed = await each("handed off", prompts(1, LENGTHS))
    transfers = await world.handoffs("transferred", "ok")
    moved = await world.counter(world.decode, BYTES)
    computed = await world.counter(world.prefill, "vllm:prompt_tokens_total")

    alone = await each("prefill engine killed", prompts(2, LENGTHS[:3]), world.prefill.kill)

    world.prefill.start()
    await world.prefill.healthy(world.fleet.session)
    await world.fleet.exact(world.prefill)
    await world.used_again()
    again = await each("prefill engine back", prompts(3, LENGTHS[1:2]))

    figures = {
        "engines_up_s": round(world.fleet.started_s, 1),
        "workload_s": round(time.monotonic() - began, 1),
        "bytes_transferred": moved,
        "prefill_prompt_tokens": computed,
        "handoffs_transferred": await world.handoffs("transferred", "ok"),
        "handoffs_local_connect": await world.handoffs("local", "connect"),
        "requests": rows,
    }
    write(figures)
    print(json.dumps(figures, indent=1))

    assert [row for row in rows if not row["equal"]] == []
    assert sum(row["failed_open"] > 0 for row in rows) < len(rows) / 4
    for row in (row for row in (*handed, *again) if not row["failed_open"]):
        assert row["handoff"] == f"transferred from {world.prefill.address}"
        assert row["transferred"] == row["prompt_tokens"]
    assert transfers >= sum(not row["failed_open"] for row in handed)
    assert moved > 0
    assert [row["transferred"] for row in alone] == [0.0] * len(alone)
    # Who finds the dead engine first, a request or the scraper, is a matter of milliseconds.
    assert {row["handoff"] for row in alone} <= {"local: connect", ""}


def write(figures: Json) -> None:
    if report := os.environ.get("WARMROUTE_VLLM_REPORT"):
        Path(f"{report}.nixl").write_text(json.dumps(figures, indent=1))
