"""The scheduler of a vLLM-like engine, step by step, without a clock of its own.

    submit / abort / reset ──> [waiting] ──begin_step(now)──> Step(ends) ──finish_step(step)──> tokens, ends, events

Rules
1. One step takes running requests first (one token each, or the next chunk of a prompt), then waiting ones in order of
   arrival, within the token budget. The head of the queue blocks those behind it.
2. Blocks are taken as tokens are scheduled. Where a running request finds no room, the youngest running one is preempted:
   it gives its blocks back, and starts over from the cache at the head of the queue. With `reserve_output` a request is
   admitted only when prompt and reply fit beside what the others will still need, and nothing is ever preempted.
3. Blocks are findable for other requests from the moment they are scheduled. The outside world learns of them, of tokens
   and of ends when the step ENDS: callers must not look at a step's effects before `Step.ends`.
4. A hit is at most (prompt - 1) // block_tokens blocks: one token has to be computed.
5. Whoever drives this decides what time is: seconds of a real clock, or virtual ones. Step times are divided by `speed`.
"""

from collections import deque

from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashChain
from simulator.pool import Block, BlockPool
from simulator.sequence import FinishReason, Phase, Sequence, Submission
from simulator.step import Counters, Outcome, Output, Step


class Engine:
    """One engine: a pool, a queue and the batch that runs."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.blocks, caching=settings.caching)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._kept: dict[str, list[Block]] = {}
        self._new_loads: list[Sequence] = []
        self._ends: list[tuple[Sequence, FinishReason]] = []
        self._in_flight: Step | None = None

    # -- what goes in -------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission, now: float) -> Sequence:
        """Queue a request. Raises ValueError when it can never run: an empty prompt or reply, or more than the pool."""
        size = self.settings.recipe.block_tokens
        if not submission.prompt or not submission.reply:
            raise ValueError(f"request {submission.id}: the prompt and the reply need at least one token each")
        if submission.id in self._sequences:
            raise ValueError(f"request {submission.id}: the id is in use")
        need = -(-(len(submission.prompt) + len(submission.reply) - 1) // size)
        if need > self.pool.usable:
            raise ValueError(f"request {submission.id}: needs {need} blocks, the engine has {self.pool.usable}")
        sequence = Sequence(submission, self.chain(submission), now)
        self._sequences[submission.id] = sequence
        self.waiting.append(sequence)
        return sequence

    def chain(self, submission: Submission) -> HashChain:
        """The prompt's tokens with their hashes. A model that knows its blocks by other names has its own."""
        return HashChain(self.settings.recipe, submission.prompt, lora=submission.lora, salt=submission.salt)

    def end(self, request_id: str, reason: FinishReason, now: float) -> None:
        """End a request from outside: the client went away ("abort"), or a stop string was seen ("stop").

        Takes effect at once, or at the end of the step in flight. Its blocks stay cached; nothing is announced.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if self._in_flight is None:
            self._finish(sequence, reason, now)
        else:
            self._ends.append((sequence, reason))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False while requests hold any. Announced with the next step that runs."""
        return self.pool.reset()

    # -- hand-offs ----------------------------------------------------------------------------------------------------

    def take_loads(self) -> list[Sequence]:
        """Sequences that now hold blocks and wait for another engine's KV; answer each with `loaded` or `load_failed`."""
        loads, self._new_loads = self._new_loads, []
        return loads

    def loaded(self, request_id: str) -> None:
        """The transferred KV has arrived: all prompt blocks are valid, only the last token is computed here."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase is Phase.LOADING:
            sequence.computed = sequence.prompt_tokens - 1
            self._store(sequence)
            sequence.phase = Phase.WAITING

    def load_failed(self, request_id: str) -> None:
        """No KV came: compute the prompt here after all."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and sequence.phase is Phase.LOADING:
            self.counters.external_hits -= sequence.external_tokens
            sequence.cached_tokens = (sequence.cached_tokens or 0) - sequence.external_tokens
            sequence.external_tokens = 0
            sequence.phase = Phase.WAITING

    def kept_blocks(self, request_id: str) -> list[int]:
        """Numbers of the blocks that a finished `keep_blocks` request still holds; empty when it holds none."""
        return [block.number for block in self._kept.get(request_id, ())]

    def release(self, request_id: str) -> bool:
        """Give back the kept blocks of a finished request; False if there were none (read already, or expired)."""
        blocks = self._kept.pop(request_id, None)
        if blocks is None:
            return False
        self.pool.release(blocks)
        return True

    # -- what the outside may look at ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """True while any request is unfinished."""
        return bool(self._sequences)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold (0..1); cached but free blocks do not count."""
        return self.pool.used / self.pool.usable

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self, now: float) -> Step | None:
        """Schedule one step that starts at `now`; None when there is nothing to do."""
        if self._in_flight is not None:
            raise RuntimeError("the step in flight has not been finished")
        work = self._schedule(now)
        if not work and not self._new_loads:
            return None
        chunks = [(n, seq.computed - n) for seq, n in work if seq.sampled == 0 or n > 1]
        contexts = [seq.computed for seq, n in work if seq.sampled > 0 and n == 1]
        duration = self.settings.cost.step_ms(chunks, contexts) / 1e3 / self.settings.speed
        self._in_flight = Step(now, now + duration, tuple(work))
        self.counters.steps += 1
        return self._in_flight

    def finish_step(self, step: Step) -> Outcome:
        """Everything that the step did, true at `step.ends`."""
        if step is not self._in_flight:
            raise RuntimeError("this step is not in flight")
        self._in_flight = None
        outputs: list[Output] = []
        for sequence, tokens in step.work:
            if sequence.sampled == 0:
                self.counters.computed_prompt += tokens
            if sequence.remaining == 0:
                outputs.append(self._sample(sequence, step.ends))
        for sequence, reason in self._ends:
            if sequence.phase is not Phase.FINISHED:
                self._finish(sequence, reason, step.ends)
                outputs.append(Output(sequence, None, reason))
        self._ends.clear()
        return Outcome(tuple(outputs), tuple(self.pool.take_events()))

    def _schedule(self, now: float) -> list[tuple[Sequence, int]]:
        budget = self.settings.token_budget
        work: list[tuple[Sequence, int]] = []
        preempted = False
        while len(work) < len(self.running) and budget > 0:
            sequence = self.running[len(work)]
            tokens = min(sequence.remaining, budget)
            while not self._take(sequence, tokens):
                victim = self.running.pop()
                self._preempt(victim)
                preempted = True
                if victim is sequence:
                    return work
            work.append((sequence, tokens))
            budget -= tokens
        return work if preempted else work + self._admit(budget, now)

    def _admit(self, budget: int, now: float) -> list[tuple[Sequence, int]]:
        """Move waiting requests into the batch until budget, seats or room run out."""
        admitted: list[tuple[Sequence, int]] = []
        loading: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self.settings.max_running:
            sequence = self.waiting.popleft()
            if sequence.phase is Phase.LOADING:
                loading.append(sequence)
                continue
            size = sequence.chain.block_tokens
            hits = [] if sequence.blocks else self.pool.match(sequence.chain.digests, (len(sequence.chain) - 1) // size)
            start = sequence.computed + len(hits) * size
            pull = sequence.submission.source is not None and sequence.cached_tokens is None
            tokens = len(sequence.chain) - start
            if not pull:
                tokens = min(tokens, budget)
            if not self._whole_fits(sequence, hits) or not self._take(sequence, tokens, hits, pull=pull):
                self.waiting.appendleft(sequence)
                break
            self._count_admission(sequence, start, tokens if pull else 0, now)
            if pull:
                sequence.phase = Phase.LOADING
                loading.append(sequence)
                self._new_loads.append(sequence)
                continue
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
            admitted.append((sequence, tokens))
            budget -= tokens
        self.waiting.extendleft(reversed(loading))
        return admitted

    def _take(self, sequence: Sequence, tokens: int, hits: list[Block] | None = None, *, pull: bool = False) -> bool:
        """Take room for `tokens` more tokens after `hits`, and count them as computed; False if there is no room.

        With `pull` the room is taken, but nothing is valid yet.
        """
        hits = hits or []
        size = sequence.chain.block_tokens
        start = sequence.computed + len(hits) * size
        new = max(0, -(-(start + tokens) // size) - len(hits) - len(sequence.blocks))
        if new or hits:
            if self.pool.needs(new, hits) > self.pool.free:
                return False
            self.pool.hold(hits)
            sequence.blocks += hits
            sequence.stored += len(hits)
            sequence.blocks += self.pool.allocate(new)
        sequence.computed = start if pull else start + tokens
        if not pull:
            self._store(sequence)
        return True

    def _store(self, sequence: Sequence) -> None:
        full = sequence.computed // sequence.chain.block_tokens
        if full > sequence.stored:
            session = sequence.submission.session_id
            self.pool.store(sequence.chain, sequence.blocks, sequence.stored, full, session)
            sequence.stored = full

    def _whole_fits(self, sequence: Sequence, hits: list[Block]) -> bool:
        """With `reserve_output`: is there room for all of it beside what admitted requests will still take?"""
        if not self.settings.reserve_output:
            return True
        admitted = [*self.running, *(other for other in self.waiting if other.phase is Phase.LOADING)]
        owed = sum(_final_blocks(other) - len(other.blocks) for other in admitted)
        return self.pool.needs(_final_blocks(sequence) - len(hits), hits) + owed <= self.pool.free

    def _count_admission(self, sequence: Sequence, local: int, external: int, now: float) -> None:
        if sequence.cached_tokens is not None:
            return  # admitted before, and preempted
        # The last prompt token is always computed here, so a transferred prompt counts one token less.
        sequence.external_tokens = max(0, external - 1)
        sequence.cached_tokens = local + sequence.external_tokens
        sequence.scheduled_at = now
        self.counters.prefix_queries += sequence.prompt_tokens
        self.counters.prefix_hits += local
        if external:
            self.counters.external_queries += external
            self.counters.external_hits += sequence.external_tokens

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.stored = 0
        sequence.phase = Phase.WAITING
        self.waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _sample(self, sequence: Sequence, now: float) -> Output:
        submission = sequence.submission
        token = submission.reply[sequence.sampled]
        sequence.sampled += 1
        self.counters.generated += 1
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        if sequence.sampled == len(submission.reply):
            self._finish(sequence, submission.finish, now)
            return Output(sequence, token, submission.finish)
        sequence.chain.extend((token,))
        return Output(sequence, token, None)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        (self.running if sequence.phase is Phase.RUNNING else self.waiting).remove(sequence)
        sequence.phase = Phase.FINISHED
        sequence.finish_reason = reason
        sequence.finished_at = now
        if sequence.submission.keep_blocks and reason in ("stop", "length"):
            self._kept[sequence.id] = sequence.blocks
        else:
            self.pool.release(sequence.blocks)
        sequence.blocks = []
        del self._sequences[sequence.id]


def _final_blocks(sequence: Sequence) -> int:
    return -(-sequence.final_tokens // sequence.chain.block_tokens)
