"""Spans: nothing when off, W3C context carried through and OTLP JSON to a collector when on."""

import asyncio
import json
from typing import Any

from aiohttp import web

from gateway.tracing import NoTracing, OtlpTracing

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
