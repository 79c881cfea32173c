"""Ask an engine for the token ids: for models whose prompts only the engine can render.

The engine's `/render` routes take the request as it is and answer with ids, multimodal hashes included; where they are
not enabled its `/tokenize` is asked. Every question has a budget, and a breaker keeps a slow or dead engine from
costing each request that budget: over it, or while the breaker is open, the fallback answers at once and it is counted.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
import numpy as np

from tokenization.backends import Backend
from tokenization.body import parse_body
from tokenization.breaker import Breaker
from tokenization.conversation import has_media
from tokenization.encoders import Ids
from tokenization.errors import TokenizationError, refuse, unroutable
from tokenization.prompt import Chat, PromptRequest, Text, Tokens
from tokenization.tokenized import Extra, Tokenized

log = logging.getLogger(__name__)

RENDER_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
_NOT_FOR_RENDER = frozenset(("stream", "stream_options", "background"))


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str | None]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


class _Rendered(msgspec.Struct):
    token_ids: list[int]
    features: _Features | None = None


class _Tokens(msgspec.Struct):
    tokens: list[int]


_RENDERED = msgspec.json.Decoder(_Rendered | list[_Rendered])
_TOKENS = msgspec.json.Decoder(_Tokens)


class EngineBackend:
    """Ids from an engine (or `vllm launch render`). One instance per event loop."""

    name = "engine"

    def __init__(
        self,
        url: str,
        fallback: Backend,
        *,
        model: str | None = None,
        budget_s: float = 0.25,
        media_budget_s: float = 5.0,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        url: base address, as "http://10.0.0.1:8000".
        model: the name the engine serves the model under; None = the request's own.
        budget_s, media_budget_s: the longest a request waits, without and with images.
        """
        self._url = url.rstrip("/")
        self._fallback = fallback
        self._model = model
        self._budget_s, self._media_budget_s = budget_s, media_budget_s
        self.breaker = breaker or Breaker()
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._render = True
        self.counts: Counter[str] = Counter()

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        request = parse_body(path, body)
        if all(isinstance(prompt, Tokens) for prompt in request.prompts):
            self.counts["given"] += 1
            return _given(request)
        refused = self.breaker.refuses(self._clock())
        if refused:
            return await self._fall_back(f"breaker_{refused}", path, body, size)
        ok: bool | None = None
        reason = "timeout"
        try:
            async with asyncio.timeout(self._media_budget_s if _has_media(request) else self._budget_s):
                result = await self._ask(path, body, request)
            ok = True
        except TimeoutError:
            ok = False
        except TokenizationError as error:
            ok = True
            self.counts[error.reason] += 1
            raise
        except (aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
            ok, reason = False, "unreachable" if isinstance(error, aiohttp.ClientConnectionError) else "bad_answer"
            log.warning("engine_tokenization_failed url=%s reason=%s error=%r", self._url, reason, error)
        finally:
            self.breaker.settle(ok=ok, now=self._clock())
        if not ok:
            return await self._fall_back(reason, path, body, size)
        self.counts["ok"] += 1
        return result

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._fallback.close()

    async def _fall_back(self, reason: str, path: str, body: Mapping[str, Any], size: int | None) -> Tokenized:
        self.counts[reason] += 1
        return await self._fallback.tokenize(path, body, size=size)

    async def _ask(self, path: str, body: Mapping[str, Any], request: PromptRequest) -> Tokenized:
        route = path.partition("?")[0].rstrip("/")
        question = {key: value for key, value in body.items() if key not in _NOT_FOR_RENDER}
        if self._model is not None:
            question["model"] = self._model
        if self._render and route in RENDER_PATHS:
            status, answer = await self._post(f"{route}/render", {**question, "return_mm_kwargs": False})
            if status not in (403, 404):
                _raise_for(status, answer)
                return _rendered(_RENDERED.decode(answer), request)
        ids = []
        for prompt in request.prompts:
            if isinstance(prompt, Tokens):
                ids.append(np.array(prompt.token_ids, dtype=np.uint32))
                continue
            status, answer = await self._post("/tokenize", _tokenize_question(prompt, question.get("model")))
            _raise_for(status, answer)
            ids.append(np.array(_TOKENS.decode(answer).tokens, dtype=np.uint32))
        if self._render and route in RENDER_PATHS:
            # Only now is it sure that the route was missing and not the model.
            self._render = False
            log.warning("engine_render_unavailable url=%s status=%d using=/tokenize", self._url, status)
        return _result(request, ids, complete=not request.prefix_only)

    async def _post(self, path: str, question: Mapping[str, Any]) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(connector=connector)
        try:
            data = await asyncio.to_thread(msgspec.json.encode, question)
        except UnicodeEncodeError as error:
            raise refuse(f"the prompt is not valid Unicode (lone surrogate): {error}", "lone_surrogate") from error
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url + path, data=data, headers=headers) as response:
            return response.status, await response.read()


