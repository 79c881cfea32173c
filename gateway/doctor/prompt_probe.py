"""Send every engine one tiny new prompt, twice, and have it tokenized by everybody who can.

The prompt begins with a number that nobody has seen, so that it makes blocks that are announced; its first half is the same
for all engines (equal blocks must have equal hashes), its second half is each engine's own (so that one sees whose events
arrive where). One token is generated. With `send=False` engines only tokenize.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from fleet.endpoint import Endpoint, Role
from gateway.config import LoadedConfig
from gateway.doctor.facts import Engine, Probe, Template
from gateway.http_errors import reason
from gateway.served_models import Served
from gateway.template_knowledge import mode_in_use
from gateway.tokenizers import TokenizerError, Tokenizers
from tokenization.errors import TokenizationError

log = logging.getLogger(__name__)

ANSWER_S = 8.0
AT_ONCE = 32
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEXT = "The fleet's doctor compares tokenizers: naïve café, 12345 tokens,\n\tindented — 你好, done."
ENGINE_TYPE = "llm-d.ai/engine-type"
LONGEST_BLOCK = 512
"""Longer engine blocks are not filled by a probe: it would not be tiny any more."""

Body = dict[str, Any]


def probe_text(nonce: str, endpoint: Endpoint, block_tokens: int) -> str:
    """At least two blocks that all engines share, and two of the endpoint's own."""
    words = 2 * min(max(block_tokens, 16), LONGEST_BLOCK)
    common = " ".join(f"w{number}" for number in range(words // 2))
    own = " ".join(f"{endpoint.address} {endpoint.rank} w{number}" for number in range(words // 4))
    return f"{nonce} probe of the fleet's doctor, please ignore. {common} {own}"


class Prober:
    """One examination's requests. The tokenizers are those that the gateway would use."""

    def __init__(self, config: LoadedConfig, session: aiohttp.ClientSession, *, send: bool = True) -> None:
        self._config, self._session, self._send = config, session, send
        self._tokenizers: Tokenizers | None = None
        self._tokenizer_error = ""
        self._limit = asyncio.Semaphore(AT_ONCE)
        self.nonce = f"{time.time_ns():x}"

    async def load(self) -> None:
        """Load the gateway's tokenizers; what is wrong with them becomes a fact."""
        try:
            self._tokenizers = await Tokenizers.load(self._config)
        except (TokenizerError, OSError, ValueError) as error:
            self._tokenizer_error = str(error)

    async def close(self) -> None:
        if self._tokenizers is not None:
            await self._tokenizers.close()

    # --- templates

    async def templates(self, models: Sequence[str]) -> list[Template]:
        """The template probe's verdict on every tokenizer that renders here. `models`: those of the engines."""
        result = []
        for name, tokenizer in (self._tokenizers.local() if self._tokenizers else {}).items():
            if tokenizer.template is None:
                continue
            meant = [name] if name else list(models) or ["default"]
            settings = [self._config.settings.models[it] for it in meant if it in self._config.settings.models]
            try:
                mode = await asyncio.to_thread(mode_in_use, tokenizer)
            except TokenizationError as error:
                log.info("template_probe_refused model=%s error=%r", name, error.message)
                continue
            result.append(
                Template(
                    model=meant[0],
                    directory=str(self._config.tokenizer_of(meant[0]) or ""),
                    rewrites=mode.verdict == "rewrites_history",
                    cause=mode.cause,
                    match_tokens=mode.match_tokens,
                    held_tokens=mode.held_tokens,
                    acknowledged=any(it.rewrites_history for it in settings),
                )
            )
        return list({template.model: template for template in result}.values())

    # --- prompts

    async def probes(self, endpoints: Sequence[Endpoint], engines: Mapping[str, Engine]) -> list[Probe]:
        asked = [it for it in endpoints if not engines[it.address].error and not _needs_partner(it)]
        found = await asyncio.gather(*(self._probe(endpoint, engines[endpoint.address]) for endpoint in asked))
        return [probe for probe in found if probe is not None]

    async def _probe(self, endpoint: Endpoint, engine: Engine) -> Probe | None:
        listed = engine.models.base if engine.models else ()
        model = endpoint.model or (listed[0] if listed else next(iter(self._config.settings.models), ""))
        if not model:
            return None
        # The configuration may have a name of its own for the model; the engine wants one of its own.
        asked_as = listed[0] if listed and model not in listed else model
        block = engine.cache.get(endpoint.rank, {}).get("block_size", "")
        text = probe_text(self.nonce, endpoint, int(block) if block.isdecimal() else 16)
        chat = self._renders_chats(model)
        message = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        body: Body = {"model": asked_as, **message}
        async with self._limit:
            ids, ids_from, usage, error = await self._ask(endpoint, body, chat)
            if not ids:
                ids, ids_from = await self._tokenized(endpoint, body, chat)
            text_ids, _ = await self._tokenized(endpoint, {"model": asked_as, "prompt": TEXT}, chat=False)
        ours, exact, problem = await self._ours(CHAT if chat else COMPLETION, model, body)
        text_ours, _, _ = await self._ours(COMPLETION, model, {"model": asked_as, "prompt": TEXT})
        return Probe(
            endpoint=endpoint,
            model=model,
            chat=chat,
            error=error,
            engine_ids=ids,
            engine_ids_from=ids_from,
            router_ids=ours,
            router_exact=exact,
            router_error=problem,
            text_engine_ids=text_ids,
            text_router_ids=text_ours,
            usage=usage,
        )

    def _renders_chats(self, model: str) -> bool:
        local = self._tokenizers.local() if self._tokenizers else {}
        tokenizer = local.get(model) or local.get("")
        return tokenizer is None or tokenizer.template is not None

    async def _ask(self, endpoint: Endpoint, body: Body, chat: bool) -> tuple[list[int], str, list[Body], str]:
        """(prompt ids, where they are from, usages, error) of two completions of one token."""
        if not self._send:
            return [], "", [], ""
        ids: list[int] = []
        usage: list[Body] = []
        whole = {**body, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        headers = {"x-data-parallel-rank": str(endpoint.rank)} if endpoint.rank else {}
        for _ in range(2):
            status, answer = await self._post(endpoint, CHAT if chat else COMPLETION, whole, headers)
            if status != 200 or not isinstance(answer, dict):
                return ids, "the answer", usage, f"{status or 'no answer'} {_message(answer)}".strip()
            usage.append(answer.get("usage") or {})
            choices = answer.get("choices") or [{}]
            ids = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids") or []
        return list(ids), "the answer", usage, ""

    async def _tokenized(self, endpoint: Endpoint, body: Body, chat: bool) -> tuple[list[int], str]:
        status, answer = await self._post(endpoint, "/tokenize", body)
        if status == 200 and isinstance(answer, dict) and answer.get("tokens"):
            return list(answer["tokens"]), "/tokenize"
        status, answer = await self._post(endpoint, f"{CHAT if chat else COMPLETION}/render", body)
        rendered = answer[0] if isinstance(answer, list) and answer else answer
        if status == 200 and isinstance(rendered, dict) and rendered.get("token_ids"):
            return list(rendered["token_ids"]), "/render"
        return [], ""

    async def _ours(self, path: str, model: str, body: Body) -> tuple[list[int], bool, str]:
        """(ids, whether they can match, error) of the gateway's own tokenizer."""
        if self._tokenizers is None:
            return [], False, self._tokenizer_error
        backend = self._tokenizers.backend(Served(model, model))
        if backend is None:
            return [], False, f"no tokenizer for model {model!r}"
        try:
            prompt = await backend.tokenize(path, body)
        except TokenizationError as error:
            return [], False, error.message
        return [int(token) for token in prompt.token_ids], prompt.exact, ""

    async def _post(
        self, endpoint: Endpoint, path: str, body: Body, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, decoded answer); status 0 and the error where there is no answer."""
        limit = aiohttp.ClientTimeout(ANSWER_S)
        try:
            async with self._session.post(endpoint.url + path, json=body, headers=headers, timeout=limit) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, reason(error) or f"no answer within {ANSWER_S:g} s"
        try:
            return response.status, msgspec.json.decode(data)
        except msgspec.DecodeError:
            return response.status, data[:200].decode("utf-8", "replace")


def _needs_partner(endpoint: Endpoint) -> bool:
    """SGLang's split engines answer only pairs of requests."""
    return endpoint.labels.get(ENGINE_TYPE) == "sglang" and endpoint.role in (Role.PREFILL, Role.DECODE)


def _message(answer: Any) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(answer)[:200]
