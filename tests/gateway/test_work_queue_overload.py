"""The router queue on a fleet of simulated engines in virtual time: what it is for, and that it costs nothing when idle."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from gateway.work_queue import Limits, Place, Waiting, WorkQueue
from scorers.expected_work_scorer import ExpectedWorkScorer
from simulator.engine import Engine
from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashChain, HashRecipe
from simulator.kv_events import Removed, Stored
from simulator.sequence import Submission
from simulator.step import Step

BLOCK = 512
RECIPE = HashRecipe.of("sha256_cbor", "0", BLOCK)
ENGINES = 4
CAPACITY_BLOCKS = 320
PULSE_S = 0.05


class Prompt(msgspec.Struct, frozen=True):
    at: float
    tokens: Sequence[int]
    reply: int
    digests: tuple[bytes, ...]
    flow: str = "default-flow"


def workload(rate: float, seconds: float, seed: int) -> list[Prompt]:
    """Conversations: two in five requests go on with an earlier one; lengths from a few hundred to 60,000 tokens."""
    rng = random.Random(seed)
    fresh = itertools.count(1)
    talks: list[list[int]] = []
    prompts, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        if talks and rng.random() < 0.4:
            tokens = talks[rng.randrange(len(talks))]
            tokens += [next(fresh) for _ in range(rng.randrange(100, 1500))]
        else:
            length = int(min(60_000, max(300, rng.lognormvariate(8.6, 1.1))))
            start = next(fresh) * 100_000
            tokens = list(range(start, start + length))
            talks.append(tokens)
        chain = HashChain(RECIPE, tokens)
        prompts.append(Prompt(now, tuple(tokens), rng.randrange(20, 200), tuple(chain.digests)))
    return prompts


class Overload:
    """Arrivals, engine steps and the queue's pulses in one order of time. `limits` None: no queue."""

    def __init__(self, limits: Limits | None) -> None:
        self.now = 0.0
        self.fleet = Fleet(clock=lambda: self.now)
        self.books = Books(self.fleet)
        self.scorer = ExpectedWorkScorer("w", ExpectedWorkScorer.Parameters())
        self.queue = WorkQueue(self.fleet, self.scorer, limits) if limits else None
        self.engines = [
            Engine(EngineSettings(recipe=RECIPE, blocks=CAPACITY_BLOCKS, reserve_output=True)) for _ in range(ENGINES)
        ]
        self.held: list[Counter[bytes]] = [Counter() for _ in self.engines]
        self.ttft: dict[int, float] = {}
        self.sent: list[int] = []
        self.waited = 0
        self._prompts: dict[str, tuple[int, Prompt]] = {}
        self._happening: list[tuple[float, int, str, Any]] = []
        self._order = itertools.count()
        self._stepping = [False] * ENGINES
        for number, engine in enumerate(self.engines):
            slot = self.fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
            self.fleet.kv_capacity_tokens[slot] = engine.settings.capacity_tokens

    def run(self, prompts: Sequence[Prompt]) -> list[float]:
        """Times to first token, in order of arrival."""
        for number, prompt in enumerate(prompts):
            self._at(prompt.at, "arrival", (number, prompt))
        while self._happening:
            self.now, _, what, about = heapq.heappop(self._happening)
            if what == "arrival":
                self._arrive(*about)
            elif what == "pulse" and self.queue and len(self.queue):
                self._at(self.now + PULSE_S, "pulse", None)
            if what != "step" or self._step_ended(*about):
                self._scan()
        return [self.ttft[number] for number in range(len(prompts))]

    def _at(self, time: float, what: str, about: object) -> None:
        heapq.heappush(self._happening, (time, next(self._order), what, about))

    def _look(self, name: str) -> Place:
        _, prompt = self._prompts[name]
        held = np.zeros(self.fleet.capacity)
        for slot, cache in enumerate(self.held):
            depth = next((i for i, digest in enumerate(prompt.digests) if not cache[digest]), len(prompt.digests))
            held[slot] = depth * BLOCK
        keys = [int.from_bytes(digest[-8:], "big") for digest in prompt.digests]
        match = Match(tokens=held, weighted_tokens=held, total_tokens=len(keys) * BLOCK, block_tokens=BLOCK, keys=keys)
        request = Request(
            id=name,
            model="m",
            target_model="m",
            path="/",
            prompt_tokens=len(prompt.tokens),
            fairness_id=prompt.flow,
            matches={"p": match},
            default_match="p",
        )
        slots = self.fleet.slots()
        best = int(slots[self.scorer.work(request, slots, self.fleet).expected.argmin()])
        return Place(request=request, candidates=slots, slot=best, decode=best)

    def _arrive(self, number: int, prompt: Prompt) -> None:
        name = f"r{number}"
        self._prompts[name] = number, prompt
        place = self._look(name)
        if self.queue is None or (not len(self.queue) and self.queue.admits(place, self.now)):
            self._send(place)
            return
        self.waited += 1
        if not len(self.queue):
            self._at(self.now + PULSE_S, "pulse", None)
        _, turned_away = self.queue.enter(place, self.now)
        assert turned_away is None

    def _scan(self) -> None:
        passed: set[Waiting] = set()
        while self.queue and (waiting := self.queue.next(self.now, passed)) is not None:
            self.fleet.kept = self.queue.kept_from(waiting)
            place = self._look(waiting.place.request.id)
            self.fleet.kept = None
            if self.queue.admits(place, self.now):
                self._send(place)
                self.queue.sent(waiting, place)
            else:
                self.queue.looked(waiting, place, self.now)
                passed.add(waiting)

    def _send(self, place: Place) -> None:
        request, slot = place.request, place.slot
        match = request.match()
        assert match is not None
        held = float(self.scorer.work(request, np.array([slot]), self.fleet).cached[0])
        self.books.reserve(
            request.id, slot, request.prompt_tokens - held, 400, self.now, cached_tokens=held, keys=match.keys
        )
        _, prompt = self._prompts[request.id]
        self.sent.append(slot)
        self.engines[slot].submit(Submission(id=request.id, prompt=prompt.tokens, reply=[7] * prompt.reply), self.now)
        self._step(slot)

    def _step(self, slot: int) -> None:
        if not self._stepping[slot] and (step := self.engines[slot].begin_step(self.now)) is not None:
            self._stepping[slot] = True
            self._at(step.ends, "step", (slot, step))

    def _step_ended(self, slot: int, step: Step) -> bool:
        """Whether anything happened that the queue wants to know."""
        seen = False
        self._stepping[slot] = False
        outcome = self.engines[slot].finish_step(step)
        for event in outcome.events:
            if isinstance(event, Stored):
                self.held[slot].update(event.digests)
            elif isinstance(event, Removed):
                self.held[slot][event.digest] -= 1
        for output in outcome.outputs:
            name = output.sequence.id
            seen = seen or output.sequence.sampled == 1 or output.finish is not None
            if output.sequence.sampled == 1:
                number, prompt = self._prompts[name]
                self.ttft[number] = self.now - prompt.at
                self.books.first_token(name, self.now)
            if output.finish is not None:
                self.books.finish(name, self.now)
        self._step(slot)
        return seen


