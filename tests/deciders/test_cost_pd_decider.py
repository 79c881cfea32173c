from typing import Any

import numpy as np
import pytest

from deciders.cost_pd_decider import CostPdDecider
from deciders.step_cost import TABLES
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import Verdict
from fleet.request import Match, Request


def make_fleet(prefills: int = 1) -> Fleet:
    """Slot 0 decodes, the others prefill."""
    fleet = Fleet(clock=lambda: 100.0)
    fleet.add(Endpoint(name="d", address="10.0.0.1:8000", labels={"llm-d.ai/role": "decode"}))
    for number in range(prefills):
        fleet.add(Endpoint(name=f"p{number}", address=f"10.0.1.{number}:8000", labels={"llm-d.ai/role": "prefill"}))
    return fleet


def decide(
    fleet: Fleet, prompt: int, held: float = 0, rewrites: bool | None = None, tpot: str | None = None, **more: Any
) -> Verdict:
    candidates = more.pop("candidates", None)
    tokens = np.zeros(16)
    tokens[0] = held
    match = Match(tokens=tokens, weighted_tokens=tokens, total_tokens=prompt, block_tokens=16)
    asked = Request(
        id="r", model="m", target_model="m", path="/", prompt_tokens=prompt, matches={"p": match}, default_match="p",
        rewrites_history=rewrites, headers={} if tpot is None else {"x-llm-d-slo-tpot-ms": tpot},
        candidates=candidates,
    )  # fmt: skip
    return CostPdDecider("d", CostPdDecider.Parameters(**more)).decide(asked, 0, fleet)


def busy(fleet: Fleet, batch: int) -> Fleet:
    fleet.decoding[0] = batch
    fleet.decode_tokens[0] = batch * 1000
    return fleet


def queued(fleet: Fleet, slot: int, tokens: float) -> Fleet:
    fleet.in_flight_tokens[slot] = tokens
    fleet.oldest_since[slot] = 100.0
    return fleet


def test_nothing_known_of_the_prompt_means_it_stays() -> None:
    assert decide(make_fleet(), 0).reason == "no-tokens"


def test_a_prefill_endpoint_that_the_request_may_not_go_to_is_no_alternative() -> None:
    fleet = busy(queued(make_fleet(2), 1, 1e6), 64)
    assert decide(fleet, 8000).reason == "spares-decodes"
    assert decide(fleet, 8000, candidates=np.array([0, 1])).reason == "prefill-pool-behind"
    assert decide(fleet, 8000, candidates=np.array([0])).reason == "no-prefill-endpoint"


def test_without_a_prefill_endpoint_it_stays() -> None:
    fleet = make_fleet()
    assert decide(make_fleet(0), 8000).reason == "no-prefill-endpoint"
    fleet.healthy[1] = False
    assert decide(fleet, 8000).reason == "no-prefill-endpoint"


def test_a_table_of_ones_own_must_make_sense() -> None:
    for table in ({}, {1: 5.0}, {8: 5.0, 1: 4.0}, {1: 0.0, 8: 5.0}):
        with pytest.raises(ValueError, match="linearMs: expected at least two points"):
            CostPdDecider.Parameters(linear_ms=table)


@pytest.mark.parametrize("tpot", ["soon", "", "nan", "inf", "-inf", "0", "-5", "1e999"])
def test_a_client_with_a_broken_target_gets_the_configured_one(tpot: str) -> None:
    numbers = decide(busy(make_fleet(), 64), 8000, tpot=tpot, tpot_target_ms=60.0).numbers
    assert numbers["slack_ms"] == pytest.approx(60 - TABLES["8b-h100-tp1"].decode_step(64, 64_000))


def test_a_continued_turn_stays_where_its_history_and_reply_are() -> None:
    assert decide(busy(make_fleet(), 64), 4040, held=4000) == Verdict(
        False, "few-tokens", {"prompt_tokens": 4040.0, "missing_tokens": 40.0}
    )


def test_a_template_that_rewrites_history_gets_no_shortcut() -> None:
    assert decide(busy(make_fleet(), 64), 4040, held=4000, rewrites=True).reason != "few-tokens"


def test_a_long_prompt_spares_a_busy_decode_batch() -> None:
    verdict = decide(busy(make_fleet(), 64), 2048)
    assert (verdict.disaggregate, verdict.reason) == (True, "spares-decodes")
    assert verdict.numbers["delta_ms"] == pytest.approx(31.2 + 1.8, abs=0.5)


def test_a_long_prompt_stays_on_an_idle_decode_endpoint() -> None:
    verdict = decide(make_fleet(), 2048)
    assert (verdict.disaggregate, verdict.reason) == (False, "sooner-here")


def test_a_prefill_pool_that_is_far_behind_is_not_waited_for() -> None:
    verdict = decide(queued(busy(make_fleet(), 64), 1, 400_000), 2048)
    assert (verdict.disaggregate, verdict.reason) == (False, "prefill-pool-behind")


def test_the_freest_prefill_endpoint_counts() -> None:
    fleet = queued(busy(make_fleet(2), 64), 1, 400_000)
    assert decide(fleet, 2048).reason == "spares-decodes"


def test_a_decode_endpoint_with_prefills_of_its_own_waiting_hands_off() -> None:
    assert decide(queued(make_fleet(), 0, 30_000), 1000).reason == "sooner-elsewhere"


def test_a_token_time_target_widens_or_narrows_what_the_batch_can_bear() -> None:
    assert decide(busy(make_fleet(), 64), 600, tpot="50").reason == "sooner-here"
    assert decide(busy(make_fleet(), 64), 600, tpot="12").reason == "spares-decodes"


def test_a_slow_link_keeps_prefills_local() -> None:
    fleet = queued(make_fleet(), 0, 2_000)
    assert decide(fleet, 4000).disaggregate
    assert not decide(fleet, 4000, bandwidth_gigabytes=1.0).disaggregate


@pytest.mark.parametrize(
    ("model", "new", "batch", "delta"),
    [
        ("8b-h100-tp1", 256, 16, 0.9),
        ("8b-h100-tp1", 512, 64, 4.5),
        ("8b-h100-tp1", 2048, 200, 33.2),
        ("70b-h100-tp8", 256, 64, 6.9),
        ("70b-h100-tp8", 1024, 64, 33.0),
    ],
)
def test_the_delay_of_a_decode_batch_is_the_measured_one(model: str, new: int, batch: int, delta: float) -> None:
    cost = TABLES[model]
    assert cost.linear(new + batch) - cost.linear(batch) == pytest.approx(delta, abs=0.11)


@pytest.mark.parametrize(
    ("model", "new", "history", "attention"), [("8b-h100-tp1", 256, 8192, 1.9), ("70b-h100-tp8", 2048, 32768, 37.8)]
)
def test_attention_over_the_history_is_the_computed_one(model: str, new: int, history: int, attention: float) -> None:
    assert TABLES[model].attention(new, history) == pytest.approx(attention, rel=0.03)


def test_beyond_the_table_a_step_costs_in_proportion() -> None:
    assert TABLES["8b-h100-tp1"].linear(32768) == pytest.approx(2 * 308.1)
    assert TABLES["8b-h100-tp1"].linear(0) == 0.0
