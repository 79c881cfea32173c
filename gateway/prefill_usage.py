"""What a prefill engine says it found cached, from its answer to a prefill leg."""

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


def reused_share(answer: bytes) -> float | None:
    """Cached tokens / prompt tokens; None where the engine does not say."""
    try:
        usage = _answer.decode(answer).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    if usage is None or usage.prompt_tokens <= 0 or usage.prompt_tokens_details is None:
        return None
    cached = usage.prompt_tokens_details.cached_tokens
    return None if cached is None else cached / usage.prompt_tokens
