"""One policy, one fleet, one list of arrivals: everything in one order of virtual time.

    arrival --look--> [router queue] --send--> books, engine --step ends--> index, first tokens, finishes --> books, queue

Engines, scheduler, books, queue and index are the project's own; what waits is asked as `gateway.waiting_room` asks, without
its event loop. Deciding takes no time, and no message takes any, unless events are said to be late.

Rules
1. Nothing of a step is seen before it ends: not its tokens, nor its blocks, nor who left.
2. An engine takes what came during a step with its next one.
3. An engine goes on with its next step at once; what the router sends because of the last one comes after that.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import msgspec
import numpy as np

from bench.placement.engine import KEY_BYTES, TraceEngine, key_of, settings_of, submission
from bench.placement.policies import CONSTANTS, Policy, View
from bench.placement.trace import BLOCK_TOKENS, Prompt
from fleet.books import EXPECTED_OUTPUT, Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from fleet.work import cached_tokens
from gateway.config import load_text
from gateway.cycle import Decision
from gateway.waiting_room import LOOKS_PER_PULSE, PULSE_S
from gateway.work_queue import Place, Waiting
from indexer.index import Index
from simulator.kv_events import KvEvent, Removed, Stored
from simulator.step import Outcome

GPU = 0


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every policy."""

    engines: int = 8
    model: str = "8b"
    kv_tokens: int = 0
    """KV cache of one engine; 0: what the model leaves room for."""
    scrape_age_s: float = 0.05
    """How often scraped load is renewed; 0: always fresh."""
    events_late_s: float = 0.0
    """How long the index takes to learn of a block."""


class Served(msgspec.Struct):
    """What became of one request; times in seconds."""

    prompt: Prompt
    keys: list[int]
    """Block keys of its full blocks."""
    sent: float = -1.0
    slot: int = -1
    first: float = -1.0
    finished: float = -1.0
    cached: int = 0
    """Prompt tokens that the engine found cached."""


class ExactIndex:
    """The index as perfect events would make it: copies of a block are counted, and the last one that goes is a removal."""

    def __init__(self, engines: int) -> None:
        self.index = Index()
        self.blocks = np.zeros(engines)
        """Blocks in the index, per engine."""
        self.copies: list[Counter[int]] = [Counter() for _ in range(engines)]
        """Block key -> physical copies, per engine."""

    def apply(self, slot: int, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, Stored):
                for digest in event.digests:
                    self._change(slot, digest, 1)
            elif isinstance(event, Removed):
                self._change(slot, event.digest, -1)

    def _change(self, slot: int, digest: bytes, by: int) -> None:
        if len(digest) > KEY_BYTES:
            return  # no prompt of the trace has this block of a reply
        copies, key = self.copies[slot], int.from_bytes(digest, "big")
        copies[key] += by
        if by > 0 and copies[key] == 1:
            self.index.add(slot, GPU, [key])
            self.blocks[slot] += 1
        elif not copies[key]:
            self.index.remove(slot, GPU, [key])
            self.blocks[slot] -= 1
            del copies[key]