def _tokenize_question(prompt: Chat | Text, model: Any) -> dict[str, Any]:
    if isinstance(prompt, Text):
        return {"model": model, "prompt": prompt.text, "add_special_tokens": prompt.add_special_tokens}
    kwargs = dict(prompt.template_kwargs)
    fields: dict[str, Any] = {
        key: kwargs.pop(key) for key in ("add_generation_prompt", "continue_final_message") if key in kwargs
    }
    question: dict[str, Any] = {"model": model, "messages": prompt.messages, "chat_template_kwargs": kwargs, **fields}
    if prompt.tools:
        question["tools"] = prompt.tools
    question["add_special_tokens"] = prompt.add_special_tokens
    return question


def _raise_for(status: int, answer: bytes) -> None:
    if status < 400:
        return
    if status >= 500:
        raise aiohttp.ClientPayloadError(f"status {status}")
    try:
        message = str(msgspec.json.decode(answer)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = answer[:200].decode("utf-8", "replace")
    if status == 400:
        raise refuse(message, "engine_refused")
    raise unroutable("engine_refused", f"the engine answered {status}: {message}")


def _rendered(answer: _Rendered | list[_Rendered], request: PromptRequest) -> Tokenized:
    answers = answer if isinstance(answer, list) else [answer]
    if not answers:
        raise unroutable("engine_refused", "the engine rendered no prompt")
    extras: list[Extra] = []
    features = answers[0].features
    if features is not None:
        for modality, places in features.mm_placeholders.items():
            names = features.mm_hashes.get(modality, [])
            extras += [Extra(name or "", at.offset, at.length) for name, at in zip(names, places, strict=False)]
    ids = [np.array(one.token_ids, dtype=np.uint32) for one in answers]
    media = tuple(modality for modality, places in features.mm_placeholders.items() for _ in places) if features else ()
    return _result(request, ids, extras=tuple(sorted(extras, key=lambda extra: extra.offset)), media=media)


def _given(request: PromptRequest) -> Tokenized:
    ids = [np.array(p.token_ids, dtype=np.uint32) for p in request.prompts if isinstance(p, Tokens)]
    return msgspec.structs.replace(_result(request, ids), source="given")


def _result(
    request: PromptRequest,
    ids: list[Ids],
    *,
    extras: tuple[Extra, ...] = (),
    media: tuple[str, ...] = (),
    complete: bool = True,
) -> Tokenized:
    return Tokenized(
        token_ids=ids[0],
        batch=tuple(ids[1:]),
        extras=extras,
        media=media or (("unknown",) if _has_media(request) else ()),
        complete=complete,
        salt=request.cache_salt,
        api=request.api,
        source="engine",
    )


def _has_media(request: PromptRequest) -> bool:
    return any(isinstance(prompt, Chat) and has_media(prompt.messages) for prompt in request.prompts)
