"""Understanding a request: which API and model it is for, and what its tokens are.

The client's errors end here (400, 404); what cannot be tokenized goes on with the reason why it will be routed by load.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, get_args

import msgspec

from gateway.extproc.decision import Head, Rejected
from gateway.logs import RateLimit
from gateway.metrics import Metrics
from gateway.served_models import Served, ServedModels
from gateway.tracing import Tracing
from tokenization.body import PROMPT_PATHS, decode_body
from tokenization.errors import TokenizationError
from tokenization.images import Reason
from tokenization.tokenized import Tokenized

log = logging.getLogger(__name__)

SHOWN_NAME = 200
"""Characters of an unknown model's name that an error repeats."""
_MEDIA_REASONS = frozenset((*get_args(Reason), "image_refused"))
"""Why the local tokenizer has nothing of a prompt with images, or refuses one."""
LARGE_BODY = 64 * 1024
"""Bytes from which a body is parsed in a worker thread: 64 KB of JSON take about 0.1 ms."""


class Tokenizer(Protocol):
    """Turns a request into token ids, off the event loop. Raises TokenizationError."""

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        """`size`: bytes of the raw body."""
        ...


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was understood."""

    path: str
    served: Served | None
    """None: the request names no model, and needs none."""
    prompt: Tokenized | None
    blind: str | None
    """Why there is no prompt to match; a label."""
    parsed: Mapping[str, Any] | None = None
    """The body of a request with a prompt; None where it was not seen or says nothing."""


class Understanding:
    """Waits for parsing and tokenizing, under `timeout_s`; holds no state of a request."""

    def __init__(
        self,
        models: ServedModels,
        tokenizers: Callable[[Served], Tokenizer | None],
        timeout_s: float,
        metrics: Metrics,
        tracing: Tracing,
        clock: Callable[[], float],
    ) -> None:
        self.tokenizers = tokenizers
        self.timeout_s = timeout_s
        self._models, self._metrics, self._tracing, self._clock = models, metrics, tracing, clock
        self._quiet = RateLimit()

    async def understand(self, head: Head, body: bytes) -> Ask | Rejected:
        route = head.path.partition("?")[0].rstrip("/").removesuffix("/render")
        if head.method != "POST" or (route not in PROMPT_PATHS and not _is_json(head)):
            return Ask(path=route, served=None, prompt=None, blind="no_prompt")
        if not head.body_complete:
            return Ask(path=route, served=None, prompt=None, blind="body_not_seen")
        started = self._clock()
        try:
            with self._tracing.step("parse"):
                parsed = await asyncio.to_thread(decode_body, body) if len(body) > LARGE_BODY else decode_body(body)
        except TokenizationError as error:
            if route not in PROMPT_PATHS:
                return Ask(path=route, served=None, prompt=None, blind="no_prompt")
            return _refused(error)
        finally:
            self._metrics.step.labels("parse").observe(self._clock() - started)

        name = parsed.get("model")
        if not isinstance(name, str) or not name:
            if name is None and route not in PROMPT_PATHS:
                return Ask(path=route, served=None, prompt=None, blind="no_prompt")
            message = "you must provide a model" if name is None else "model must be a non-empty string"
            return Rejected(status=400, message=message, param="model", code="invalid_request")
        if not _is_text(name):
            message = "model must be a string of Unicode characters"
            return Rejected(status=400, message=message, param="model", code="invalid_request")
        served = self._models.resolve(name)
        if served is None:
            known = ", ".join(self._models.names()[:8])
            shown = name if len(name) <= SHOWN_NAME else f"{name[:SHOWN_NAME]}..."
            message = f"The model `{shown}` does not exist. Served here: {known}."
            return Rejected(status=404, message=message, param="model", code="model_not_found")
        if route not in PROMPT_PATHS:
            return Ask(path=route, served=served, prompt=None, blind="no_prompt")
        return await self._tokenize(route, head.path, parsed, served, len(body))

    async def _tokenize(
        self, route: str, path: str, parsed: Mapping[str, Any], served: Served, size: int
    ) -> Ask | Rejected:
        tokenizer = self.tokenizers(served)
        if tokenizer is None:
            return Ask(path=route, served=served, prompt=None, blind="no_tokenizer", parsed=parsed)
        started = self._clock()
        prompt, blind = None, None
        try:
            with self._tracing.step("tokenize") as span:
                async with asyncio.timeout(self.timeout_s):
                    engine_model = self._models.engine_model(served)
                    prompt = await tokenizer.tokenize(path, parsed, size=size, engine_model=engine_model)
                span.set("gen_ai.usage.input_tokens", prompt.prompt_tokens)
            self._metrics.prompt_tokens.observe(prompt.prompt_tokens)
            self._count_media(prompt)
        except TokenizationError as error:
            if error.reason in _MEDIA_REASONS:
                self._metrics.media_prompts.labels("local", error.reason).inc()
            if error.status is not None:
                return _refused(error)
            blind = error.reason
        except TimeoutError:
            blind = "tokenizer_timeout"
            self._warn(blind, f"limit_s={self.timeout_s}")
        except Exception as error:  # noqa: BLE001 - fail open: the engine may well serve it
            blind = "tokenizer_failed"
            self._warn(blind, f"error={error!r}", error)
        finally:
            self._metrics.step.labels("tokenize").observe(self._clock() - started)
        return Ask(path=route, served=served, prompt=prompt, blind=blind, parsed=parsed)

    def _count_media(self, prompt: Tokenized) -> None:
        if not prompt.media:
            return
        named = len(prompt.extras) >= len(prompt.media) and all(it.identifier for it in prompt.extras)
        outcome = prompt.media_unread or ("named" if named else "unnamed")
        self._metrics.media_prompts.labels(prompt.source, outcome).inc()
        if prompt.extras:
            self._metrics.media_tokens.observe(sum(it.length for it in prompt.extras))

    def _warn(self, reason: str, detail: str, error: Exception | None = None) -> None:
        if self._quiet.allows(reason, self._clock()):
            log.warning("routed_blind reason=%s %s", reason, detail, exc_info=error)


def _is_text(name: str) -> bool:
    """JSON can hold lone surrogates, which nothing outside Python can."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_json(head: Head) -> bool:
    return head.headers.get("content-type", "").partition(";")[0].strip().lower() in ("application/json", "")


def _refused(error: TokenizationError) -> Rejected:
    return Rejected(status=error.status or 400, message=error.message, code=error.reason)
