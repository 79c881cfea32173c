"""A small fleet under observation: two simulated prefill and two decode engines, the gateway, Envoy, and a real Prometheus.

The dashboards' queries are asked here by the tests, and `render` draws them for the docs from a longer run.
"""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from deploy.grafana.special_traffic import bursts, model_with_images, pictures
from gateway.demo_children import Children
from gateway.demo_setup import (
    HOST,
    MODEL,
    MODEL_FILES,
    Ports,
    choose_ports,
    engine_command,
    envoy_command,
    envoy_parameters,
    gateway_command,
)
from gateway.demo_traffic import Observation, Shape, client_session, drive, plan
from gateway.envoy_binary import find_envoy
from gateway.envoy_config import envoy_yaml

ROLES = ("prefill", "prefill", "decode", "decode")
RULES = Path(__file__).resolve().parent.parent / "prometheus" / "rules.yaml"
PRODUCER = "precise-prefix-cache-producer"
BURSTS = "burst-prefix-cache-producer"


def find_prometheus() -> tuple[Path, Path] | None:
    """prometheus and promtool: from WARMROUTE_PROMETHEUS (a folder) or PATH; None where one is missing."""
    folder = os.environ.get("WARMROUTE_PROMETHEUS")
    found = [shutil.which(name, path=folder) for name in ("prometheus", "promtool")]
    return (Path(found[0]), Path(found[1])) if found[0] and found[1] else None


def picker_config(ports: Ports, admin: int, model_files: Path) -> dict[str, Any]:
    """Prefill and decode pools with hand-offs by the gateway, bursts and hints, and every metric switched on."""
    endpoints = [
        {
            "name": f"{role}-{number % 2}",
            "address": HOST,
            "port": own.http,
            "events": own.events,
            "replay": own.replay,
            "role": role,
        }
        for number, (role, own) in enumerate(zip(ROLES, ports.engines, strict=True))
    ]
    match = {"prefixMatchInfoProducerName": PRODUCER}
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "static-discovery", "parameters": {"endpoints": endpoints}},
            {"type": "token-producer", "parameters": {"local": {"path": str(model_files)}}},
            {"type": PRODUCER},
            {"type": BURSTS, "parameters": {"windowDurationMs": 50}},
            {"type": "p2p-source-producer", "parameters": match},
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
            {"type": "expected-work-scorer", "parameters": match},
            {"type": "prefix-cache-scorer", "parameters": match},
            {
                "name": "burst-scorer",
                "type": "prefix-cache-scorer",
                "parameters": {"prefixMatchInfoProducerName": BURSTS},
            },
            {"type": "active-request-scorer"},
            {"type": "max-score-picker"},
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 700, **match}},
            {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}},
        ],
        "schedulingProfiles": [
            {
                "name": "prefill",
                "plugins": [
                    {"pluginRef": "prefill-filter"},
                    {"pluginRef": "expected-work-scorer"},
                    {"pluginRef": "burst-scorer", "weight": 2},
                ],
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
        "dataLayer": {"discovery": {"pluginRef": "static-discovery"}},
        "warmroute": {
            "listen": HOST,
            "grpcPort": ports.picker,
            "metricsListen": HOST,
            "metricsPort": ports.metrics,
            "adminPort": admin,
            "compatibilityMetrics": True,
            "explain": True,
            "responseHeaders": True,
            "drainTimeout": "1s",
            "decideTimeout": "5s",
            "handoff": {"mode": "gateway"},
            "models": {MODEL: {"tokenizer": str(model_files)}},
        },
    }


def prometheus_config(target: str) -> dict[str, Any]:
    """Scrape one gateway every second, with the rules."""
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "warmroute", "static_configs": [{"targets": [target]}]}],
    }


