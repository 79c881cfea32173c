"""From a request body to an `Answer`: which model, which tokens, does it fit, is it one leg of a hand-off."""

import asyncio
import time
import uuid
from typing import Any

from simulator import handoff
from simulator.answer import Answer, Prompt
from simulator.hash_chain import Lora
from simulator.live_engine import LiveEngine
from simulator.openai_answer import Kind, Shape
from simulator.openai_request import ApiError, Options
from simulator.reply import ReplyWriter
from simulator.sequence import Sequence, Submission
from simulator.settings import ServerSettings
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.tokenized import Tokenized


class Completions:
    """Takes requests for one engine. Raises ApiError for everything that vLLM would refuse."""

    def __init__(
        self,
        settings: ServerSettings,
        live: LiveEngine,
        tokenizer: LocalTokenizer,
        writer: ReplyWriter,
        leases: handoff.Leases,
    ) -> None:
        self.engine_id = str(uuid.uuid4())
        self._settings = settings
        self._live = live
        self._tokenizer = tokenizer
        self._writer = writer
        self._leases = leases
        self._loras = {
            name: Lora(name, path, number) for number, (name, path) in enumerate(settings.loras.items(), start=1)
        }

    @property
    def models(self) -> dict[str, str]:
        """Served model names -> root: the model itself, or an adapter's path."""
        return {self._settings.model: self._settings.model, **self._settings.loras}

    def require_model(self, model: str) -> None:
        if model not in self.models:
            raise ApiError(404, f"The model `{model}` does not exist.", "NotFoundError", "model")

    async def tokenize(self, path: str, body: dict[str, Any]) -> Tokenized:
        """Token ids of the body's prompts."""
        try:
            tokens = await asyncio.to_thread(self._tokenizer.tokenize, path, body)
        except TokenizationError as error:
            raise ApiError(400, error.message) from error
        if not tokens.complete or tokens.media:
            raise ApiError(400, "At most 0 image(s) may be provided in one prompt.")
        return tokens

    async def prompts(self, path: str, body: dict[str, Any], options: Options) -> list[Prompt]:
        """The prompts of a body, tokenized and measured, with the replies they will get."""
        self.require_model(options.model)
        tokens = await self.tokenize(path, body)
        return [
            self._prompt(index, [int(token) for token in ids], tokens.salt, options)
            for index, ids in enumerate((tokens.token_ids, *tokens.batch))
        ]

    def answer(self, kind: Kind, options: Options, prompts: list[Prompt]) -> Answer:
        """Start generating."""
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        shape = Shape(kind, f"{prefix}-{uuid.uuid4().hex[:16]}", options.model, token_ids=options.return_token_ids)
        try:
            submissions = [self._submission(shape.id, options, prompt) for prompt in prompts]
        except ValueError as error:
            raise ApiError(400, str(error), param="kv_transfer_params") from error
        generations = [self._live.submit(submission) for submission in submissions]
        return Answer(self._live, shape, prompts, generations, options.stop, options.include_usage)

    def offer(self, sequence: Sequence) -> dict[str, Any] | None:
        """What the prefill leg of a hand-off gets back; None for every other request. Starts the lease."""
        blocks = self._live.engine.kept_blocks(sequence.id)
        if not blocks:
            return None
        self._leases.grant(sequence.id, len(blocks), time.monotonic())
        return handoff.offer(
            self.engine_id,
            sequence.id,
            self._settings.host,
            self._settings.port,
            blocks,
            sequence.prompt_tokens,
            sequence.cached_tokens or 0,
        )

    def _prompt(self, index: int, ids: list[int], salt: str | None, options: Options) -> Prompt:
        limit = self._settings.context_tokens
        if not ids:
            raise ApiError(400, "The prompt is empty.", param="prompt")
        asked = options.max_tokens if options.max_tokens is not None else limit - len(ids)
        if len(ids) + max(1, asked) > limit:
            raise ApiError(
                400,
                f"This model's maximum context length is {limit} tokens. However, you requested {max(1, asked)} output "
                f"tokens and your prompt contains {len(ids)} input tokens.",
            )
        return Prompt(index, ids, salt, self._writer.write(ids, asked, ignore_end=options.ignore_end))

    def _submission(self, answer_id: str, options: Options, prompt: Prompt) -> Submission:
        return Submission(
            id=f"{answer_id}-{prompt.index}-{uuid.uuid4().hex[:8]}",
            prompt=prompt.token_ids,
            reply=prompt.reply.tokens,
            finish=prompt.reply.finish,
            lora=self._loras.get(options.model),
            salt=prompt.salt,
            session_id=options.session_id,
            keep_blocks=handoff.wants_remote_decode(options.transfer),
            source=handoff.source(options.transfer),
        )
