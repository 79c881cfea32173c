"""ext-proc messages to values and back: what the contract puts where in the protobuf."""

from collections.abc import Iterator
from typing import Any

from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3 import http_status_pb2

from gateway.extproc import headers as wire
from gateway.extproc.decision import Rejected
from gateway.extproc.errors import error_body

LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE, SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SERVED_KEY = "x-gateway-destination-endpoint-served"
SCORES_KEY = "x-gateway-destination-endpoint-scores"
ATTRIBUTES_NAMESPACE, SERVED_ATTRIBUTE = "envoy.filters.http.ext_proc", "upstream.address"

_STATUSES = frozenset(http_status_pb2.StatusCode.values())

DUPLEX_CHUNK_BYTES = 62_000  # the contract's limit for one echoed piece


def immediate(rejected: Rejected, request_id: str = "") -> Any:
    """A ProcessingResponse that answers the client in Envoy's place, with a body in OpenAI's error shape."""
    # Envoy refuses a status outside its enumeration and would answer 500 without our body.
    status = rejected.status if rejected.status in _STATUSES and rejected.status else 500
    message = pb.ProcessingResponse()
    response = message.immediate_response
    response.status.code = status
    response.body = error_body(status, rejected.message, type=rejected.type, param=rejected.param, code=rejected.code)
    response.details = f"warmroute_{rejected.reason or rejected.code or status}".replace(" ", "_")
    named = {"content-type": "application/json", **rejected.headers}
    if request_id:
        named[wire.REQUEST_ID] = request_id
    if rejected.reason:
        named[wire.DROPPED_REASON] = rejected.reason
    wire.write(response.headers, named)
    return message


def answer(**fields: Any) -> Any:
    """A ProcessingResponse with one field set; `{}` means "continue, unchanged"."""
    return pb.ProcessingResponse(**fields)


def echo(kind: str, data: bytes, end_of_stream: bool) -> Iterator[Any]:
    """The pieces that put `data` back into a FULL_DUPLEX_STREAMED body; at least one, which may be empty."""
    for start in range(0, max(len(data), 1), DUPLEX_CHUNK_BYTES):
        message = pb.ProcessingResponse()
        piece = getattr(message, kind).response.body_mutation.streamed_response
        piece.body = data[start : start + DUPLEX_CHUNK_BYTES]
        piece.end_of_stream = end_of_stream and start + DUPLEX_CHUNK_BYTES >= len(data)
        yield message


def subset(message: Any) -> tuple[str, ...] | None:
    """The endpoints the gateway allows: None without a hint, () for a hint that names none.

    Gateways send a list or a comma-separated string. Any other type names no endpoint: a restriction that cannot be
    read must not become "everything is allowed".
    """
    namespaces = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in namespaces or SUBSET_KEY not in namespaces[SUBSET_NAMESPACE].fields:
        return None
    hint = namespaces[SUBSET_NAMESPACE].fields[SUBSET_KEY]
    if hint.WhichOneof("kind") == "list_value":
        named = [value.string_value for value in hint.list_value.values]
    else:
        named = hint.string_value.split(",")
    return tuple(stripped for name in named if (stripped := name.strip()))


def served(message: Any) -> str | None:
    """The endpoint that answered: what the gateway says in metadata, else Envoy's own attribute."""
    namespaces = message.metadata_context.filter_metadata
    if LB_NAMESPACE in namespaces and (by := namespaces[LB_NAMESPACE].fields[SERVED_KEY].string_value):
        return str(by)
    attributes = message.attributes
    if ATTRIBUTES_NAMESPACE in attributes:
        return str(attributes[ATTRIBUTES_NAMESPACE].fields[SERVED_ATTRIBUTE].string_value) or None
    return None
