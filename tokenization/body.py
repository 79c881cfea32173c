"""Request bodies -> prompts: which API is it, what does it ask the engine to compute on, and would the engine take it.

As strict as the engine about what decides over the prompt (types, contradictions, empty arrays), indifferent to all the
rest: sampling parameters are the engine's to judge.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tokenization.anthropic import messages_request
from tokenization.chat import boolean, chat_request, require_messages, salt
from tokenization.errors import refuse, unroutable
from tokenization.prompt import Chat, Prompt, PromptRequest, Text, Tokens
from tokenization.responses import responses_request

Body = Mapping[str, Any]

MAX_TOKEN_ID = 2**31 - 1


def decode_body(raw: bytes | memoryview) -> dict[str, Any]:
    """The JSON object in `raw`. Raises `TokenizationError` (400) where the engine could not read it either."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        # The engine uses Python's json, which takes NaN and lone surrogates, so only what that refuses is an error.
        try:
            body = json.loads(bytes(raw))
        except RecursionError as error:
            raise refuse("the request body is nested too deeply", "malformed_json") from error
        except ValueError as error:
            raise refuse(f"the request body is not valid JSON: {error}", "malformed_json") from error
    if not isinstance(body, dict):
        raise refuse("the request body must be a JSON object", "malformed_json")
    return body


def parse_body(
    path: str, body: Body, *, system_first: bool = False, disabled_thinking_effort: str = "none"
) -> PromptRequest:
    """The prompts of a request to `path` (a query string and a trailing `/render` are ignored).

    `system_first` and `disabled_thinking_effort` are traits of the model's chat template that decide over how the engine
    converts Anthropic messages (`ChatTemplate` has both).

    Raises `TokenizationError`: 400 for what the engine refuses; no status for what cannot be tokenized here.
    """
    if not isinstance(body, Mapping):
        raise refuse("the request body must be a JSON object", "malformed_json")
    route = path.partition("?")[0].rstrip("/").removesuffix("/render")
    try:
        if route == "/v1/messages":
            return messages_request(body, system_first=system_first, disabled_thinking_effort=disabled_thinking_effort)
        parser = _PARSERS.get(route)
        if parser is None:
            raise unroutable("no_prompt", f"requests to {route or '/'} have no prompt")
        return parser(body)
    except RecursionError as error:
        raise refuse("the request body is nested too deeply", "malformed_json") from error


def completions_request(body: Body) -> PromptRequest:
    """/v1/completions: a text, a list of texts, token ids or a list of lists of token ids."""
    if body.get("prompt_embeds") is not None:
        raise unroutable("prompt_embeds", "prompt_embeds replace the prompt's tokens")
    if body.get("prompt") in (None, ""):
        raise refuse("either prompt or prompt_embeds must be given and not be empty")
    if body.get("suffix") is not None:
        raise unroutable("suffix", "fill-in-the-middle prompts are rendered by the engine")
    prompts = _texts_or_tokens(body["prompt"], "prompt", boolean(body, "add_special_tokens", True))
    return PromptRequest(api="completions", prompts=prompts, **_limits(body))


def generate_request(body: Body) -> PromptRequest:
    """/inference/v1/generate: token ids in, token ids out."""
    if body.get("features") or body.get("content_parts"):
        raise unroutable("multimodal", "the request brings multimodal features")
    prompts = (Tokens(_token_ids(body.get("token_ids"), "token_ids")),)
    return PromptRequest(api="generate", prompts=prompts, cache_salt=salt(body))


def tokenize_request(body: Body) -> PromptRequest:
    """/tokenize: a prompt or messages, as the engine's own endpoint takes them."""
    if "messages" in body:
        return chat_request(body)
    if not isinstance(body.get("prompt"), str):
        raise refuse("prompt must be a string")
    text = Text(text=body["prompt"], add_special_tokens=boolean(body, "add_special_tokens", True))
    return PromptRequest(api="completions", prompts=(text,))


