"""From the client's messages to the conversation that the chat template sees.

The rules are vLLM's (0.32, `renderers/chat_utils.py` and `renderers/hf.py`), because every one of them changes the
prompt: content arrays are flattened with a newline for templates that want strings, reasoning is offered under two
names, tool-call arguments become objects, a developer message becomes a system message where the template knows no
developers. Messages are never changed in place: the body belongs to the caller.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenization.content_format import ContentFormat
from tokenization.errors import refuse

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Part types that are text, and the key that holds it."""

MEDIA_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "image_embeds": "image",
    "image_pil": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
    "prompt_embeds": "prompt_embeds",
}
"""Part types that are not text -> modality. In a part without a type the key of the same name means the type."""

_OWN_FIELDS = {"type", "text", "refusal", "thinking", "closed", "uuid", "detail", "file_id", "data", *MEDIA_PARTS}
_BILLING_HEADER = "x-anthropic-billing-header"


class Media(msgspec.Struct, frozen=True, kw_only=True):
    """One image, audio clip or video of a request."""

    modality: str
    uuid: str | None = None
    """The client's own name for it."""
    url: str | None = None
    """Where an image is; None for everything else, and for an image that is given by its `uuid` alone."""
    message: int
    """Index of the message that holds it."""
    part: int
    """Position among the parts of that message, as the template sees them."""


class Conversation(msgspec.Struct, frozen=True):
    """What goes into the template."""

    messages: list[dict[str, Any]]
    media: tuple[Media, ...]


def conversation(
    messages: Sequence[Mapping[str, Any]],
    content_format: ContentFormat,
    *,
    knows_developer: bool = True,
    image_text: str | None = None,
) -> Conversation:
    """The conversation for a template of this content format. Raises `TokenizationError` (400) for bad parts.

    `image_text`: what the engine puts into a plain string for an image; None where that is not known.
    """
    media: list[Media] = []
    chat = [_message(index, message, content_format, media, image_text) for index, message in enumerate(messages)]
    if not knows_developer and any(message["role"] == "developer" for message in chat):
        chat = _one_system_message([_developer_as_system(message) for message in chat])
    return Conversation(chat, tuple(media))


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any message has a part that is not text."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and (
                not MEDIA_PARTS.keys().isdisjoint(part)
                or part.get("type", "text") not in (*TEXT_PARTS, "tool_reference")
            ):
                return True
    return False


def _message(
    index: int, message: Mapping[str, Any], style: ContentFormat, media: list[Media], image_text: str | None
) -> dict[str, Any]:
    role = message["role"]
    content = message.get("content")
    parts: Sequence[Any] = [] if content is None else [content] if isinstance(content, str) else content
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing_header(part)) is not None]
    rendered: list[Any] = []
    before = len(media)
    for part in parts:
        if value := _part(index, len(rendered), part, style, media):
            rendered.append(value)
    result: dict[str, Any] = {"role": role, "content": rendered}
    if style == "string":
        images = sum(one.modality == "image" for one in media[before:])
        result["content"] = _flattened(index, rendered, images, image_text)
    if role == "assistant":
        if message.get("tool_calls"):
            result["tool_calls"] = [_tool_call(index, call) for call in message["tool_calls"]]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str):
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if isinstance(rendered, list) and style == "openai" and all(part["type"] == "text" for part in rendered):
            result["content"] = "\n".join(part["text"] for part in rendered)
    elif role == "developer":
        result["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    return result


def _flattened(index: int, texts: Sequence[str], images: int, image_text: str | None) -> str:
    """A message's content as one string. The engine puts its images in front, but for those that the text has a place for."""
    text = "\n".join(texts)
    if not images or image_text is None:
        return text
    missing = images - text.count(image_text)
    if missing < 0:
        raise refuse(f"messages[{index}].content: more {image_text!r} in the text than images")
    return "\n".join([image_text] * missing + ([text] if text else []))


def _part(index: int, position: int, part: Any, style: ContentFormat, media: list[Media]) -> Any:
    """A part as the template sees it: text, or a dict. None where nothing is left of it."""
    if isinstance(part, str):
        return {"type": "text", "text": part} if style == "openai" else part
    if not isinstance(part, Mapping):
        raise refuse(f"messages[{index}].content: a part must be an object or a string, not {_kind(part)}")
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        kind = next((name for name in MEDIA_PARTS if name in part), kind)
    if kind is None:
        raise refuse(f"messages[{index}].content: a part has no 'type'")
    if not isinstance(kind, str) or (kind not in TEXT_PARTS and kind not in MEDIA_PARTS and kind != "tool_reference"):
        raise refuse(f"messages[{index}].content: unsupported part type {kind!r}")
    if kind == "tool_reference":
        name = part.get("name")
        return {"type": kind, "name": name} if style == "openai" else name
    extra = {key: value for key, value in part.items() if key not in _OWN_FIELDS}
    if kind in TEXT_PARTS:
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise refuse(f"messages[{index}].content: the text of a {kind!r} part must be a string, not {_kind(text)}")
        return {"type": "text", "text": text, **extra} if style == "openai" else text
    modality = MEDIA_PARTS[kind]
    media.append(_media(index, position, part, kind, modality))
    # Where a placeholder goes and how many tokens it becomes is the model's affair; a template that wants parts gets
    # its marker, in a flattened message the media have no text of their own.
    return {"type": modality, **extra} if style == "openai" else None


def _media(index: int, position: int, part: Mapping[str, Any], kind: str, modality: str) -> Media:
    uuid, value = part.get("uuid"), None
    if kind in ("image_url", "input_image"):
        value = part.get("image_url")
        value = value.get("url") if isinstance(value, Mapping) else value
    return Media(
        modality=modality,
        uuid=None if uuid is None else str(uuid),
        url=value if isinstance(value, str) and value else None,
        message=index,
        part=position,
    )


def _tool_call(index: int, call: Any) -> dict[str, Any]:
    """A tool call whose arguments are an object: templates expect one, clients send its JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type") != "function":
        raise refuse(
            f"messages[{index}].tool_calls: only calls of type 'function' with a 'function' object are allowed"
        )
    if not isinstance(call.get("id"), str) or not isinstance(function.get("name"), str):
        raise refuse(f"messages[{index}].tool_calls: a call needs an id and a function name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise refuse(f"messages[{index}].tool_calls: the arguments of a call must be a string")
    try:
        # A call with broken arguments is history that the client cannot mend, so the engine reads it as an empty one.
        arguments = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _without_billing_header(part: Any) -> Any:
    """A system text without the client's per-request attribution line, which the engine drops too."""
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if isinstance(part, Mapping) and part.get("type") != "text":
        return part
    if not (isinstance(text, str) and text.startswith(_BILLING_HEADER)):
        return part
    rest = text.partition("\n")[2]
    if not rest:
        return None
    return rest if isinstance(part, str) else {**part, "text": rest}


def _developer_as_system(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _one_system_message(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system messages merged into one at the front, if they are not that already."""
    system = [message for message in chat if message["role"] == "system"]
    if len(system) == 1 and chat[0]["role"] == "system":
        return chat
    texts = []
    for message in system:
        content = message["content"]
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content if "text" in part)
        if content:
            texts.append(content)
    rest = [message for message in chat if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
