"""One request inside the engine: what it asked for, how far it is, which blocks it holds."""

from collections.abc import Sequence as Items
from enum import Enum
from typing import Literal

import msgspec

from simulator.hash_chain import HashChain, Lora
from simulator.pool import Block

FinishReason = Literal["stop", "length", "abort", "error"]


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine receives it. The reply is known beforehand: a model of an engine samples nothing.

    `reply` are all tokens that will be sampled, the stop token included when `finish` is "stop".
    `keep_blocks`: hold the blocks after the end until `Engine.release` (the prefill leg of a hand-off).
    `source`: the prompt's KV is pulled from another engine before anything is computed (the decode leg); what it holds
    is up to whoever answers `Engine.take_loads`.
    """

    id: str
    prompt: Items[int]
    reply: Items[int]
    finish: FinishReason = "length"
    lora: Lora | None = None
    salt: str | None = None
    session_id: str | None = None
    keep_blocks: bool = False
    source: object | None = None


class Phase(Enum):
    """Where a sequence is. LOADING sequences hold blocks but wait for another engine's KV."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Mutable state of one submission; only the engine changes it. Times are the engine's clock, in seconds."""

    __slots__ = (
        "arrived",
        "blocks",
        "cached_tokens",
        "chain",
        "computed",
        "external_tokens",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "phase",
        "prompt_tokens",
        "sampled",
        "scheduled_at",
        "stored",
        "submission",
    )

    def __init__(self, submission: Submission, chain: HashChain, now: float) -> None:
        self.submission = submission
        self.chain = chain
        self.prompt_tokens = len(chain)
        self.blocks: list[Block] = []
        self.computed = 0  # tokens whose KV exists (or will, when the step in flight ends)
        self.stored = 0  # leading blocks that are findable in the cache
        self.sampled = 0
        self.cached_tokens: int | None = None  # of the first admission: local hits and transferred tokens
        self.external_tokens = 0
        self.phase = Phase.WAITING
        self.finish_reason: FinishReason | None = None
        self.arrived = now
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def id(self) -> str:
        return self.submission.id

    @property
    def remaining(self) -> int:
        """Tokens known but not computed yet."""
        return len(self.chain) - self.computed

    @property
    def final_tokens(self) -> int:
        """Tokens whose KV will exist at the end: the last sampled token never gets any."""
        return self.prompt_tokens + len(self.submission.reply) - 1