class Trial:
    """What runs, and how to use it."""

    def __init__(self, ports: Ports, admin: int, prometheus: int, session: aiohttp.ClientSession) -> None:
        self.front = f"http://{HOST}:{ports.front}"
        self.target = f"{HOST}:{ports.metrics}"
        self.admin = f"{HOST}:{admin}"
        self.prometheus = f"http://{HOST}:{prometheus}"
        self._session = session

    async def traffic(self, shape: Shape) -> list[Observation]:
        """Multi-turn chats, and beside them bursts of one prompt, images, and a few requests without a prompt. What was
        observed of chats and bursts."""
        for _ in range(5):
            async with self._session.get(f"{self.front}/v1/models") as answer:
                await answer.read()
        times = max(3, int(shape.spread_s / 8))
        pause_s = shape.spread_s / times
        chats, fanned, _ = await asyncio.gather(
            drive(self.front, MODEL, plan(shape), lambda _: None),
            bursts(self.front, MODEL, times, pause_s, seed=shape.seed),
            pictures(self.front, MODEL, 3 * times, pause_s / 3, seed=shape.seed),
        )
        return [*chats, *fanned]

    async def ask(self, query: str, at: float | None = None) -> list[dict[str, Any]]:
        """An instant query's result. Raises ValueError with Prometheus's message where the query is invalid."""
        return await self._query("query", {"query": query, **({"time": str(at)} if at else {})})

    async def ask_range(self, query: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """A range query's result."""
        return await self._query("query_range", {"query": query, "start": start, "end": end, "step": step})

    async def get(self, path: str) -> Any:
        """Any page of Prometheus's API."""
        async with self._session.get(f"{self.prometheus}/api/v1/{path}") as answer:
            return await answer.json()

    async def _query(self, kind: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        async with self._session.get(f"{self.prometheus}/api/v1/{kind}", params=parameters) as answer:
            page = await answer.json()
        if page["status"] != "success":
            raise ValueError(f"{page.get('error')}: {parameters['query']}")
        result: list[dict[str, Any]] = page["data"]["result"]
        return result


@contextlib.asynccontextmanager
async def trial(folder: Path, *, blocks: int = 2200, ready_s: float = 120.0) -> AsyncIterator[Trial]:
    """Start everything in `folder`, wait until it routes, and end it afterwards. Raises RuntimeError, EnvoyNotFoundError."""
    tools = find_prometheus()
    if tools is None:
        raise RuntimeError("needs prometheus and promtool on PATH or in the folder WARMROUTE_PROMETHEUS")
    envoy = find_envoy()
    more = choose_ports(0, 1).engines[0]
    admin, prometheus = more.http, more.events
    ports = choose_ports(more.replay, len(ROLES))
    files = _write_configs(folder, ports, admin)
    async with Children(folder) as children, client_session() as session:
        for number in range(len(ROLES)):
            command = [*engine_command(number, ports, blocks, reply_tokens=40), "--recompute-failed-loads"]
            await children.start(f"engine-{number}", command)
        await children.start("gateway", gateway_command(files["warmroute"]))
        await children.start("envoy", envoy_command(envoy, files["envoy"]))
        await children.start("prometheus", _prometheus_command(tools[0], files["prometheus"], prometheus, folder))
        running = Trial(ports, admin, prometheus, session)
        deadline = time.monotonic() + ready_s
        while not await _ready(session, running):
            children.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not ready after {ready_s:.0f} s; look into {folder}")
            await asyncio.sleep(0.3)
        yield running


def _write_configs(folder: Path, ports: Ports, admin: int) -> dict[str, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.yaml" for name in ("warmroute", "envoy", "prometheus")}
    model = model_with_images(MODEL_FILES, folder / "model")
    files["warmroute"].write_text(yaml.safe_dump(picker_config(ports, admin, model), sort_keys=False))
    files["envoy"].write_text(envoy_yaml(envoy_parameters(ports)))
    files["prometheus"].write_text(yaml.safe_dump(prometheus_config(f"{HOST}:{ports.metrics}")))
    return files


def _prometheus_command(binary: Path, config: Path, port: int, folder: Path) -> Sequence[str]:
    return [
        str(binary),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={HOST}:{port}",
        "--log.level=warn",
    ]


async def _ready(session: aiohttp.ClientSession, running: Trial) -> bool:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}], "max_tokens": 1}
    try:
        async with session.get(f"{running.prometheus}/-/ready") as answer:
            up = answer.status == 200
        async with session.post(f"{running.front}/v1/chat/completions", json=body) as answer:
            return up and answer.status == 200 and "x-warmroute-endpoint" in answer.headers
    except (aiohttp.ClientError, TimeoutError):
        return False
