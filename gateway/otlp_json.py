"""Spans as OTLP/HTTP JSON, for collectors that listen on port 4318.

Our own because the usual exporters cannot be installed beside xds-protos 1.85: both ship `opentelemetry/proto`, in
different versions, and the importer gets whichever was installed last. The JSON form needs no generated code.
Source: OpenTelemetry protocol specification 1.9, "JSON Protobuf Encoding".
"""

import logging
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class OtlpJsonExporter(SpanExporter):
    """Posts batches to `ENDPOINT/v1/traces`. Runs in the batch processor's thread; what fails is logged and dropped."""

    def __init__(self, endpoint: str) -> None:
        self._url = endpoint.rstrip("/") + "/v1/traces"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        request = urllib.request.Request(
            self._url, data=encode(spans), headers={"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return SpanExportResult.SUCCESS
        except (OSError, urllib.error.URLError) as error:
            log.warning("spans_dropped spans=%d url=%s error=%r", len(spans), self._url, error)
            return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Nothing is kept open between batches."""


def encode(spans: Sequence[ReadableSpan]) -> bytes:
    """One ExportTraceServiceRequest in JSON. All spans are of one resource and scope: ours."""
    resource = spans[0].resource.attributes if spans else {}
    return msgspec.json.encode(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": _attributes(resource)},
                    "scopeSpans": [{"scope": {"name": "warmroute"}, "spans": [_span(span) for span in spans]}],
                }
            ]
        }
    )


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None  # only recording spans are exported
    encoded: dict[str, Any] = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # OTLP counts from UNSPECIFIED = 0
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes or {}),
        "status": {"code": span.status.status_code.value},
    }
    if span.parent is not None:
        encoded["parentSpanId"] = f"{span.parent.span_id:016x}"
    return encoded


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}
