"""What is recorded of routed requests: reasons, shares by the endpoint that computes the prompt, and the last few."""

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.endpoint import ROLE_LABEL, Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from gateway.cycle import NOBODY, Decision, Run
from gateway.decision_reason import DecisionReason, reason_of
from gateway.matching import Found, Keys
from gateway.metrics import Metrics
from gateway.routing_record import RoutingRecord


@pytest.mark.parametrize(
    ("candidates", "best", "chosen", "reason"),
    [
        (1, 800, 0, DecisionReason.ONLY_CHOICE),
        (4, None, 0, DecisionReason.NO_KNOWLEDGE),
        (4, 0, 0, DecisionReason.NOTHING_CACHED),
        (4, 800, 0, DecisionReason.LOAD_OVER_CACHE),
        (4, 800, 16, DecisionReason.PART_CACHED),
        (4, 800, 800, DecisionReason.MOST_CACHED),
    ],
)
def test_every_situation_has_its_word(
    candidates: int, best: float | None, chosen: float, reason: DecisionReason
) -> None:
    assert reason_of(candidates, best, chosen) is reason


class World:
    """Two prefill and two decode endpoints; a prompt of 100 tokens, 6 full blocks of 16."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        for number, role in enumerate(("prefill", "prefill", "decode", "decode")):
            labels = {ROLE_LABEL: role}
            self.fleet.add(Endpoint(name=f"{role}-{number}", address=f"10.0.0.{number}:8000", labels=labels))
        self.metrics = Metrics(CollectorRegistry())
        self.record = RoutingRecord(self.fleet, self.metrics)
        self.told: list[tuple[int, int, int, int]] = []
        self.record.on_matched = lambda *numbers: self.told.append(numbers)

    def add(self, held: list[float] | None, slot: int, prefill: int | None = None, name: str = "r") -> None:
        keys = found = None
        if held is not None:
            tokens = np.zeros(self.fleet.capacity)
            tokens[: len(held)] = held
            match = Match(tokens=tokens, weighted_tokens=tokens, total_tokens=96, block_tokens=16)
            keys, found = Keys({16: range(6)}, dict.fromkeys(range(4), 16), 100), Found(match, tokens)
        run = Run("decode", [], np.array([2, 3]), [], np.zeros(2), np.array([slot]))
        decision = Decision(
            primary="decode",
            slots=(slot,),
            destinations=(f"10.0.0.{slot}:8000",),
            headers={},
            response_headers={},
            picks={"decode": np.array([slot]), "prefill": NOBODY if prefill is None else np.array([prefill])},
            runs={"decode": run},
            verdicts={},
            prefill=prefill,
        )
        request = Request(id=name, model="m", target_model="m", path="/", headers={}, prompt_tokens=100)
        self.record.add(request, decision, found, keys)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"warmroute_{name}", labels)


def test_best_is_of_the_same_role_and_never_the_whole_prompt() -> None:
    world = World()
    world.add([100, 0, 32, 96], slot=2)
    assert world.value("match_fraction_sum", endpoint="10.0.0.2:8000", which="best") == 0.96
    assert world.value("match_fraction_sum", endpoint="10.0.0.2:8000", which="chosen") == 0.32
    assert world.value("decisions_total", endpoint="10.0.0.2:8000", reason="part_cached") == 1
    assert world.told == [(2, 100, 96, 32)]


def test_a_hand_off_is_recorded_where_its_prompt_is_computed_and_decided_where_it_is_answered() -> None:
    world = World()
    world.add([64, 80, 0, 0], slot=3, prefill=0)
    assert world.value("match_fraction_sum", endpoint="10.0.0.0:8000", which="chosen") == 0.64
    assert world.value("match_fraction_sum", endpoint="10.0.0.0:8000", which="best") == 0.80
    assert world.value("match_fraction_sum", endpoint="10.0.0.3:8000", which="chosen") is None
    assert world.value("decisions_total", endpoint="10.0.0.3:8000", reason="nothing_cached") == 1
    assert world.told == [(3, 100, 0, 0), (0, 100, 80, 64)]
    assert world.record.last()[0].prefill == "prefill-0"


def test_what_was_not_matched_counts_as_a_decision_and_as_no_match() -> None:
    world = World()
    world.add(None, slot=2)
    assert world.value("decisions_total", endpoint="10.0.0.2:8000", reason="no_knowledge") == 1
    assert world.value("match_fraction_count", endpoint="10.0.0.2:8000", which="chosen") is None
    assert (world.record.last()[0].best_tokens, world.told) == (-1, [])


def test_only_the_last_are_kept_the_newest_first() -> None:
    world = World()
    for number in range(70):
        world.add(None, slot=2, name=str(number))
    assert [it.request_id for it in world.record.last()] == [str(number) for number in range(69, 5, -1)]
