"""Whole policies on a small virtual fleet: the ways in which placement is known to go wrong must stay away."""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Picker, Scorer, registered
from fleet.request import Match, Request
from fleet.work import PrefillCost

Make = Callable[..., Any]
BLOCK = 512
COST = PrefillCost()


class VirtualFleet:
    """A small fleet in virtual time: enough engine to show where a policy sends traffic, and nothing more.

    An engine prefills one prompt after another at the cost model's own speed, keeps what it prefilled for ever and decodes for
    free. The index knows a block from the moment its prompt's prefill ends, as with exact and punctual events.
    """

    def __init__(self, engines: int, scorers: Sequence[tuple[Scorer, float]], picker: Picker) -> None:
        self.now = 0.0
        self.fleet = Fleet(clock=lambda: self.now)
        self.books = Books(self.fleet)
        self.scorers, self.picker = scorers, picker
        self.cached: list[set[int]] = []
        self.queues: list[deque[tuple[str, Sequence[int], int, float]]] = []
        self.finishes: list[tuple[float, int]] = []
        self.sent: list[int] = []
        self.ttft: list[float] = []
        for _ in range(engines):
            self.join()

    def join(self) -> int:
        slot = self.fleet.add(Endpoint(name=f"e{len(self.cached)}", address=f"10.0.0.{len(self.cached)}:8000"))
        self.cached.append(set())
        self.queues.append(deque())
        self.sent.append(0)
        return slot

    def send(self, keys: Sequence[int], tokens: int) -> int:
        """Decide one request now and return the slot it went to."""
        held = [0.0] * self.fleet.capacity
        for slot, cache in enumerate(self.cached):
            held[slot] = BLOCK * next((depth for depth, key in enumerate(keys) if key not in cache), len(keys))
        vector: Vector = np.array(held)
        match = Match(
            tokens=vector, weighted_tokens=vector, total_tokens=BLOCK * len(keys), block_tokens=BLOCK, keys=keys
        )
        name = f"r{sum(self.sent)}"
        request = Request(
            id=name,
            model="m",
            target_model="m",
            path="/",
            prompt_tokens=tokens,
            matches={"p": match},
            default_match="p",
        )
        candidates = self.fleet.slots()
        total = sum(scorer.score(request, candidates, self.fleet) * weight for scorer, weight in self.scorers)
        slot = int(self.picker.pick(request, candidates, np.asarray(total), self.fleet)[0])
        for scorer, _ in self.scorers:
            scorer.picked(request, {"default": np.array([slot])}, self.fleet)
        cached = min(float(vector[slot]), tokens - 1.0)
        self.books.reserve(name, slot, tokens - cached, 400, self.now, cached_tokens=cached, keys=keys)
        self.fleet.running[slot] += 1
        self.sent[slot] += 1
        self.queues[slot].append((name, keys, tokens, self.now))
        if len(self.queues[slot]) == 1:
            self._start(slot)
        return slot

    def run_until(self, time: float) -> None:
        """Let everything happen that happens before `time`."""
        while self.finishes and self.finishes[0][0] <= time:
            self.now, slot = heapq.heappop(self.finishes)
            name, keys, _, sent_at = self.queues[slot].popleft()
            self.cached[slot].update(keys)
            self.books.first_token(name, self.now)
            self.books.finish(name, self.now)
            self.fleet.running[slot] -= 1
            self.ttft.append(self.now - sent_at)
            if self.queues[slot]:
                self._start(slot)
        self.now = time

    def _start(self, slot: int) -> None:
        _, keys, tokens, _ = self.queues[slot][0]
        held = BLOCK * next((depth for depth, key in enumerate(keys) if key not in self.cached[slot]), len(keys))
        cached = np.array([min(held, tokens - 1.0)])
        heapq.heappush(self.finishes, (self.now + float(COST.seconds(tokens - cached, cached)[0]), slot))

    @property
    def imbalance(self) -> float:
        """Requests of the busiest endpoint, relative to the mean."""
        return max(self.sent) / (sum(self.sent) / len(self.sent))


def chain(*parts: object) -> list[int]:
    """Chained keys of a prompt whose blocks are `parts`."""
    return [hash(parts[: end + 1]) for end in range(len(parts))]


def policy(make: Make, *scorers: tuple[str, float]) -> tuple[list[tuple[Scorer, float]], Any]:
    return [(make(type_), weight) for type_, weight in scorers], make("max-score-picker", seed=1)


class LongestPrefix(Scorer):
    """The relative score that collapses: the longest match of all scores 1, however short it is."""

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        match = request.match()
        assert match is not None
        tokens = match.tokens_at(candidates)
        return tokens / tokens.max() if tokens.max() > 0 else np.zeros(len(candidates))


