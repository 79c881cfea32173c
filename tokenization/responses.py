"""/v1/responses bodies -> the chat that the engine makes of them.

Items are folded into messages: reasoning, text and tool calls of one assistant turn become one message (vLLM 0.32,
`entrypoints/openai/responses/utils.py`). A request that continues a stored response cannot be rendered here, because
only the engine that stored it knows the history.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from tokenization.chat import chat_prompt, dump_function, effort, handed_over_tokens, object_or_none, salt
from tokenization.errors import refuse, unroutable
from tokenization.prompt import PromptRequest

Body = Mapping[str, Any]
Message = dict[str, Any]

# How the engine shows a free-form ("custom") tool to the model; it is part of the prompt, so every character counts.
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def responses_request(body: Body) -> PromptRequest:
    """The prompt of a response. The engine adds special tokens here (0.32), on top of the template's own BOS."""
    if body.get("previous_response_id") is not None:
        raise unroutable("stored_history", "previous_response_id: only the engine knows that history")
    if body.get("prompt") is not None:
        raise refuse("prompt templates are not supported")
    given = body.get("input")
    if not isinstance(given, str | list):
        raise refuse("input must be a string or an array of items")
    messages: list[Message] = []
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise refuse("instructions must be a string")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        for at, item in enumerate(given):
            _fold(item, f"input[{at}]", messages)
    continued = isinstance(given, list) and bool(given) and _unfinished(given[-1])
    reasoning = object_or_none(body, "reasoning") or {}
    prompt = chat_prompt(
        messages,
        tools=_tools(body),
        kwargs=object_or_none(body, "chat_template_kwargs"),
        fields={"add_generation_prompt": not continued, "continue_final_message": continued},
        effort=effort(reasoning.get("effort"), "reasoning.effort"),
        add_special_tokens=True,
    )
    return PromptRequest(
        api="responses", prompts=(handed_over_tokens(body, messages) or prompt,), cache_salt=salt(body)
    )


def _fold(item: Any, where: str, messages: list[Message]) -> None:
    """Append what an item becomes, or add it to the assistant message before it."""
    if not isinstance(item, Mapping):
        raise refuse(f"{where} must be an object")
    kind = item.get("type")
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item, kind, where)
        if last is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            last["tool_calls"] = [*(last.get("tool_calls") or ()), call]
    elif kind == "reasoning":
        _join(messages, last, "reasoning", _reasoning(item, where))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
        _join(messages, last, "content", text)
    elif isinstance(item.get("role"), str):
        content = item.get("content")
        if not isinstance(content, str | list):
            raise refuse(f"{where}.content must be a string or an array of parts")
        messages.append(dict(item))
    else:
        raise refuse(f"{where}: unsupported item type {kind!r}")


def _join(messages: list[Message], last: Message | None, field: str, text: str) -> None:
    if last is not None and last.get(field) is None:
        last[field] = text
    else:
        messages.append({"role": "assistant", field: text})


def _call(item: Mapping[str, Any], kind: str, where: str) -> Message:
    name = item.get("name")
    arguments = item.get("arguments") if kind == "function_call" else None
    if kind == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise refuse(f"{where}: a {kind} needs a name and its arguments as strings")
    if kind == "function_call" and item.get("namespace"):
        name = f"{item['namespace']}__{name}"
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    if item.get("encrypted_content"):
        raise refuse(f"{where}: encrypted reasoning is not supported")
    for field in ("content", "summary"):
        if (text := _first_text(item.get(field))) is not None:
            return text
    return ""


def _first_text(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and isinstance(content[0], Mapping):
        text = content[0].get("text")
        return text if isinstance(text, str) else None
    return None


def _unfinished(item: Any) -> bool:
    """Whether the last item is an assistant message or reasoning that the model should go on with."""
    return (
        isinstance(item, Mapping)
        and item.get("type", "message") in ("message", "reasoning")
        and item.get("status") in ("in_progress", "incomplete")
    )


def _tools(body: Body) -> list[dict[str, Any]] | None:
    """Function tools in request order; namespaces are flattened, custom tools become functions of one string."""
    tools = body.get("tools")
    if not isinstance(tools, list | None):
        raise refuse("tools must be an array")
    if not tools:
        return None
    functions = [function for at, tool in enumerate(tools) for function in _functions(tool, f"tools[{at}]")]
    return [{"type": "function", "function": function} for function in functions]


def _functions(tool: Any, where: str) -> Iterable[dict[str, Any]]:
    if not isinstance(tool, Mapping):
        raise refuse(f"{where} must be an object")
    kind = tool.get("type")
    if kind == "function":
        yield dump_function(tool, where)
    elif kind == "custom":
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
        yield dump_function(function, where)
    elif kind == "namespace":
        for at, inner in enumerate(tool.get("tools") or ()):
            if isinstance(inner, Mapping) and inner.get("type") == "function":
                yield dump_function(
                    {**inner, "name": f"{tool.get('name')}__{inner.get('name')}"}, f"{where}.tools[{at}]"
                )
