"""What a request asks the engine to compute on, before any tokenizer has seen it."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """Messages for the chat template, in OpenAI's form whatever API they came through."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    """As the engine dumps them: declared fields in declared order; only `parameters` keeps the client's order."""
    template_kwargs: Mapping[str, Any] = {}
    """Everything for the template but messages and tools, the request's own fields already merged in."""
    chat_template: str | None = None
    """A template sent with the request."""
    add_special_tokens: bool = False


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text that is tokenized as it is."""

    text: str
    add_special_tokens: bool = True


class Tokens(msgspec.Struct, frozen=True):
    """Token ids that came ready-made."""

    token_ids: Sequence[int]


Prompt = Chat | Text | Tokens


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed request body."""

    api: str
    """completions, chat, responses, messages, generate or pooling: a metric label."""
    prompts: tuple[Prompt, ...]
    """One per prompt of a batch; never empty."""
    cache_salt: str | None = None
    truncate_tokens: int | None = None
    """Keep only so many tokens; None and -1 (the model's own limit) keep all."""
    truncation_side: str | None = None
    prefix_only: bool = False
    """The prompts are only the leading part of what the engine computes on (a query without its documents)."""
