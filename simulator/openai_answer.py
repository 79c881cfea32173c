"""Completions and chat completions as vLLM shapes them: whole answers and the chunks of a stream."""

import time
from typing import Any, Literal

import msgspec

Kind = Literal["completion", "chat"]


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one answer; `cached_tokens` includes tokens that another engine sent."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": None,
        }


class Choice(msgspec.Struct, frozen=True):
    """One finished choice."""

    index: int
    text: str
    finish: str
    stop_reason: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]


class Shape:
    """Builds everything that belongs to one answer."""

    def __init__(self, kind: Kind, request_id: str, model: str, *, token_ids: bool = False) -> None:
        self.kind = kind
        self.id = request_id
        self._model = model
        self._token_ids = token_ids
        self._created = int(time.time())

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed; `kv_transfer_params` is for the caller to fill in."""
        answer = self._envelope("chat.completion" if self.kind == "chat" else "text_completion")
        answer["choices"] = [self._choice(choice) for choice in choices]
        answer["usage"] = usage.as_json()
        answer["kv_transfer_params"] = None
        if self.kind == "chat" and self._token_ids:
            answer["prompt_token_ids"] = choices[0].prompt_token_ids
        return answer

    def opening(self, index: int, prompt_token_ids: list[int]) -> dict[str, Any] | None:
        """The first chunk of a choice: a chat names the role, once the first token is there; a completion has none."""
        if self.kind != "chat":
            return None
        chunk = self._envelope("chat.completion.chunk")
        delta = {"role": "assistant", "content": ""}
        chunk["choices"] = [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]
        if self._token_ids:
            chunk["prompt_token_ids"] = prompt_token_ids
        return chunk

    def piece(
        self,
        index: int,
        text: str,
        tokens: list[int],
        finish: str | None = None,
        stop_reason: str | None = None,
        prompt_token_ids: list[int] | None = None,
    ) -> dict[str, Any]:
        """A chunk with new text, and with the finish reason if it is the last of its choice."""
        chunk = self._envelope("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish, "stop_reason": stop_reason}
        if self.kind == "chat":
            choice["delta"] = {"content": text} if text or finish is None else {}
        else:
            choice["text"] = text
            if self._token_ids and prompt_token_ids is not None:
                choice["prompt_token_ids"] = prompt_token_ids
        if self._token_ids:
            choice["token_ids"] = tokens
        chunk["choices"] = [choice]
        return chunk

    def closing(self, usage: Usage) -> dict[str, Any]:
        """The usage chunk, which has no choices."""
        chunk = self._envelope("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        chunk["choices"] = []
        chunk["usage"] = usage.as_json()
        return chunk

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shaped: dict[str, Any] = {
            "index": choice.index,
            "logprobs": None,
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.kind == "chat":
            shaped["message"] = {"role": "assistant", "content": choice.text, "tool_calls": [], "reasoning": None}
        else:
            shaped["text"] = choice.text
            if self._token_ids:
                shaped["prompt_token_ids"] = choice.prompt_token_ids
        if self._token_ids:
            shaped["token_ids"] = choice.token_ids
        return shaped

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}
