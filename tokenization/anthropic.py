"""/v1/messages bodies -> the chat that the engine makes of them.

The engine converts Anthropic's form to OpenAI's before it renders anything, so the conversion decides over the prompt:
text blocks are joined without a separator in system messages, tool results become messages of their own, thinking
becomes reasoning (vLLM 0.32, `entrypoints/anthropic/serving.py`).
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenization.chat import chat_prompt, dump_function, effort, handed_over_tokens, object_or_none, salt
from tokenization.errors import refuse
from tokenization.prompt import PromptRequest

Body = Mapping[str, Any]
Message = dict[str, Any]

_BILLING_HEADER = "x-anthropic-billing-header"
_BLOCKS = frozenset(
    [
        "text",
        "image",
        "tool_use",
        "tool_result",
        "tool_reference",
        "thinking",
        "redacted_thinking",
        "tool_addition",
        "tool_removal",
    ]
)


def messages_request(
    body: Body, *, system_first: bool = False, disabled_thinking_effort: str = "none"
) -> PromptRequest:
    """The prompt of an Anthropic message. `system_first`: the template wants one leading system message, so those in
    between are merged into it."""
    source = body.get("messages")
    if not isinstance(source, list):
        raise refuse("messages must be an array of messages")
    for at, message in enumerate(source):
        _check_message(at, message)
    chat: list[Message] = []
    system = _system(body, source, merge=system_first)
    if system:
        chat.append({"role": "system", "content": system})
    for message in source:
        if message["role"] == "system":
            text = _system_text(message["content"], skip_header=True)
            if text and not system_first:
                chat.append({"role": "system", "content": text})
        else:
            _convert(message, chat)
    tools = _tools(body, source)
    prompt = chat_prompt(
        chat,
        tools=tools,
        kwargs=object_or_none(body, "chat_template_kwargs"),
        fields={"add_generation_prompt": True, "continue_final_message": False},
        effort=_effort(body, disabled_thinking_effort),
    )
    return PromptRequest(api="messages", prompts=(handed_over_tokens(body, chat) or prompt,), cache_salt=salt(body))


def _check_message(at: int, message: Any) -> None:
    where = f"messages[{at}]"
    if not isinstance(message, Mapping):
        raise refuse(f"{where} must be an object")
    if message.get("role") not in ("user", "assistant", "system"):
        raise refuse(f"{where}.role must be 'user', 'assistant' or 'system'")
    content = message.get("content")
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise refuse(f"{where}.content must be a string or an array of blocks")
    _check_blocks(content, f"{where}.content")


def _check_blocks(blocks: Any, where: str) -> None:
    for at, block in enumerate(blocks):
        if not isinstance(block, Mapping) or block.get("type") not in _BLOCKS:
            raise refuse(f"{where}[{at}] must be a block of a known type")
        for name, kind in (("text", str), ("thinking", str), ("name", str), ("input", Mapping), ("source", Mapping)):
            if not isinstance(block.get(name), kind | None):
                raise refuse(f"{where}[{at}].{name} has the wrong type")
        if not isinstance(block.get("content"), str | list | None):
            raise refuse(f"{where}[{at}].content must be a string or an array of blocks")


def _system(body: Body, messages: list[Any], *, merge: bool) -> str:
    system = body.get("system")
    if not isinstance(system, str | list | None):
        raise refuse("system must be a string or an array of text blocks")
    if isinstance(system, list):
        _check_blocks(system, "system")
    texts = [_system_text(system, skip_header=isinstance(system, list))] if system else []
    if merge:
        texts += [_system_text(m["content"], skip_header=True) for m in messages if m["role"] == "system"]
    return "".join(texts)


def _system_text(content: str | list[Any], *, skip_header: bool) -> str:
    """The text without the client's attribution header, which differs in every request (the engine drops it too)."""
    texts = (
        [content] if isinstance(content, str) else [b["text"] for b in content if b["type"] == "text" and b.get("text")]
    )
    return "".join(text for text in texts if not (skip_header and text.startswith(_BILLING_HEADER)))


