"""A simulated engine for long traces: blocks have their ids for hashes, and steps that are alike are taken in one stride.

Most steps of an engine only decode. While nothing comes, nothing ends and no block is filled, each is as the one before but
for its context lengths, so they need not be scheduled one by one. Times and states are those of `simulator.engine`, step by step.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

from bench.placement.trace import BLOCK_TOKENS, Prompt
from simulator.engine import Engine
from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashChain, HashRecipe
from simulator.sequence import Submission
from simulator.step import Outcome, Step
from simulator.step_cost import profile

RECIPE = HashRecipe.of("sha256_cbor", "0", BLOCK_TOKENS)
KEY_BYTES = 8
"""Length of a prompt block's digest; those of replies are longer."""
MODELS = {"8b": ("8b", 400_000), "70b": ("70b-tp8", 1_200_000)}
"""Model -> step costs, tokens of KV cache of one engine."""


def settings_of(model: str, kv_tokens: int = 0) -> EngineSettings:
    """`kv_tokens`: another size of the KV cache."""
    cost, usual = MODELS[model]
    blocks = (kv_tokens or usual) // BLOCK_TOKENS + 1
    return EngineSettings(recipe=RECIPE, blocks=blocks, cost=profile(cost), reserve_output=True)


def key_of(block: int) -> int:
    """Block key of a block id: ids are chained already, and keys are spread over 64 bits."""
    return (block + 1) * 0x9E3779B97F4A7C15 & 0xFFFF_FFFF_FFFF_FFFF


class TraceSubmission(Submission, frozen=True, kw_only=True):
    """`prompt` is only as long as the prompt; `keys` are the block keys of its full blocks."""

    keys: Sequence[int]


def submission(name: str, prompt: Prompt, keys: Sequence[int]) -> TraceSubmission:
    return TraceSubmission(id=name, prompt=range(prompt.tokens), reply=range(prompt.reply), keys=keys)


class TraceChain(HashChain):
    """Counts tokens; a block of the prompt is hashed by its key, one with tokens of the reply is nobody else's."""

    __slots__ = ("_id", "_length")

    def __init__(self, told: TraceSubmission) -> None:
        self._id, self._length = told.id.encode(), 0
        super().__init__(RECIPE)
        self._length = len(told.prompt)
        self.digests = [key.to_bytes(KEY_BYTES, "big") for key in told.keys]

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Iterable[int]) -> None:
        self._length += len(list(tokens))
        while len(self.digests) < self._length // BLOCK_TOKENS:
            self.digests.append(b"reply of %s, block %d" % (self._id, len(self.digests)))


class TraceEngine(Engine):
    """`begin` and `finish` are several steps where these are alike; `cut` when something comes in between."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._begun: Step | None = None
        self._stretch: list[float] = []  # of the steps that are being taken

    def chain(self, submission: Submission) -> HashChain:
        if not isinstance(submission, TraceSubmission):
            raise TypeError(f"request {submission.id}: expected a TraceSubmission")
        return TraceChain(submission)

    def begin(self, now: float) -> float | None:
        """When the outcome is due if nothing comes; None when there is nothing to do."""
        step = self._begun = self.begin_step(now)
        if step is None:
            return None
        self._stretch = [step.ends]
        decodes, context, end = len(step.work), sum(it.computed for it, _ in step.work), step.ends
        for number in range(1, self._alike(step)):
            contexts = [context + number * decodes] + [0] * (decodes - 1)  # only their sum counts
            end += self.settings.cost.step_ms((), contexts) / 1e3 / self.settings.speed
            self._stretch.append(end)
        return end

    def cut(self, now: float) -> float:
        """Something came: the outcome is due at the end of the step that runs now, because the next one may be another."""
        del self._stretch[bisect_left(self._stretch, now) + 1 :]
        return self._stretch[-1]

    def finish(self) -> Outcome:
        """What has become true at the moment that `begin` or `cut` said."""
        step = self._begun
        if step is None:
            raise RuntimeError("no step has been begun")
        if more := len(self._stretch) - 1:
            for sequence, _ in step.work:
                sequence.computed += more
                sequence.sampled += more
                sequence.chain.extend(range(more))
            self.counters.steps += more
            self.counters.generated += more * len(step.work)
            self._in_flight = step = msgspec.structs.replace(step, ends=self._stretch[-1])
        return self.finish_step(step)

    @staticmethod
    def _alike(step: Step) -> int:
        """How many steps from this one on are decodes of the same sequences, in blocks that they have."""
        count = 1 << 30
        for sequence, tokens in step.work:
            if sequence.sampled == 0 or tokens > 1:
                return 1
            to_sample = len(sequence.submission.reply) - sequence.sampled
            to_fill = (sequence.stored + 1) * BLOCK_TOKENS - sequence.computed
            to_allocate = len(sequence.blocks) * BLOCK_TOKENS - sequence.computed + 1
            count = min(count, to_sample, to_fill, to_allocate)
        return count
