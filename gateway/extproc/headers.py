"""Header names of the endpoint-picker contract, and headers between protobuf and plain mappings."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from envoy.config.core.v3 import base_pb2

DESTINATION = "x-gateway-destination-endpoint"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
REQUEST_ID = "x-request-id"

# Written by routers for model servers and sidecars. A client that could send one of these would choose its own
# destination, so they are neither shown to the decider nor forwarded.
INJECTED = (
    DESTINATION,
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-data-parallel-host-port",
    "x-kv-cache-source-host-port",
)
# Sent by clients to steer the router. Read by the decider, of no meaning to model servers, so not forwarded.
CONTROL = (
    "x-llm-d-inference-objective",
    "x-gateway-inference-objective",
    "x-llm-d-inference-fairness-id",
    "x-gateway-inference-fairness-id",
    "x-llm-d-model-name-rewrite",
    "x-gateway-model-name-rewrite",
    "x-llm-d-slo-ttft-ms",
    "x-slo-ttft-ms",
    "x-llm-d-slo-tpot-ms",
    "x-slo-tpot-ms",
)
STRIPPED = INJECTED + CONTROL

_OVERWRITE = base_pb2.HeaderValueOption.HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD


def read(header_map: Any) -> dict[str, str]:
    """A HeaderMap as a mapping, pseudo headers included; repeated headers are joined with ", ".

    Bytes that are not UTF-8 become U+FFFD: the header itself is forwarded by Envoy untouched, this is only our copy.
    """
    headers: dict[str, str] = {}
    for header in header_map.headers:
        name = header.key.lower()
        value = header.raw_value.decode("utf-8", "replace") if header.raw_value else header.value
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def write(mutation: Any, headers: Mapping[str, str]) -> None:
    """Add overwriting settings to a HeaderMutation. Envoy refuses `value`; it wants the bytes in `raw_value`."""
    for name, value in headers.items():
        # Said explicitly: the protobuf default appends, and an appended destination keeps the client's in front.
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name.lower()
        option.header.raw_value = value.encode("utf-8")


def remove(mutation: Any, names: Iterable[str], *, keep: Collection[str] = ()) -> None:
    """Add removals to a HeaderMutation, except of the names in `keep` (those that the same mutation sets)."""
    mutation.remove_headers.extend(name for name in names if name not in keep)
