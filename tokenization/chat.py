"""/v1/chat/completions bodies, and the pieces of them that the other chat-like APIs end up as."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenization.conversation import has_media
from tokenization.errors import refuse
from tokenization.prompt import Chat, Prompt, PromptRequest, Tokens

Body = Mapping[str, Any]

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_FORBIDDEN_IN_SALT = frozenset("@/\\\0")
_MAX_SALT = 128
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def chat_request(body: Body) -> PromptRequest:
    """The prompt of a chat completion. Raises `TokenizationError` (400) for what the engine refuses."""
    messages = require_messages(body.get("messages"), "messages")
    tools = body.get("tools")
    if tools is not None:
        if not isinstance(tools, list) or not tools:
            raise refuse("tools must be a non-empty array; leave it out to send none")
        tools = [dump_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    _check_tool_choice(body.get("tool_choice"), tools, given="tool_choice" in body)
    continued = boolean(body, "continue_final_message", False)
    generation = boolean(body, "add_generation_prompt", True)
    if continued and generation:
        raise refuse("continue_final_message needs add_generation_prompt false (its default is true)")
    prompt = chat_prompt(
        messages,
        tools=tools,
        kwargs=object_or_none(body, "chat_template_kwargs"),
        fields={
            "add_generation_prompt": generation,
            "continue_final_message": continued,
            "documents": _documents(body),
        },
        effort=effort(body.get("reasoning_effort"), "reasoning_effort"),
        chat_template=_template(body),
        add_special_tokens=boolean(body, "add_special_tokens", False),
    )
    return PromptRequest(
        api="chat",
        prompts=(handed_over_tokens(body, messages) or prompt,),
        cache_salt=salt(body),
        truncate_tokens=_truncation(body),
        truncation_side=body.get("truncation_side"),
    )


def chat_prompt(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
    fields: Mapping[str, Any],
    effort: str | None,
    chat_template: str | None = None,
    add_special_tokens: bool = False,
) -> Chat:
    """A `Chat` whose template kwargs are merged in the engine's order: the request's `chat_template_kwargs`, then the
    request's own fields where they are set. Asking for reasoning effort switches thinking on or off."""
    merged = dict(kwargs or {})
    own = dict(fields)
    own["reasoning_effort"] = effort
    if effort is not None and "enable_thinking" not in merged:
        own["enable_thinking"] = effort != "none"
    merged |= {name: value for name, value in own.items() if value is not None}
    return Chat(
        messages=messages,
        tools=tools,
        template_kwargs=merged,
        chat_template=chat_template,
        add_special_tokens=add_special_tokens,
    )


def handed_over_tokens(body: Body, messages: Sequence[Mapping[str, Any]]) -> Prompt | None:
    """The token ids that another stage or router already computed, where the engine would use them."""
    transfer = body.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, Mapping) else None
    if ids is None or body.get("echo") or has_media(messages):
        return None
    if not isinstance(ids, list) or not ids or set(map(type, ids)) != {int} or min(ids) < 0:
        raise refuse("kv_transfer_params.prompt_token_ids must be a non-empty array of non-negative integers")
    return Tokens(ids)


def require_messages(value: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """`value` as a list of messages: objects with a role, whose content is text, an array of parts, or absent."""
    if not isinstance(value, list):
        raise refuse(f"{name} must be an array of messages")
    for at, message in enumerate(value):
        where = f"{name}[{at}]"
        if not isinstance(message, Mapping):
            raise refuse(f"{where} must be an object")
        role = message.get("role")
        if not isinstance(role, str):
            raise refuse(f"{where}.role must be a string")
        content = message.get("content")
        if content is None:
            # The assistant's content may be null beside tool calls; a null anywhere else is no valid message.
            if "content" in message and role not in ("assistant", "function"):
                raise refuse(f"{where}.content must be a string or an array of parts")
        elif not isinstance(content, str | list):
            raise refuse(f"{where}.content must be a string or an array of parts")
        calls = message.get("tool_calls")
        if calls and not isinstance(calls, list):
            raise refuse(f"{where}.tool_calls must be an array")
    return value


def dump_tool(tool: Any, where: str) -> dict[str, Any]:
    """A tool as the engine hands it to the template: declared fields in declared order, defaults filled in."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise refuse(f"{where} must be an object of type 'function' with a 'function' object")
    deferred = tool.get("defer_loading")
    dumped: dict[str, Any] = {
        "type": "function",
        "function": dump_function(function, f"{where}.function", deferred=deferred),
    }
    if deferred is not None:
        dumped["defer_loading"] = deferred
    return dumped


def dump_function(function: Mapping[str, Any], where: str, *, deferred: Any = None) -> dict[str, Any]:
    """A function's definition in the engine's field order."""
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str):
        raise refuse(f"{where}.name must be a string")
    if not isinstance(description, str | None):
        raise refuse(f"{where}.description must be a string")
    if not isinstance(parameters, Mapping | None):
        raise refuse(f"{where}.parameters must be an object")
    dumped: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    if function.get("strict") is not None:
        dumped["strict"] = function["strict"]
    if (own := function.get("defer_loading", deferred)) is not None:
        dumped["defer_loading"] = own
    return dumped


def effort(value: Any, where: str) -> str | None:
    """A reasoning effort the engine knows, or None."""
    if value is None or value in _EFFORTS:
        return value if value is None else str(value)
    raise refuse(f"{where} must be one of {', '.join(_EFFORTS)}")


def salt(body: Body) -> str | None:
    """The cache salt. The engine refuses salts with separators of its cache back ends in them."""
    value = body.get("cache_salt")
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise refuse("cache_salt must be a non-empty string")
    if len(value) > _MAX_SALT or not _FORBIDDEN_IN_SALT.isdisjoint(value):
        raise refuse("cache_salt must be at most 128 characters without '@', '/', '\\' and NUL")
    return value


def boolean(body: Body, name: str, default: bool) -> bool:
    """A boolean field of the body, in any of the forms that the engine's parser takes for one."""
    value = body.get(name, default)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise refuse(f"{name} must be true or false")


def object_or_none(body: Body, name: str) -> Mapping[str, Any] | None:
    """An object field of the body."""
    value = body.get(name)
    if value is None or isinstance(value, Mapping):
        return value
    raise refuse(f"{name} must be an object")


def _template(body: Body) -> str | None:
    value = body.get("chat_template")
    if isinstance(value, str | None):
        return value
    raise refuse("chat_template must be a string")


def _documents(body: Body) -> Any:
    documents = body.get("documents")
    if documents is None:
        return None
    if not isinstance(documents, list) or not all(isinstance(document, Mapping) for document in documents):
        raise refuse("documents must be an array of objects")
    return documents


def _truncation(body: Body) -> int | None:
    value = body.get("truncate_prompt_tokens")
    if value is None or (type(value) is int and value >= -1):
        return value
    raise refuse("truncate_prompt_tokens must be an integer of at least -1")


def _check_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]] | None, *, given: bool) -> None:
    if not given or choice is None or choice == "none":
        return
    if tools is None:
        raise refuse("tool_choice needs tools")
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not any(tool["function"]["name"] == name for tool in tools):
            raise refuse("tool_choice names none of the tools")
    elif choice not in ("auto", "required"):
        raise refuse("tool_choice must be 'none', 'auto', 'required' or name a function")
