"""What a hand-off is: the two requests that one request becomes, as pure functions over body bytes.

    client's body --prefill_body--> prefill engine --answer--> transfer_params --decode_body--> decode engine

Rules
1. Fields that a leg does not need to change keep their bytes: values are never parsed and written again, so numbers keep
   their digits and unknown fields pass. (But for a body that only Python's decoder reads and that has what rule 5 forbids.)
2. The prefill leg computes the prompt and one token, without streaming. The decode leg is the client's own request plus what
   the prefill engine answered, unchanged.
3. With SGLang both legs start at once and find each other by a room number; its bodies differ only in those three fields.
4. A prefill answer without transfer parameters is not an error: the decode engine then computes the prompt itself.
5. Of transfer parameters that a client sent only the token ids of its prompt survive: everything else in them names another
   engine's memory.

Field names: vLLM's NIXL connector (0.32) and llm-d's routing sidecar, which does the same on the decode pod.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

TRANSFER = "kv_transfer_params"
TOKEN_IDS = "prompt_token_ids"
"""Inside the transfer parameters: the prompt's ids, which vLLM takes instead of tokenizing. No part of a transfer."""
BOOTSTRAP_PORT = 8998
"""SGLang's default."""

REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What tells vLLM to keep the prompt's blocks for somebody else."""

_ESCAPED = b"\\u00"
"""How an ASCII letter of a field's name may be hidden from a search through the bytes."""
_WIDE = b"\0"
"""In every text of UTF-16 and UTF-32, in no JSON of UTF-8."""
_ONE = msgspec.Raw(b"1")
_NO = msgspec.Raw(b"false")
_Fields = dict[str, msgspec.Raw]
_fields_of = msgspec.json.Decoder(_Fields)


class NotAnObject(ValueError):
    """The body is not a JSON object, so nothing can be handed off."""


def prefill_body(path: str, body: bytes) -> bytes:
    """The request for a vLLM prefill engine: one token, no stream, blocks kept. Raises NotAnObject."""
    fields = _read(body)
    fields.pop("stream_options", None)
    fields["stream"] = _NO
    _limit_to_one_token(path, fields)
    fields[TRANSFER] = _with_ids_of(fields, _raw(REMOTE_DECODE))
    return msgspec.json.encode(fields)


def transfer_params(answer: bytes) -> msgspec.Raw | None:
    """The transfer parameters in a prefill engine's answer, as they stand there; None where there are none to use.

    vLLM gives none where the prefill did not finish by length or stop. Whatever does not say that blocks are there to be
    fetched (`do_remote_prefill`) is not passed on to a decode engine.
    """
    try:
        params = _fields_of.decode(answer).get(TRANSFER)
        usable = params is not None and bytes(_fields_of.decode(params).get("do_remote_prefill", b"")) == b"true"
    except (msgspec.DecodeError, RecursionError):
        return None
    return msgspec.Raw(bytes(params)) if usable and params is not None else None


def decode_body(body: bytes, params: msgspec.Raw | Mapping[str, Any] | None) -> bytes:
    """The client's request with the transfer parameters; its own bytes where there are none. Raises NotAnObject."""
    if params is None:
        return without_transfer(body)
    fields = _read(body)
    fields[TRANSFER] = _with_ids_of(fields, params if isinstance(params, msgspec.Raw) else _raw(params))
    return msgspec.json.encode(fields)


def without_transfer(body: bytes) -> bytes:
    """The body without transfer parameters of the client's; the same bytes where there are none. Raises NotAnObject."""
    if TRANSFER.encode() not in body and _ESCAPED not in body and _WIDE not in body:
        return body
    try:
        fields = _read(body)
    except NotAnObject:
        return _without_by_python(body)
    if TRANSFER not in fields:
        return body
    ids = _ids_of(fields)
    if ids is None:
        del fields[TRANSFER]
    else:
        fields[TRANSFER] = _raw({TOKEN_IDS: ids})
    return msgspec.json.encode(fields)


def _without_by_python(body: bytes) -> bytes:
    """The same for what engines read and `_read` does not: NaN, lone surrogates, UTF-16. Raises NotAnObject."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NotAnObject(f"expected a JSON object: {error}") from error
    if not isinstance(fields, dict) or TRANSFER not in fields:
        return body
    given = fields.pop(TRANSFER)
    if isinstance(given, dict) and given.get(TOKEN_IDS) is not None:
        fields[TRANSFER] = {TOKEN_IDS: given[TOKEN_IDS]}
    return json.dumps(fields).encode()


def with_transfer(body: bytes, params: Mapping[str, Any]) -> bytes:
    """The body with exactly these transfer parameters, its other fields byte by byte. Raises NotAnObject."""
    fields = _read(body)
    fields[TRANSFER] = _raw(params)
    return msgspec.json.encode(fields)


def bootstrap_body(body: bytes, prefill_host: str, room: int, port: int = BOOTSTRAP_PORT) -> bytes:
    """The body of both legs for SGLang. `room` is any number that no other request uses now, below 2**63."""
    fields = _read(body)
    fields["bootstrap_host"] = _raw(prefill_host)
    fields["bootstrap_port"] = _raw(port)
    fields["bootstrap_room"] = _raw(room)
    return msgspec.json.encode(fields)


def _ids_of(fields: _Fields) -> msgspec.Raw | None:
    """The token ids among the transfer parameters that a body already has."""
    try:
        return _fields_of.decode(fields.get(TRANSFER, b"{}")).get(TOKEN_IDS)
    except (msgspec.DecodeError, RecursionError):
        return None  # not an object: the engine's to refuse, nothing in it to keep


def _with_ids_of(fields: _Fields, params: msgspec.Raw) -> msgspec.Raw:
    ids = _ids_of(fields)
    return params if ids is None else _raw({**_fields_of.decode(params), TOKEN_IDS: ids})


def _limit_to_one_token(path: str, fields: _Fields) -> None:
    path = path.partition("?")[0]
    if path.endswith("/responses"):
        fields["max_output_tokens"] = _ONE
    elif path.endswith("inference/v1/generate"):
        sampling = _read(bytes(fields.get("sampling_params", b"{}")))
        sampling["max_tokens"] = sampling["min_tokens"] = _ONE
        fields["sampling_params"] = _raw(sampling)
    elif path.endswith("/v1/messages"):
        fields["max_tokens"] = _ONE
    else:
        fields["max_tokens"] = fields["min_tokens"] = _ONE
        if path.endswith("/chat/completions"):
            fields["max_completion_tokens"] = _ONE
        if "n" in fields:  # one prompt is computed once, however many replies it gets
            fields["n"] = _ONE


def _read(body: bytes) -> _Fields:
    try:
        return _fields_of.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NotAnObject(f"expected a JSON object: {error}") from error


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