EXPECTED_WORK = (("expected-work-scorer", 1.0),)
PREFIX_AND_LOAD = (("prefix-cache-scorer", 2.0), ("active-request-scorer", 1.0))
PREFIX_AND_QUEUE_TOKENS = (("prefix-cache-scorer", 3.0), ("running-requests-size-scorer", 2.0))


def drive_with_a_shared_first_block(fleet: VirtualFleet, requests: int = 600) -> None:
    """Every prompt starts with the same block; conversations of 6-16 blocks, 70% of what the fleet can prefill."""
    rng = random.Random(3)
    conversations: list[list[int]] = []
    fleet.send(chain("shared"), 600)  # one endpoint has the block first, and nobody else is busy
    fleet.run_until(fleet.now + 1)
    for number in range(requests):
        fleet.run_until(fleet.now + rng.expovariate(60.0))
        if conversations and rng.random() < 0.4:
            keys = rng.choice(conversations)
        else:
            keys = chain("shared", *((number, block) for block in range(rng.randint(5, 15))))
            conversations.append(keys)
        fleet.send(keys, len(keys) * 512 + 100)
    fleet.run_until(1e9)


@pytest.mark.parametrize("scorers", [EXPECTED_WORK, PREFIX_AND_LOAD, PREFIX_AND_QUEUE_TOKENS])
def test_a_first_block_that_all_prompts_share_does_not_collapse_traffic(
    make: Make, scorers: tuple[tuple[str, float], ...]
) -> None:
    fleet = VirtualFleet(8, *policy(make, *scorers))
    drive_with_a_shared_first_block(fleet)
    assert fleet.imbalance < 1.25


def test_the_relative_longest_prefix_score_does_collapse_so_the_test_tests(make: Make) -> None:
    fleet = VirtualFleet(8, [(LongestPrefix("lp", LongestPrefix.Parameters()), 2.0)], make("max-score-picker", seed=1))
    drive_with_a_shared_first_block(fleet)
    assert fleet.imbalance > 6


def test_expected_work_waits_less_than_the_ratio_of_prefixes(make: Make) -> None:
    means = []
    for scorers in (EXPECTED_WORK, PREFIX_AND_LOAD):
        fleet = VirtualFleet(8, *policy(make, *scorers))
        drive_with_a_shared_first_block(fleet)
        means.append(float(np.mean(fleet.ttft)))
    assert means[0] < means[1]


def test_two_hot_groups_leave_no_engine_idle(make: Make) -> None:
    """Two prompts' worth of prefix for four engines: affinity alone would use two of them."""
    fleet = VirtualFleet(4, *policy(make, *EXPECTED_WORK))
    rng = random.Random(5)
    for number in range(400):
        fleet.run_until(fleet.now + rng.expovariate(25.0))
        group = rng.choice("AB")
        fleet.send(chain(*((group, block) for block in range(8)), *((number, block) for block in range(12))), 20 * 512)
    fleet.run_until(1e9)
    assert min(fleet.sent) > 0.5 * max(fleet.sent)


def test_a_new_engine_gets_its_share_and_no_herd(make: Make) -> None:
    """It is empty and idle, and every decision of a burst sees what the one before sent there."""
    fleet = VirtualFleet(7, *policy(make, *EXPECTED_WORK))
    drive_with_a_shared_first_block(fleet, 300)
    new = fleet.join()
    burst = [
        fleet.send(chain("shared", *((f"new{number}", block) for block in range(8))), 9 * 512) for number in range(80)
    ]
    assert 5 <= burst.count(new) <= 15
    assert max(burst.count(slot) for slot in range(8)) <= 15


def test_with_scraped_load_alone_a_burst_does_herd_so_the_test_tests(make: Make) -> None:
    fleet = VirtualFleet(7, *policy(make, ("queue-scorer", 1.0)))
    fleet.fleet.waiting[:7] = 5
    new = fleet.join()
    burst = [fleet.send(chain((f"new{number}", 0)), 512) for number in range(80)]
    assert burst.count(new) == 80


def test_a_burst_of_one_prompt_is_computed_once_where_that_is_faster(make: Make) -> None:
    """Blocks on their way count: the second request of a long prompt follows the first instead of starting anew."""
    fleet = VirtualFleet(8, *policy(make, *EXPECTED_WORK))
    long = chain(*(("document", block) for block in range(100)))
    first = fleet.send(long, 100 * 512 + 50)
    assert fleet.send(long, 100 * 512 + 50) == first


def test_every_registered_scorer_answers_for_any_candidates(make: Make, fleet: Fleet) -> None:
    request = Request(id="r", model="m", target_model="m", path="/")
    for type_, kind in registered().items():
        if not issubclass(kind, Scorer) or type_ in ("endpoint-attribute-scorer", "header-label-affinity-scorer"):
            continue
        for candidates in (fleet.slots(), np.array([2]), np.array([3, 1])):
            scores = make(type_).score(request, candidates, fleet)
            assert scores.shape == candidates.shape
            assert ((scores >= 0) & (scores <= 1)).all(), type_
