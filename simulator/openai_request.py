"""What a completion or chat body asks of the engine besides its prompt, and the errors for what it may not ask."""

from collections.abc import Mapping
from typing import Any

import msgspec

_PER_REQUEST_DEFAULT = 16  # of /v1/completions; a chat may fill the context


class ApiError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`max_tokens` None: as much as fits. `transfer`: the hand-off parameters as sent, empty if none."""

    model: str
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    return_token_ids: bool = False
    session_id: str | None = None
    transfer: dict[str, Any] = {}


def parse_options(body: Mapping[str, Any], *, chat: bool, session_header: str | None = None) -> Options:
    """Raises ApiError (400) that names the field, what it holds and what would be right."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "model: a model name is required", param="model")
    stream = _boolean(body, "stream")
    stream_options = body.get("stream_options")
    if stream_options is not None and not isinstance(stream_options, Mapping):
        raise ApiError(400, "stream_options must be an object", param="stream_options")
    if stream_options and not stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.get("n", 1) != 1:
        raise ApiError(400, "n: this engine generates one choice per prompt", param="n")
    transfer = body.get("kv_transfer_params")
    if transfer is not None and not isinstance(transfer, dict):
        raise ApiError(400, "kv_transfer_params must be an object", param="kv_transfer_params")
    session = body.get("session_id", session_header)
    return Options(
        model=model,
        stream=stream,
        include_usage=bool((stream_options or {}).get("include_usage")),
        max_tokens=_max_tokens(body, chat),
        stop=_stop(body.get("stop")),
        ignore_end=_boolean(body, "ignore_eos"),
        return_token_ids=_boolean(body, "return_token_ids"),
        session_id=session if isinstance(session, str) else None,
        transfer=transfer or {},
    )


def _max_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ApiError(400, f"{name} must be at least 1, got {value!r}", param=name)
        return value
    return None if chat else _PER_REQUEST_DEFAULT


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, "stop must be a string or an array of strings", param="stop")
    if not all(stops):
        raise ApiError(400, "stop cannot contain an empty string", param="stop")
    return tuple(stops)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name} must be true or false, got {value!r}", param=name)
    return bool(value)
