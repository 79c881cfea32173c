from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleet.fleet import Adapters, Fleet
from fleet.request import Request

Make = Callable[..., Any]
Ask = Callable[..., Request]


@pytest.mark.parametrize(
    ("type_", "column"), [("queue-scorer", "waiting"), ("running-requests-size-scorer", "running")]
)
def test_fewest_requests_score_one_and_most_zero(fleet: Fleet, make: Make, ask: Ask, type_: str, column: str) -> None:
    scorer = make(type_)
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [1, 1, 1, 1]
    getattr(fleet, column)[:4] = [0, 4, 1, 2]
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [1, 0, 0.75, 0.5]
    assert scorer.score(ask(), np.array([1, 3]), fleet).tolist() == [0, 1]


def test_kv_usage_is_scored_as_what_is_free(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.kv_usage[:4] = [0, 1, 0.25, 0.5]
    assert make("kv-cache-utilization-scorer").score(ask(), fleet.slots(), fleet).tolist() == [1, 0, 0.75, 0.5]


def test_load_aware_is_half_when_empty_and_nothing_at_the_threshold(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.waiting[:4] = [0, 64, 128, 1000]
    assert make("load-aware-scorer").score(ask(), fleet.slots(), fleet).tolist() == [0.5, 0.25, 0, 0]
    assert make("load-aware-scorer", threshold=0).score(ask(), fleet.slots(), fleet).tolist() == [0.5, 0.25, 0, 0]
    assert make("load-aware-scorer", threshold=256).score(ask(), fleet.slots(), fleet)[1] == 0.375


def test_active_requests_come_from_the_books(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer = make("active-request-scorer")
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [1, 1, 1, 1]
    fleet.in_flight[:4] = [0, 4, 1, 2]
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [1, 0, 0.75, 0.5]
    idle = make("active-request-scorer", idle_threshold=1, max_busy_score=0.5)
    assert idle.score(ask(), fleet.slots(), fleet).tolist() == [1, 0, 1, 0.25]
    outside = make("active-request-scorer", max_busy_score=7.0)
    assert outside.score(ask(), fleet.slots(), fleet)[2] == 0.75
    fleet.in_flight[:4] = 0
    assert make("active-request-scorer", idle_threshold=-1).score(ask(), fleet.slots(), fleet).tolist() == [1, 1, 1, 1]


def test_token_load_counts_this_requests_uncached_tokens_too(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.in_flight_tokens[:4] = [0, 500, 0, 2000]
    scorer = make("token-load-scorer", queue_threshold_tokens=1000)
    request = ask(500, matched=[0, 250, 500, 0])
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0.5, 0.25, 1, 0]
    assert make("token-load-scorer", queue_threshold_tokens=0).score(ask(0), fleet.slots(), fleet)[0] == 1


def test_output_estimates_change_what_in_flight_tokens_are(fleet: Fleet, make: Make, ask: Ask) -> None:
    producer = make("inflight-load-producer", add_estimated_output_tokens=True, max_estimated_output_tokens=600)
    request = ask(500)
    producer.produce(request, fleet)
    assert request.expected_output_tokens == 600
    fleet.reserved_tokens[0] = 900
    scorer = make("token-load-scorer", queue_threshold_tokens=4000, in_flight_load_producer_name="mine")
    scorer.bind(lambda name, kind: producer)
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0.5, 0.725, 0.725, 0.725]


def test_a_named_load_producer_that_does_not_exist_is_an_error_and_the_default_need_not_exist(make: Make) -> None:
    def nobody(name: str, kind: type) -> Any:
        raise LookupError(name)

    make("token-load-scorer").bind(nobody)
    for type_ in ("token-load-scorer", "active-request-scorer", "prefix-cache-affinity-filter"):
        with pytest.raises(LookupError):
            make(type_, in_flight_load_producer_name="gone").bind(nobody)


def test_lora_prefers_running_then_room_then_waiting(fleet: Fleet, make: Make, ask: Ask) -> None:
    names = frozenset
    fleet.adapters[0] = Adapters(names({"m"}), names(), 1)
    fleet.adapters[1] = Adapters(names({"x"}), names(), 2)
    fleet.adapters[2] = Adapters(names({"x"}), names({"m"}), 2)
    assert make("lora-affinity-scorer").score(ask(), fleet.slots(), fleet).tolist() == [1, 0.8, 0.6, 0]


def test_scores_do_not_break_on_a_slot_that_joined_after_the_match(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(64, matched=[64, 0])
    for type_ in ("prefix-cache-scorer", "token-load-scorer", "expected-work-scorer", "no-hit-lru-scorer"):
        assert len(make(type_).score(request, fleet.slots(), fleet)) == 4
