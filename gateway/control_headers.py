"""What clients may tell the router in headers: objective, fairness id, another model, "only if cached".

Read here, understood nowhere else; `gateway.extproc.headers.CONTROL` keeps them from the engines. Each has llm-d's current
name and the older one of the Gateway API extension.
"""

from collections.abc import Mapping

import msgspec

OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
DEFAULT_FLOW = "default-flow"

Headers = Mapping[str, str]

_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _either(headers: Headers, names: tuple[str, str]) -> str:
    return headers.get(names[0], "").strip() or headers.get(names[1], "").strip()


def objective(headers: Headers) -> str:
    """The name of the request's objective; "" where it names none."""
    return _either(headers, OBJECTIVE)


def fairness_id(headers: Headers, agent: str | None = None) -> str:
    """Whose request it is, as far as sharing fairly is concerned. `agent`: its agent-identity, if it has one."""
    return _either(headers, FAIRNESS) or agent or DEFAULT_FLOW


def wants_prefix(headers: Headers) -> bool:
    """`Prefer: if-available`: rather a 412 than an endpoint that holds nothing of the prompt."""
    return any(part.strip().lower() == "if-available" for part in headers.get("prefer", "").split(","))


def rewritten_model(headers: Headers) -> str:
    """The model that the request is to go to, whatever its body says; "" where the body decides."""
    return _either(headers, REWRITE)


def with_model(body: bytes, model: str) -> bytes | None:
    """The JSON object in `body` with another `model`; every other value keeps its bytes. None where it is no object."""
    try:
        values = _top_level.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None  # whoever parses the body next says what is wrong with it
    values["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(values)
