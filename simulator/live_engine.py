"""An engine in real time: one task that steps it, publishes its events and hands tokens to whoever waits for them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Items

from simulator.engine import Engine
from simulator.engine_settings import EngineSettings
from simulator.kv_events import KvEvent
from simulator.sequence import FinishReason, Sequence, Submission
from simulator.step import Output, Step

log = logging.getLogger(__name__)

_LATE_S = 0.02  # a step that begins later than this after its due time begins now: a stalled process does not catch up

Publish = Callable[[Items[KvEvent]], None]
Load = Callable[[Submission], Awaitable[bool]]


class Generation:
    """One request in flight: its sequence, and its outputs as they come."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._outputs: asyncio.Queue[Output] = asyncio.Queue()

    def put(self, output: Output) -> None:
        self._outputs.put_nowait(output)

    async def next(self) -> Output:
        """The next token; `finish` is set with the last."""
        return await self._outputs.get()


class LiveEngine:
    """`publish` is called with the events of each step that had any, at its end.

    `load` pulls the KV of a `remote` submission from its prefill engine and returns whether it arrived;
    `recompute` says what happens when it did not: compute the prompt here, or end the request with an error.
    """

    def __init__(
        self,
        settings: EngineSettings,
        publish: Publish,
        load: Load | None = None,
        *,
        recompute: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.engine = Engine(settings)
        self._publish = publish
        self._load = load
        self._recompute = recompute
        self._clock = clock
        self._generations: dict[str, Generation] = {}
        self._wake = asyncio.Event()
        self._loading: set[asyncio.Task[None]] = set()
        self.finished: Callable[[Sequence], None] = lambda sequence: None

    def submit(self, submission: Submission) -> Generation:
        """Queue a request; raises ValueError when it can never run."""
        generation = Generation(self.engine.submit(submission, self._clock()))
        self._generations[submission.id] = generation
        self._wake.set()
        return generation

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside; unknown and finished ones are ignored."""
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            self.engine.end(request_id, reason, self._clock())
            if generation.sequence.finish_reason is not None:  # else the step in flight ends it
                self.finished(generation.sequence)
            self._wake.set()

    def restart(self) -> None:
        """Lose everything, as a killed process does: cache, queue and running requests, which end with an error."""
        self.engine = Engine(self.settings)
        for generation in self._generations.values():
            generation.put(Output(generation.sequence, None, "error"))
        self._generations.clear()
        self._wake.set()

    async def run(self) -> None:
        """Step for ever; cancel to stop."""
        now = self._clock()
        while True:
            engine = self.engine
            step = engine.begin_step(now)
            for sequence in engine.take_loads():
                self._begin_load(engine, sequence)
            if step is None:
                self._wake.clear()
                await self._wake.wait()
                now = self._clock()
                continue
            await asyncio.sleep(max(0.0, step.ends - self._clock()))
            if engine is self.engine:
                self._finish(engine, step)
            late = self._clock() - step.ends
            now = step.ends if late < _LATE_S else self._clock()

    def _finish(self, engine: Engine, step: Step) -> None:
        outcome = engine.finish_step(step)
        if outcome.events:
            self._publish(outcome.events)
        for output in outcome.outputs:
            if output.finish is not None:
                self.finished(output.sequence)
                generation = self._generations.pop(output.sequence.id, None)
            else:
                generation = self._generations.get(output.sequence.id)
            if generation is not None:
                generation.put(output)

    def _begin_load(self, engine: Engine, sequence: Sequence) -> None:
        task = asyncio.create_task(self._pull(engine, sequence))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _pull(self, engine: Engine, sequence: Sequence) -> None:
        arrived = self._load is not None and await self._load(sequence.submission)
        if engine is not self.engine:
            return
        if arrived:
            engine.loaded(sequence.id)
        elif self._recompute:
            engine.load_failed(sequence.id)
        else:
            log.warning("kv_load_failed request=%s", sequence.id)
            generation = self._generations.get(sequence.id)
            self.end(sequence.id, "error")
            if generation is not None:
                generation.put(Output(sequence, None, "error"))
        self._wake.set()