class Replay:
    """`run` gives every request's fate, in order of arrival."""

    def __init__(self, policy: Policy, world: World, seed: int) -> None:
        self.now = 0.0
        self.policy, self.world = policy, world
        self.fleet = Fleet(max(16, world.engines), clock=lambda: self.now)
        self.books = Books(self.fleet, idle_timeout_s=float("inf"))
        self.books.when_freed.append(self._freed)
        settings = settings_of(world.model, world.kv_tokens)
        self.engines = [TraceEngine(settings) for _ in range(world.engines)]
        self.known = ExactIndex(world.engines)
        for number in range(world.engines):
            slot = self.fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
            assert slot == number
            self.fleet.kv_capacity_tokens[slot] = settings.capacity_tokens
            self.fleet.block_tokens[slot] = BLOCK_TOKENS
        self._rule = policy.rule(seed) if policy.rule else None
        config = load_text(policy.config(CONSTANTS[world.model], seed)) if policy.config else None
        self._scheduler = config.scheduler(self.fleet) if config else None
        self._producer = (config.default_match if config else "") or "exact"
        self.queue = config.work_queue(self.fleet) if config else None
        self._active = np.zeros(world.engines)
        self._looks: dict[Waiting, Served] = {}
        self._served: dict[str, Served] = {}
        self._due: list[float | None] = [None] * world.engines
        self._scan_due = False
        self._left = 0
        self._happening: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()

    def run(self, prompts: Sequence[Prompt], progress: Callable[[int], None] = lambda _: None) -> list[Served]:
        """`progress` is told how many requests are still to come or to finish."""
        fates = [Served(prompt, [key_of(block) for block in prompt.full]) for prompt in prompts]
        self._left = len(fates)
        for number, fate in enumerate(fates):
            self._at(fate.prompt.at, self._arrive, f"r{number}", fate)
        if self.policy.scrapes and self.world.scrape_age_s:
            self._at(0.0, self._scrape)
        before = self._left
        while self._happening:
            self.now, _, happen, about = heapq.heappop(self._happening)
            happen(*about)
            if self._scan_due:
                self._scan()
            if self._left < before:
                before = self._left
                progress(before)
        return fates

    def _at(self, time: float, happen: Callable[..., None], *about: Any) -> None:
        heapq.heappush(self._happening, (time, next(self._order), happen, about))

    # Looking

    def _request(self, name: str, fate: Served) -> Request:
        keys = fate.keys
        held = self.known.index.match(keys).tokens(self.fleet.capacity, BLOCK_TOKENS)
        match = Match(
            tokens=held,
            weighted_tokens=held,
            total_tokens=len(keys) * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            keys=keys if self._rule is None else (),  # what is on its way is the project's own idea
        )
        return Request(
            id=name,
            model="m",
            target_model="m",
            path="/v1/completions",
            prompt_tokens=fate.prompt.tokens,
            matches={self._producer: match},
            default_match=self._producer,
        )

    def _look(self, name: str, fate: Served) -> Place:
        """Where the request would go now."""
        request = self._request(name, fate)
        slots = self.fleet.available()
        if self._rule is not None:
            slot = self._rule(self._view(request, fate.prompt))
        else:
            assert self._scheduler is not None
            if self.policy.scrapes and not self.world.scrape_age_s:
                self._read_engines()
            outcome = self._scheduler.schedule(request, slots, tell=False)
            if not isinstance(outcome, Decision) or self._scheduler.failures:
                raise RuntimeError(f"{self.policy.name}: no decision for {name}: {outcome}, {self._scheduler.failures}")
            slot = outcome.slots[0]
        return Place(request=request, candidates=slots, slot=slot, decode=slot)

    def _view(self, request: Request, prompt: Prompt) -> View:
        match, here = request.matches[self._producer], slice(self.world.engines)
        return View(
            tokens=float(prompt.tokens),
            blocks=prompt.full,
            matched=match.tokens[here] / BLOCK_TOKENS,
            new=prompt.tokens - np.minimum(match.tokens[here], prompt.tokens - 1.0),
            queued=self.fleet.in_flight_tokens[here],
            requests=self.fleet.in_flight[here],
            active=self._active,
            cache=self.known.blocks,
        )

    # Scraped load

    def _scrape(self) -> None:
        self._read_engines()
        if self._left:
            self._at(self.now + self.world.scrape_age_s, self._scrape)

    def _read_engines(self) -> None:
        for slot, engine in enumerate(self.engines):
            self.fleet.waiting[slot], self.fleet.running[slot] = len(engine.waiting), len(engine.running)
            self.fleet.kv_usage[slot], self.fleet.scraped_at[slot] = engine.kv_usage, self.now

    # Coming, waiting and leaving

    def _arrive(self, name: str, fate: Served) -> None:
        self._served[name] = fate
        place, queue = self._look(name, fate), self.queue
        if queue is None or (not len(queue) and queue.admits(place, self.now)):
            self._send(place, fate)
            return
        if not len(queue):
            self._at(self.now + PULSE_S, self._pulse)
        waiting, turned_away = queue.enter(place, self.now)
        assert turned_away is None, "the queue is to have room for everybody"
        self._looks[waiting] = fate
        self._scan_due = True

    def _freed(self) -> None:
        self._scan_due = self.queue is not None

    def _scan(self) -> None:
        self._scan_due = False
        assert self.queue is not None
        passed: set[Waiting] = set()
        while (waiting := self.queue.next(self.now, passed)) is not None:
            if not self._try(waiting):
                passed.add(waiting)

    def _try(self, waiting: Waiting) -> bool:
        assert self.queue is not None
        fate = self._looks[waiting]
        self.fleet.kept = self.queue.kept_from(waiting)
        place = self._look(waiting.place.request.id, fate)
        self.fleet.kept = None
        if not self.queue.admits(place, self.now):
            self.queue.looked(waiting, place, self.now)
            return False
        self._send(place, fate)
        self.queue.sent(waiting, place)
        del self._looks[waiting]
        return True

    def _pulse(self) -> None:
        assert self.queue is not None
        self._scan()
        for waiting in self.queue.longest_unseen(LOOKS_PER_PULSE):
            self._try(waiting)
        if len(self.queue):
            self._at(self.now + PULSE_S, self._pulse)

    def _send(self, place: Place, fate: Served) -> None:
        request, slot = place.request, place.slot
        held = float(cached_tokens(request, np.array([slot]), self.fleet)[0])
        usual = self.queue.limits.expected_output if self.queue else EXPECTED_OUTPUT
        keys = request.matches[self._producer].keys
        self.books.reserve(
            request.id, slot, request.prompt_tokens - held, usual, self.now, cached_tokens=held, keys=keys
        )
        self._active[slot] += request.prompt_tokens
        fate.sent, fate.slot = self.now, slot
        self.engines[slot].submit(submission(request.id, fate.prompt, fate.keys), self.now)
        if self._due[slot] is None:
            self._begin(slot)
        else:
            self._await(slot, self.engines[slot].cut(self.now))

    # Engines

    def _begin(self, slot: int) -> None:
        self._due[slot] = None
        if (due := self.engines[slot].begin(self.now)) is not None:
            self._await(slot, due)

    def _await(self, slot: int, due: float) -> None:
        if due != self._due[slot]:
            self._due[slot] = due
            self._at(due, self._finish, slot)

    def _finish(self, slot: int) -> None:
        if self._due[slot] == self.now:  # else it was cut short
            self.stepped(slot, self.engines[slot].finish())
            self._begin(slot)

    def stepped(self, slot: int, outcome: Outcome) -> None:
        """What an engine did is seen."""
        if outcome.events and self.world.events_late_s:
            self._at(self.now + self.world.events_late_s, self.known.apply, slot, outcome.events)
        elif outcome.events:
            self.known.apply(slot, outcome.events)
        for output in outcome.outputs:
            sequence = output.sequence
            if sequence.sampled == 1:
                fate = self._served[sequence.id]
                fate.first, fate.cached = self.now, sequence.cached_tokens or 0
                self.books.first_token(sequence.id, self.now)
            if output.finish is not None:
                fate = self._served.pop(sequence.id)
                fate.finished = self.now
                self._active[slot] -= fate.prompt.tokens
                self.books.finish(sequence.id, self.now)
                self._left -= 1
