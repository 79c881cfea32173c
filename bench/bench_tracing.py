"""What tracing costs a decision: off (as shipped), and on with an exporter that throws away.

    python -m bench.bench_tracing [--json]

CPU time of the thread for one whole `RequestPath.decide` over a fleet of 100 endpoints with a tokenizer that answers at once,
best of several rounds that alternate between both; then the bare calls that a decision makes when tracing is off.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import load_text
from gateway.config_document import Model
from gateway.extproc.decision import Decided, Head
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producer_wiring import producers_of
from gateway.request_path import RequestPath, Settings
from gateway.served_models import ServedModels
from gateway.traced_cycle import TracedScheduler
from gateway.tracing import NoTracing, OtlpTracing, Tracing
from gateway.understanding import Understanding
from indexer.index import Index
from indexer.trust import Trust, exact
from tokenization.tokenized import Tokenized

ENDPOINTS = 100
TOKENS = 1024
ROUNDS, CALLS = 9, 300
CONFIG = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: []\n"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
STEPS = ("parse", "tokenize", "keys", "match", "schedule")


class Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Streams:
    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return exact(0.0)


class Confirmations:
    def confirmed(
        self, slot: int, keys: Any, prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """Nothing is learned."""


class AtOnce:
    """The same tokens for everybody."""

    def __init__(self) -> None:
        ids = np.arange(TOKENS, dtype=np.uint32)
        self._prompt = Tokenized(token_ids=ids)

    async def tokenize(self, path: str, body: Mapping[str, Any], *, size: int | None = None) -> Tokenized:
        return self._prompt


def path(tracing: Tracing) -> RequestPath:
    fleet = Fleet()
    for number in range(ENDPOINTS):
        fleet.add(Endpoint(name=str(number), address=f"10.0.{number // 250}.{number % 250}:8000"))
    metrics, models, config = Metrics(CollectorRegistry()), ServedModels({"m": Model()}, fleet), load_text(CONFIG)
    tokenizer = AtOnce()
    scheduler = config.scheduler(
        fleet, TracedScheduler if isinstance(tracing, OtlpTracing) else type(config.scheduler(fleet))
    )
    if isinstance(scheduler, TracedScheduler):
        scheduler.tracing = tracing
    return RequestPath(
        fleet=fleet,
        books=Books(fleet),
        breaker=Breaker(fleet),
        models=models,
        matcher=Matcher(fleet, Index(), Streams()),
        scheduler=scheduler,
        producers=producers_of(config, fleet),
        understanding=Understanding(models, lambda _: tokenizer, 0.4, metrics, tracing, time.monotonic),
        accuracy=Confirmations(),
        trust=lambda _: exact(0.0),
        metrics=metrics,
        tracing=tracing,
        settings=Settings(),
    )


async def decisions(it: RequestPath, calls: int) -> float:
    """Microseconds of CPU per decision; each is ended at once, so that the books stay empty."""
    spent = 0
    for number in range(calls):
        head = Head(method="POST", path="/v1/chat/completions", headers={}, request_id=str(number))
        started = time.thread_time_ns()
        answer = await it.decide(head, BODY)
        spent += time.thread_time_ns() - started
        assert isinstance(answer, Decided)
        assert answer.observer is not None
        answer.observer.finished()
    return spent / calls / 1e3


async def whole() -> dict[str, float]:
    """Best of ROUNDS, by kind."""
    kinds: dict[str, RequestPath] = {"off": path(NoTracing()), "on": path(OtlpTracing("", Nowhere()))}
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, it in kinds.items():
            taken = await decisions(it, CALLS)
            best[name] = min(taken, best.get(name, taken))
    return best


def calls_when_off() -> float:
    """Microseconds that the span calls of one decision take when tracing is off."""
    tracing = NoTracing()

    def once() -> None:
        with tracing.request({}) as span:
            for name in STEPS:
                with tracing.step(name) as step:
                    step.set("gen_ai.usage.input_tokens", 1)
            if span.recording:
                raise AssertionError
            span.set("gen_ai.request.model", "m")
            tracing.outgoing()

    return min(_timed(once) for _ in range(ROUNDS))


def _timed(call: Callable[[], None], calls: int = 5000) -> float:
    started = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - started) / calls / 1e3


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    as_json = arguments.parse_args().json
    figures = asyncio.run(whole())
    figures["span_calls_when_off"] = calls_when_off()
    if as_json:
        print(json.dumps(figures))
        return
    share = figures["span_calls_when_off"] / figures["off"]
    print(f"a decision over {ENDPOINTS} endpoints, {TOKENS} tokens, microseconds of CPU")
    print(
        f"  tracing off   {figures['off']:7.1f}   of which span calls {figures['span_calls_when_off']:.2f} ({share:.2%})"
    )
    print(f"  tracing on    {figures['on']:7.1f}   exporter that throws away")


if __name__ == "__main__":
    main()