def _convert(message: Mapping[str, Any], chat: list[Message]) -> None:
    """Append what one user or assistant message becomes."""
    role, content = message["role"], message["content"]
    result: Message = {"role": role}
    if isinstance(content, str):
        result["content"] = content
    else:
        parts: list[Message] = []
        calls: list[Message] = []
        reasoning: list[str] = []
        for block in content:
            kind = block["type"]
            if kind == "text" and block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
            elif kind == "image" and block.get("source"):
                parts.append({"type": "image_url", "image_url": {"url": _image_url(block["source"])}})
            elif kind == "thinking" and block.get("thinking") is not None:
                reasoning.append(block["thinking"])
            elif kind == "tool_use":
                calls.append(_tool_call(block))
            elif kind == "tool_result" and role == "user":
                _tool_result(block, chat)
            elif kind == "tool_result":
                shown = str(block["content"]) if block.get("content") else ""
                parts.append({"type": "text", "text": f"Tool result: {shown}"})
        if reasoning:
            result["reasoning"] = "".join(reasoning)
        if calls:
            result["tool_calls"] = calls
        if len(parts) == 1 and parts[0]["type"] == "text":
            result["content"] = parts[0]["text"]
        elif parts:
            result["content"] = parts
    # A user message of nothing but tool results has become tool messages and is gone itself.
    if role != "user" or "content" in result:
        chat.append(result)


def _tool_call(block: Mapping[str, Any]) -> Message:
    arguments = json.dumps(block.get("input") or {})
    function = {"name": block.get("name") or "", "arguments": arguments}
    # The engine invents an id from the clock where the client gives none; such a prompt cannot be predicted anyway.
    return {"id": block.get("id") or "call_0", "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], chat: list[Message]) -> None:
    content = block.get("content")
    texts: list[str] = [content] if isinstance(content, str) else []
    images: list[Message] = []
    references: list[Message] = []
    for item in content if isinstance(content, list) else ():
        if not isinstance(item, Mapping):
            continue
        if item.get("type") == "text":
            texts.append(item.get("text", ""))
        elif item.get("type") == "image" and (url := _image_url(item.get("source", {}))):
            images.append({"type": "image_url", "image_url": {"url": url}})
        elif item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name")):
            references.append({"type": "tool_reference", "name": name})
    call = block.get("tool_use_id") or ""
    chat.append({"role": "tool", "tool_call_id": call, "content": "\n".join(texts)})
    if images:
        chat.append({"role": "user", "content": images})
    if references:
        chat.append({"role": "tool", "tool_call_id": call, "content": references})


def _image_url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _effort(body: Body, disabled: str) -> str | None:
    thinking, output = body.get("thinking"), body.get("output_config")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        return disabled
    return effort(output.get("effort"), "output_config.effort") if isinstance(output, Mapping) else None


def _tools(body: Body, messages: list[Any]) -> list[dict[str, Any]] | None:
    """The tools in effect at the end of the conversation: blocks in system messages can add and remove some."""
    given = body.get("tools")
    if not isinstance(given, list | None):
        raise refuse("tools must be an array")
    tools: dict[str, dict[str, Any]] = {}
    for at, tool in enumerate(given or ()):
        dumped = _tool(tool, f"tools[{at}]")
        tools[dumped["function"]["name"]] = dumped
    changes = [
        block
        for message in messages
        if message["role"] == "system" and isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] in ("tool_addition", "tool_removal")
    ]
    if not changes:
        return None if given is None else [_tool(tool, f"tools[{at}]") for at, tool in enumerate(given)]
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, Mapping):
            raise refuse(f"a {block['type']} block needs a tool")
        if change.get("type") == "tool_definition":
            dumped = _tool(change.get("definition"), "tool.definition")
            name = dumped["function"]["name"]
            tools[name] = dumped
        else:
            name = str(change.get("name"))
            if name not in tools:
                raise refuse(f"{block['type']} references tool {name!r}, which is not declared in tools")
            if block["type"] == "tool_addition":
                tools[name]["function"].pop("defer_loading", None)
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    schema = tool.get("input_schema") if isinstance(tool, Mapping) else None
    if not isinstance(schema, Mapping):
        raise refuse(f"{where}.input_schema must be an object")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    function = {key: tool.get(key) for key in ("name", "description", "strict", "defer_loading")}
    return {"type": "function", "function": dump_function({**function, "parameters": parameters}, where)}
