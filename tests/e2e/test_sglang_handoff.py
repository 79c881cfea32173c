"""SGLang's way of handing off, behind a real Envoy: both engines answer only when they have met in the same room."""

import asyncio
import json
from typing import Any

import pytest
import yaml
from aiohttp import web

from gateway.config import load
from gateway.runtime import Gateway

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": False}


class Rendezvous:
    """The bootstrap server of the prefill engine and both engines' HTTP faces."""

    def __init__(self) -> None:
        self.arrived: dict[int, dict[str, asyncio.Event]] = {}
        self.bodies: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}

    def engine(self, role: str) -> web.Application:
        async def answer(request: web.Request) -> web.Response:
            body = json.loads(await request.read())
            self.bodies[role].append(body)
            if "bootstrap_room" not in body:  # as SGLang's scheduler does
                return web.json_response({"error": {"message": "received without bootstrap room id"}}, status=400)
            here = self.arrived.setdefault(
                body["bootstrap_room"], {"prefill": asyncio.Event(), "decode": asyncio.Event()}
            )
            here[role].set()
            async with asyncio.timeout(5):
                await here["decode" if role == "prefill" else "prefill"].wait()
            return web.json_response({"answered_by": role, "usage": {"prompt_tokens": 1, "completion_tokens": 1}})

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        return app


@pytest.fixture
async def meeting(fleet: Any) -> Rendezvous:
    meeting, ports = Rendezvous(), {}
    for role in ("prefill", "decode"):
        runner = web.AppRunner(meeting.engine(role), access_log=None, shutdown_timeout=0.2)
        await runner.setup()
        fleet.stack.push_async_callback(runner.cleanup)
        ports[role] = fleet.free_port()
        await web.TCPSite(runner, "127.0.0.1", ports[role]).start()
    grpc_port = fleet.free_port()
    endpoints = [
        {"name": role, "address": "127.0.0.1", "port": port, "role": role, "labels": {"bootstrap-port": "8123"}}
        for role, port in ports.items()
    ]
    profiles = [{"name": role, "plugins": [{"pluginRef": f"{role}-filter"}]} for role in ports]
    config = {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "static-discovery", "parameters": {"endpoints": endpoints}},
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
            {"type": "always-disagg-pd-decider"},
            {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}}},
        ],
        "schedulingProfiles": profiles,
        "dataLayer": {"discovery": {"pluginRef": "static-discovery"}, "injectDefaults": False},
        "warmroute": {
            "listen": "127.0.0.1",
            "grpcPort": grpc_port,
            "metricsListen": "127.0.0.1",
            "metricsPort": fleet.free_port(),
            "drainTimeout": "100ms",
            "responseHeaders": True,
            "handoff": {"mode": "gateway", "connector": "sglang"},
        },
    }
    file = fleet.directory / "warmroute.yaml"
    file.write_text(yaml.safe_dump(config))
    gateway = Gateway(load(file))
    fleet.stack.push_async_callback(gateway.stop)
    await gateway.start()
    addresses = [f"127.0.0.1:{port}" for port in ports.values()]
    await fleet.start_envoy(f"127.0.0.1:{grpc_port}", endpoints=addresses)
    fleet.gateway = gateway
    return meeting


async def test_both_engines_meet_and_the_client_gets_the_decode_engines_answer(fleet: Any, meeting: Rendezvous) -> None:
    answers = await asyncio.gather(*(fleet.post(json.dumps(BODY).encode(), "/v1/chat/completions") for _ in range(8)))
    assert [(status, answer["answered_by"]) for status, answer in answers] == [(200, "decode")] * 8
    rooms = [body["bootstrap_room"] for body in meeting.bodies["decode"]]
    assert len(set(rooms)) == 8
    assert sorted(rooms) == sorted(body["bootstrap_room"] for body in meeting.bodies["prefill"])
    for body in (*meeting.bodies["prefill"], *meeting.bodies["decode"]):
        del body["bootstrap_room"]
        assert body == {**BODY, "bootstrap_host": "127.0.0.1", "bootstrap_port": 8123}
    await fleet.until(lambda: not len(fleet.gateway.books), "the books are empty")
    assert float(fleet.gateway.fleet.in_flight.sum()) == 0
