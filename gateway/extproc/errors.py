"""The error body that OpenAI clients understand: `{"error": {"message", "type", "param", "code"}}`."""

import msgspec

# The type a client library branches on when the rejection does not name one.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    412: "precondition_failed_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class _Error(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class _Body(msgspec.Struct, frozen=True):
    error: _Error


def error_type(status: int) -> str:
    """The OpenAI error type that goes with an HTTP status: `server_error` where none is more exact."""
    return _TYPES.get(status, "invalid_request_error" if 400 <= status < 500 else "server_error")


def error_body(
    status: int, message: str, *, type: str | None = None, param: str | None = None, code: str | None = None
) -> bytes:
    """JSON bytes of an error in OpenAI's shape; the type follows from the status unless it is given. Lone surrogates in the
    message, which a client's JSON may have brought in, become question marks."""
    text = message.encode(errors="replace").decode()
    return msgspec.json.encode(_Body(_Error(text, type or error_type(status), param, code)))