def pooling_request(body: Body) -> PromptRequest:
    """/v1/embeddings, /pooling, /classify: texts, token ids or messages (then without generation prompt)."""
    for name in ("messages", "input"):
        chats = body.get(name)
        if not (isinstance(chats, list) and chats):
            continue
        if all(_is_message(item) for item in chats):
            return PromptRequest(api="pooling", prompts=(_pooling_chat(body, chats, name),), **_limits(body))
        if all(isinstance(chat, list) and chat and all(_is_message(item) for item in chat) for chat in chats):
            prompts = tuple(_pooling_chat(body, chat, name) for chat in chats)
            return PromptRequest(api="pooling", prompts=prompts, **_limits(body))
    if "input" not in body:
        raise unroutable("no_prompt", "the request has neither input nor messages")
    prompts_ = _texts_or_tokens(body["input"], "input", boolean(body, "add_special_tokens", True))
    return PromptRequest(api="pooling", prompts=prompts_, **_limits(body))


def scoring_request(body: Body) -> PromptRequest:
    """/score, /rerank: the first text of each pair, which leads the prompt; what follows depends on the model."""
    for name in ("query", "queries", "text_1", "data_1"):
        value = body.get(name)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str) and first:
            prompts = (Text(text=first),)
            return PromptRequest(api="pooling", prompts=prompts, prefix_only=True, cache_salt=salt(body))
        if first is not None:
            raise unroutable("multimodal", f"{name} is not a text")
    raise unroutable("no_prompt", "the request has no query")


_PARSERS: dict[str, Callable[[Body], PromptRequest]] = {
    "/v1/completions": completions_request,
    "/v1/chat/completions": chat_request,
    "/v1/responses": responses_request,
    "/inference/v1/generate": generate_request,
    "/tokenize": tokenize_request,
    "/v1/embeddings": pooling_request,
    "/pooling": pooling_request,
    "/classify": pooling_request,
    "/score": scoring_request,
    "/v1/score": scoring_request,
    "/rerank": scoring_request,
    "/v1/rerank": scoring_request,
    "/v2/rerank": scoring_request,
}

PROMPT_PATHS = frozenset(_PARSERS) | {"/v1/messages"}
"""Every path whose requests have a prompt."""


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _pooling_chat(body: Body, messages: Any, where: str) -> Chat:
    continued = boolean(body, "continue_final_message", False)
    generation = boolean(body, "add_generation_prompt", False)
    if continued and generation:
        raise refuse("continue_final_message and add_generation_prompt cannot both be true")
    kwargs = body.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise refuse("chat_template_kwargs must be an object")
    return Chat(
        messages=require_messages(messages, where),
        template_kwargs={**kwargs, "add_generation_prompt": generation, "continue_final_message": continued},
        chat_template=body.get("chat_template"),
        add_special_tokens=boolean(body, "add_special_tokens", False),
    )


def _texts_or_tokens(value: Any, name: str, add_special_tokens: bool) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (Text(text=value, add_special_tokens=add_special_tokens),)
    if not isinstance(value, list):
        raise refuse(f"{name} must be a string, an array of strings, or token ids")
    if not value:
        raise refuse(f"{name} must not be empty")
    if isinstance(value[0], str):
        if not all(isinstance(text, str) for text in value):
            raise refuse(f"{name}: either all elements are strings or none is")
        return tuple(Text(text=text, add_special_tokens=add_special_tokens) for text in value)
    if isinstance(value[0], list):
        return tuple(Tokens(_token_ids(ids, f"{name}[{at}]")) for at, ids in enumerate(value))
    return (Tokens(_token_ids(value, name)),)


def _token_ids(value: Any, name: str) -> Sequence[int]:
    if not isinstance(value, list) or not value:
        raise refuse(f"{name} must be a non-empty array of token ids")
    # No Python loop over ids: prompts of 100,000 of them are ordinary.
    if set(map(type, value)) <= {int, bool, float} and set(map(type, value)) != {int}:
        value = [int(number) if number == number // 1 else -1 for number in value]
    ids: list[int] = value
    if set(map(type, value)) != {int} or min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise refuse(f"{name} must hold non-negative integers only")
    return ids


def _limits(body: Body) -> dict[str, Any]:
    truncate = body.get("truncate_prompt_tokens")
    if truncate is not None and (type(truncate) is not int or truncate < -1):
        raise refuse("truncate_prompt_tokens must be an integer of at least -1")
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise refuse("truncation_side must be 'left' or 'right'")
    return {"truncate_tokens": truncate, "truncation_side": side, "cache_salt": salt(body)}
