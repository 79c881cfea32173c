"""Pseudo tokens: 4 bytes of text = 1 token. No tokenizer, no template, no match with real engine blocks.

Good enough to estimate load and to tell prompts with a common beginning apart from others (approximate prefix scoring),
which is what llm-d's `estimate` backend is for. The text of a chat is laid out so that a longer chat begins with the
bytes of the shorter one.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tokenization.body import parse_body
from tokenization.encoders import Ids
from tokenization.prompt import Chat, Prompt, Text, Tokens
from tokenization.tokenized import Tokenized

BYTES_PER_TOKEN = 4


def estimate(path: str, body: Mapping[str, Any]) -> Tokenized:
    """Pseudo ids of a request. Raises `TokenizationError` as `parse_body` does."""
    request = parse_body(path, body)
    ids = [_ids(prompt) for prompt in request.prompts]
    given = all(isinstance(prompt, Tokens) for prompt in request.prompts)
    return Tokenized(
        token_ids=ids[0],
        batch=tuple(ids[1:]),
        complete=not request.prefix_only,
        salt=request.cache_salt,
        api=request.api,
        source="given" if given else "estimate",
    )


def _ids(prompt: Prompt) -> Ids:
    if isinstance(prompt, Tokens):
        return np.array(prompt.token_ids, dtype=np.uint32)
    text = prompt.text if isinstance(prompt, Text) else "".join(_chat_text(prompt))
    data = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(data + b"\0" * (-len(data) % BYTES_PER_TOKEN), dtype="<u4").astype(np.uint32, copy=False)


def _chat_text(chat: Chat) -> Iterator[str]:
    if chat.tools:
        yield _json(chat.tools)
    for message in chat.messages:
        yield f"\n{message['role']}\n"
        content = message.get("content")
        for part in [content] if isinstance(content, str) else content or ():
            yield part if isinstance(part, str) else part["text"] if _is_text(part) else _json(part)
        if message.get("tool_calls"):
            yield _json(message["tool_calls"])


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