BACKFILL = Limits(max_wait_s=1e9)
SHORTEST = Limits(max_wait_s=1e9, order="shortest")
BUSY, OVERLOADED = 3.0, 16.0
"""Requests a second: a quarter of what the four engines can do, and somewhat more than they can."""


@pytest.fixture(scope="module")
def crowd() -> list[Prompt]:
    return workload(OVERLOADED, 25.0, seed=1)


def test_in_overload_first_tokens_come_much_earlier_with_the_queue(crowd: list[Prompt]) -> None:
    without = np.mean(Overload(None).run(crowd))
    backfill = np.mean(Overload(BACKFILL).run(crowd))
    shortest = np.mean(Overload(SHORTEST).run(crowd))
    assert without > 2.0, "no overload: the test does not test"
    assert backfill < 0.6 * without
    assert shortest < backfill


def test_without_the_memory_rule_the_queue_helps_little(crowd: list[Prompt]) -> None:
    """It is what does not fit into memory that blocks what does."""
    limitless = np.mean(Overload(msgspec.structs.replace(BACKFILL, kv_limit=2.0)).run(crowd))
    assert limitless > 1.5 * np.mean(Overload(BACKFILL).run(crowd))


def test_with_room_to_spare_the_queue_changes_nothing() -> None:
    few = workload(0.5, 60.0, seed=2)
    without, queued = Overload(None), Overload(BACKFILL)
    assert without.run(few) == queued.run(few)
    assert queued.waited == 0
    assert without.sent == queued.sent


def test_at_normal_load_hardly_anybody_waits_and_nobody_for_long() -> None:
    some = workload(BUSY, 60.0, seed=3)
    without, queued = Overload(None), Overload(BACKFILL)
    assert np.mean(queued.run(some)) < 1.02 * np.mean(without.run(some))
    assert queued.waited < 0.05 * len(some)


def test_a_flow_that_floods_the_queue_does_not_starve_another(crowd: list[Prompt]) -> None:
    mixed = [
        msgspec.structs.replace(prompt, flow="small" if number % 10 == 0 else "flood")
        for number, prompt in enumerate(crowd)
    ]
    small = slice(None, None, 10)
    fair = np.mean(Overload(BACKFILL).run(mixed)[small])
    unfair = np.mean(Overload(msgspec.structs.replace(BACKFILL, fairness=False)).run(mixed)[small])
    assert fair < 0.7 * unfair


def hot(rate: float, seconds: float, seed: int) -> list[Prompt]:
    """Everybody begins with the same 12,000 tokens, goes on alone, and wants a long reply."""
    rng = random.Random(seed)
    shared, fresh, prompts, now = list(range(1, 12_289)), itertools.count(1_000_000), [], 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        tokens = (*shared, *(next(fresh) for _ in range(rng.randrange(500, 1500))))
        prompts.append(Prompt(now, tokens, rng.randrange(20, 60), tuple(HashChain(RECIPE, tokens).digests)))
    return prompts


@pytest.mark.parametrize("limits", [BACKFILL, SHORTEST], ids=["backfill", "shortest"])
def test_a_beginning_that_everybody_shares_does_not_keep_everybody_waiting_for_one_engine(limits: Limits) -> None:
    burst = hot(60.0, 4.0, seed=4)
    without, queued = Overload(None), Overload(limits)
    usual, waited = np.mean(without.run(burst)), np.mean(queued.run(burst))
    shares = np.bincount(queued.sent, minlength=ENGINES) / len(burst)
    assert shares.min() > 0.1, "an engine idles while others are waited for"
    assert waited < 1.1 * usual
