"""OpenTelemetry spans, off unless asked for. Off costs an empty context manager per span (bench/bench_tracing.py).

    gateway.request                 http.request.method, url.path, gen_ai.operation.name, gen_ai.request.model,
      |                             gen_ai.usage.input_tokens, server.address, server.port, http.response.status_code
      |-- parse, tokenize, keys, match
      |-- schedule                  filter, score, pick, decide: one per plugin (gateway.traced_cycle)
      `-- handoff                   the prefill leg, where the gateway sends it

Attribute names are those of OpenTelemetry's GenAI and HTTP conventions; what they have no name for begins with `warmroute.`.
The engine gets the `traceparent` of `gateway.request`, so that its own spans (vLLM's --otlp-traces-endpoint) hang below it.
"""

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gateway.otlp_json import OtlpJsonExporter

AttributeValue = str | int | float | bool


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""Path -> gen_ai.operation.name."""


class Span(Protocol):
    recording: bool
    """Whether it is worth working out an attribute."""

    def set(self, name: str, value: AttributeValue) -> None: ...


class Tracing(Protocol):
    """Where spans go: nowhere (`NoTracing`) or to an OTLP endpoint (`OtlpTracing`)."""

    def request(self, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        """The span of one request, child of the client's W3C context where there is one."""
        ...

    def step(self, name: str) -> AbstractContextManager[Span]:
        """A span for one step, child of the current one."""
        ...

    def outgoing(self) -> dict[str, str]:
        """`traceparent` and `tracestate` for the engine; empty where tracing is off (the client's own then pass through)."""
        ...

    def close(self) -> None: ...


def describe_destination(span: Span, address: str) -> None:
    """Where a request goes: `ip:port`."""
    if span.recording:
        host, _, port = address.rpartition(":")
        span.set("server.address", host)
        span.set("server.port", int(port))


def describe_request(span: Span, method: str, path: str) -> None:
    """What a request is, as far as its head says."""
    if span.recording:
        route = path.partition("?")[0]
        span.set("http.request.method", method)
        span.set("url.path", route)
        if (operation := OPERATIONS.get(route)) is not None:
            span.set("gen_ai.operation.name", operation)


class _NoSpan:
    recording = False

    def set(self, name: str, value: AttributeValue) -> None:
        """Attributes of a span that nobody records."""


NO_SPAN: AbstractContextManager[Span] = contextlib.nullcontext(_NoSpan())


class NoTracing:
    def request(self, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        return NO_SPAN

    def step(self, name: str) -> AbstractContextManager[Span]:
        return NO_SPAN

    def outgoing(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        """Nothing was opened."""


class _OtelSpan:
    recording = True

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def set(self, name: str, value: AttributeValue) -> None:
        self._span.set_attribute(name, value)


class OtlpTracing:
    """Spans exported in batches as OTLP/HTTP JSON, with W3C context in and out."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "warmroute"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OtlpJsonExporter(endpoint)))
        self._tracer = self._provider.get_tracer("warmroute")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(self, headers: Mapping[str, str]) -> Iterator[Span]:
        parent = self._propagator.extract(dict(headers))
        with self._tracer.start_as_current_span("gateway.request", context=parent, kind=trace.SpanKind.SERVER) as span:
            yield _OtelSpan(span)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Span]:
        with self._tracer.start_as_current_span(name) as span:
            yield _OtelSpan(span)

    def outgoing(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=otel_context.get_current())
        return carrier

    def close(self) -> None:
        self._provider.shutdown()
