"""Spans: nothing when off, W3C context carried through and OTLP JSON to a collector when on."""

import asyncio
import json
from typing import Any

from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Request
from gateway.config import load_text
from gateway.cycle import Decision
from gateway.traced_cycle import TracedScheduler
from gateway.tracing import NoTracing, OtlpTracing, describe_destination, describe_request

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_off_records_nothing_and_sends_nothing_on() -> None:
    tracing = NoTracing()
    with tracing.request({"traceparent": PARENT}) as span, tracing.step("parse"):
        span.set("server.address", "x")
        assert tracing.outgoing() == {}


async def test_a_collector_receives_the_request_and_its_steps_under_the_clients_trace() -> None:
    received: list[dict[str, Any]] = []

    async def traces(request: web.Request) -> web.Response:
        received.append(json.loads(await request.read()))
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    tracing = OtlpTracing(f"http://{host}:{port}")
    with tracing.request({"traceparent": PARENT}) as span:
        span.set("server.address", "10.0.0.1:8000")
        with tracing.step("match") as step:
            step.set("tokens", 96)
            outgoing = tracing.outgoing()
    await asyncio.to_thread(tracing.close)
    await runner.cleanup()

    spans = received[0]["resourceSpans"][0]["scopeSpans"][0]["spans"]
    match, request = spans
    assert (match["name"], request["name"]) == ("match", "gateway.request")
    assert request["traceId"] == "0af7651916cd43dd8448eb211c80319c"
    assert request["parentSpanId"] == "b7ad6b7169203331"
    assert match["parentSpanId"] == request["spanId"]
    assert {"key": "tokens", "value": {"intValue": "96"}} in match["attributes"]
    assert outgoing["traceparent"] == f"00-{request['traceId']}-{match['spanId']}-01"


async def test_a_collector_that_is_down_costs_the_spans_and_nothing_else() -> None:
    tracing = OtlpTracing("http://127.0.0.1:9")
    with tracing.request({}):
        pass
    await asyncio.to_thread(tracing.close)
    assert tracing.outgoing() == {}


CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: decode-filter}
- {type: queue-scorer}
- {type: active-request-scorer}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: decode-filter}
  - {pluginRef: queue-scorer}
  - {pluginRef: active-request-scorer}
  - {pluginRef: max-score-picker}
"""


def traced_cycle(fleet: Fleet, exporter: InMemorySpanExporter) -> tuple[TracedScheduler, OtlpTracing]:
    tracing = OtlpTracing("", exporter)
    scheduler = load_text(CONFIG).scheduler(fleet, TracedScheduler)
    assert isinstance(scheduler, TracedScheduler)
    scheduler.tracing = tracing
    return scheduler, tracing


def test_a_traced_cycle_decides_the_same_and_has_a_span_per_plugin() -> None:
    fleet, exporter = Fleet(), InMemorySpanExporter()
    for number in range(3):
        fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
    fleet.waiting[:3] = (4, 0, 2)
    scheduler, tracing = traced_cycle(fleet, exporter)
    request = Request(id="r", model="m", target_model="m", path="/v1/completions", headers={})
    with tracing.request({}) as span:
        describe_request(span, "POST", "/v1/chat/completions?x=1")
        decision = scheduler.schedule(request, fleet.slots())
        assert isinstance(decision, Decision)
        describe_destination(span, decision.destinations[0])
    plain = load_text(CONFIG).scheduler(fleet).schedule(request, fleet.slots())
    assert isinstance(plain, Decision)
    assert decision.slots == plain.slots
    tracing.close()

    spans = {
        (span.name, (span.attributes or {}).get("warmroute.plugin.name")): span
        for span in exporter.get_finished_spans()
    }
    assert set(spans) == {
        ("filter", "decode-filter"),
        ("score", "queue-scorer"),
        ("score", "active-request-scorer"),
        ("pick", "max-score-picker"),
        ("gateway.request", None),
    }
    assert spans["score", "queue-scorer"].attributes["warmroute.score.max"] == 1.0  # type: ignore[index]
    assert dict(spans["gateway.request", None].attributes or {}) == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "gen_ai.operation.name": "chat",
        "server.address": "10.0.0.1",
        "server.port": 8000,
    }


def test_off_no_attribute_is_worked_out() -> None:
    with NoTracing().request({}) as span:
        assert not span.recording
        describe_destination(span, "not an address")  # would raise ValueError
