"""One request being answered: its prompts run on the engine, their tokens become text, and an unwanted rest is aborted."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from simulator.live_engine import Generation, LiveEngine
from simulator.openai_answer import Choice, Shape, Usage
from simulator.openai_request import ApiError
from simulator.reply import Reply
from simulator.sequence import Sequence
from simulator.stop_strings import StopStrings


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request, ready to run."""

    index: int
    token_ids: list[int]
    salt: str | None
    reply: Reply


class _Piece(msgspec.Struct, frozen=True):
    """Part of a choice as it is generated; `finish` with the last."""

    prompt: Prompt
    text: str
    token: int | None
    finish: str | None
    stop_reason: str | None


class Answer:
    """Use `whole` or `chunks`, once. Leaving either early, by an exception or a cancellation, aborts what still runs."""

    def __init__(
        self,
        live: LiveEngine,
        shape: Shape,
        prompts: list[Prompt],
        generations: list[Generation],
        stops: tuple[str, ...] = (),
        include_usage: bool = False,
    ) -> None:
        self._live = live
        self._shape = shape
        self._prompts = prompts
        self._generations = generations
        self._stops = stops
        self._include_usage = include_usage
        self._tokens: list[list[int]] = [[] for _ in prompts]

    @property
    def sequences(self) -> list[Sequence]:
        """What the engine knows of each prompt."""
        return [generation.sequence for generation in self._generations]

    async def whole(self) -> dict[str, Any]:
        """The body of an answer in one piece. Raises ApiError (500) when the engine failed."""
        texts = ["" for _ in self._prompts]
        choices: list[Choice] = []
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                prompt, at = piece.prompt, piece.prompt.index
                texts[at] += piece.text
                if piece.token is not None:
                    self._tokens[at].append(piece.token)
                if piece.finish is not None:
                    choices.append(
                        Choice(at, texts[at], piece.finish, piece.stop_reason, self._tokens[at], prompt.token_ids)
                    )
        choices.sort(key=lambda choice: choice.index)
        return self._shape.whole(choices, self._usage())

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer; the first comes with the first token. Raises ApiError when the engine failed."""
        async with contextlib.aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                prompt, sent = piece.prompt, self._tokens[piece.prompt.index]
                first = not sent
                if first and (opening := self._shape.opening(prompt.index, prompt.token_ids)) is not None:
                    yield opening
                new = [piece.token] if piece.token is not None else []
                sent += new
                if piece.text or piece.finish is not None:
                    ids = prompt.token_ids if first else None
                    yield self._shape.piece(prompt.index, piece.text, new, piece.finish, piece.stop_reason, ids)
        if self._include_usage:
            yield self._shape.closing(self._usage())

    async def _pieces(self) -> AsyncGenerator[_Piece, None]:
        ready: asyncio.Queue[_Piece] = asyncio.Queue()
        followers = [
            asyncio.create_task(self._follow(prompt, generation, ready))
            for prompt, generation in zip(self._prompts, self._generations, strict=True)
        ]
        try:
            open_choices = len(self._prompts)
            while open_choices:
                piece = await ready.get()
                if piece.finish == "error":
                    raise ApiError(500, "The engine failed to serve this request.", "InternalServerError")
                open_choices -= piece.finish is not None
                yield piece
        finally:
            for follower in followers:
                follower.cancel()
            for generation in self._generations:
                self._live.end(generation.sequence.id, "abort")

    async def _follow(self, prompt: Prompt, generation: Generation, ready: "asyncio.Queue[_Piece]") -> None:
        stops = StopStrings(self._stops)
        sent = 0
        finish: str | None = None
        while finish is None:
            output = await generation.next()
            finish = output.finish
            text = ""
            if output.token is not None:
                text = stops.feed(prompt.reply.texts[sent])
                sent += 1
            if stops.found is not None:
                self._live.end(generation.sequence.id, "stop")
                finish = "stop"
            elif finish is not None:
                text += stops.rest()
            ready.put_nowait(_Piece(prompt, text, output.token, finish, stops.found))

    def _usage(self) -> Usage:
        cached = sum(sequence.cached_tokens or 0 for sequence in self.sequences)
        return Usage(sum(len(p.token_ids) for p in self._prompts), sum(map(len, self._tokens)), cached)
