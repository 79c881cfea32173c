import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from scorers.prefix_cache_affinity_filter import PrefixCacheAffinityFilter

Make = Callable[..., Any]
Ask = Callable[..., Request]


def test_without_a_match_the_prefix_score_is_zero(fleet: Fleet, make: Make, ask: Ask) -> None:
    for request in (ask(), ask(5, matched=[0, 0, 0, 0])):
        assert make("prefix-cache-scorer").score(request, fleet.slots(), fleet).tolist() == [0, 0, 0, 0]


def test_the_prefix_score_is_the_share_of_the_prompt(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(1024, matched=[0, 256, 512, 1024])
    assert make("prefix-cache-scorer").score(request, fleet.slots(), fleet).tolist() == [0, 0.25, 0.5, 1]


@pytest.mark.parametrize("blocks", [49, 98, 103, 107, 161])
def test_a_prompt_that_is_there_in_full_scores_exactly_one(fleet: Fleet, make: Make, ask: Ask, blocks: int) -> None:
    """Else a full score of another scorer, of the same weight, would always win over it instead of being its equal."""
    request = ask(16 * blocks, matched=[16 * blocks, 0, 0, 0])
    for weight in (0.0, 1.0):
        scorer = make("prefix-cache-scorer", match_length_weight=weight, match_length_scale_tokens=16 * blocks)
        assert scorer.score(request, fleet.slots(), fleet).tolist() == [1, 0, 0, 0]


def test_match_length_weighs_in_quadratically(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer = make("prefix-cache-scorer", match_length_weight=0.5, match_length_scale_tokens=512)
    request = ask(1024, matched=[0, 256, 512, 1024])
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 0.25, 0.75, 1]


def test_tier_weighted_tokens_count_in_whole_blocks(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(160)
    weighted = np.array([16 * 8 * 0.8, 16 * 10 * 0.8, 0, 160])
    request.matches["x"] = Match(tokens=np.full(4, 160.0), weighted_tokens=weighted, total_tokens=160, block_tokens=16)
    scorer = make("prefix-cache-scorer", prefix_match_info_producer_name="x")
    assert scorer.score(request, fleet.slots(), fleet).tolist() == pytest.approx([0.6, 0.8, 0, 1])


def test_a_scale_that_makes_no_sense_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="matchLengthScaleTokens"):
        make("prefix-cache-scorer", match_length_weight=0.5, match_length_scale_tokens=0)


def test_the_legacy_scorer_reads_the_precise_producer_and_falls_back_to_the_default(
    fleet: Fleet, make: Make, ask: Ask
) -> None:
    scorer = make("precise-prefix-cache-scorer")
    assert scorer.deprecated
    request = ask(64, matched=[16, 0, 0, 0])
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0.25, 0, 0, 0]
    request.matches["precise-prefix-cache-producer"] = msgspec.structs.replace(
        request.matches["p"], weighted_tokens=np.array([0, 64.0, 0, 0])
    )
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 1, 0, 0]
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [0, 0, 0, 0]


def test_cold_prompts_go_round_and_warm_ones_do_not_care(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer, cold, warm = make("no-hit-lru-scorer"), ask(64, matched=[0, 0, 0, 0]), ask(64, matched=[0, 16, 0, 0])
    third = pytest.approx(1 / 3)
    assert scorer.score(warm, fleet.slots(), fleet).tolist() == [0.5] * 4
    assert scorer.score(cold, fleet.slots(), fleet).tolist() == [1, pytest.approx(2 / 3), third, 0]
    scorer.picked(warm, {"default": np.array([3])}, fleet)
    scorer.picked(cold, {"default": np.array([0])}, fleet)
    assert scorer.score(cold, fleet.slots(), fleet).tolist() == [0, 1, pytest.approx(2 / 3), third]
    for slot in (1, 2, 3, 1):
        scorer.picked(cold, {"default": np.array([slot])}, fleet)
    assert scorer.score(cold, fleet.slots(), fleet).tolist() == [1, 0, pytest.approx(2 / 3), third]
    assert scorer.score(cold, np.array([2]), fleet).tolist() == [1]


def test_a_new_endpoint_in_an_old_slot_counts_as_never_used(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer, cold = make("no-hit-lru-scorer"), ask(64, matched=[0, 0, 0, 0])
    for slot in (0, 1, 2, 3):
        scorer.picked(cold, {"default": np.array([slot])}, fleet)
    fleet.remove(3)
    fleet.release(3)
    assert fleet.add(Endpoint(name="new", address="10.0.0.9:1")) == 3
    assert scorer.score(cold, fleet.slots(), fleet)[3] == 1


def test_sticking_ends_where_the_wait_is_too_long(fleet: Fleet, make: Make, ask: Ask) -> None:
    keep = make("prefix-cache-affinity-filter", max_ttft_penalty_ms=1000, peak_prefill_throughput=1000)
    request = ask(100, matched=[0, 80, 90, 0], block=10)
    assert keep.keep(request, fleet.slots(), fleet).tolist() == [False, True, True, False]
    fleet.in_flight_tokens[:4] = [500, 5000, 1500, 600]
    assert keep.keep(request, fleet.slots(), fleet).tolist() == [False, True, True, False]
    fleet.in_flight_tokens[2] = 1501
    assert keep.keep(request, fleet.slots(), fleet).tolist() == [True] * 4
    always = make("prefix-cache-affinity-filter", max_ttft_penalty_ms=0)
    assert always.keep(request, fleet.slots(), fleet).tolist() == [False, True, True, False]


def test_nobody_sticky_keeps_all_and_exploration_does_now_and_then(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(100, matched=[0, 79, 0, 0], block=10)
    assert make("prefix-cache-affinity-filter").keep(request, fleet.slots(), fleet).all()
    explores = PrefixCacheAffinityFilter(
        "f", PrefixCacheAffinityFilter.Parameters(exploration_probability=0.3), random.Random(1)
    )
    sticky = ask(100, matched=[0, 100, 0, 0], block=10)
    explored = sum(explores.keep(sticky, fleet.slots(), fleet).all() for _ in range(1000))
    assert 250 < explored < 350
    with pytest.raises(ValueError, match="latencyPredictor is not available"):
        make("prefix-cache-affinity-filter", ttft_source="latencyPredictor")


@pytest.mark.parametrize("token", ["!!!", "", "aGVsbG8", "/wD/"])
def test_a_session_token_that_means_nothing_is_no_session(fleet: Fleet, make: Make, ask: Ask, token: str) -> None:
    request = ask(headers={"x-session-token": token})
    assert make("session-affinity-scorer").score(request, fleet.slots(), fleet).tolist() == [0, 0, 0, 0]
    assert make("session-affinity-filter").keep(request, fleet.slots(), fleet).all()


def test_the_token_on_the_response_brings_the_session_back(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer = make("session-affinity-scorer")
    headers = scorer.response_headers(ask(), {"decode": np.array([2]), "prefill": np.array([0])}, fleet)
    assert list(headers) == ["x-session-token"]
    again = ask(headers=headers)
    assert scorer.score(again, fleet.slots(), fleet).tolist() == [0, 0, 1, 0]
    assert make("session-affinity-filter").keep(again, fleet.slots(), fleet).tolist() == [False, False, True, False]
    assert make("session-affinity-filter").keep(again, np.array([0, 1]), fleet).all()


def test_session_ids_are_remembered_here_and_forgotten_after_a_while(make: Make, ask: Ask) -> None:
    now = 0.0
    fleet = Fleet(clock=lambda: now)
    for number in range(2):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    scorer = make("session-affinity-scorer", strategy="session_id")
    request = ask(headers={"x-session-id": "s"})
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 0]
    scorer.picked(request, {"default": np.array([1])}, fleet)
    assert scorer.response_headers(request, {"default": np.array([1])}, fleet) == {}
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 1]
    now = 301.0  # whether anybody else has come since or not
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 0]
    scorer.picked(ask(headers={"x-session-id": "other"}), {"default": np.array([0])}, fleet)
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 0]


def test_the_session_of_a_request_comes_from_a_header_or_a_cookie(fleet: Fleet, make: Make, ask: Ask) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        make("session-id-producer")
    request = ask(headers={"x-my-session": "h", "cookie": "a=1; sid=c; b=2"})
    make("session-id-producer", header_name="X-My-Session").produce(request, fleet)
    assert request.session_id == "h"
    make("session-id-producer", cookie_name="sid").produce(request, fleet)
    assert request.session_id == "c"
    make("session-id-producer", cookie_name="none").produce(request, fleet)
    assert request.session_id == "c"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_the_context_length_formula(make: Make, ask: Ask) -> None:
    fleet = Fleet()
    for number, text in enumerate(["0-1000", "1000-1000", "5000-9000", None, "many", "9-1", "0-2000"]):
        labels = {"llm-d.ai/context-length-range": text} if text else {}
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:1", labels=labels))
    plugin = make("context-length-aware", enable_filtering=True)
    scores = plugin.score(ask(1000), fleet.slots(), fleet).tolist()
    assert scores == pytest.approx([0.3 + 0.7 * 0.7 / 1.1, 1, 0.3 / 5, 0.5, 0, 0, 0.3 + 0.7 * (0.7 / 1.2 + 0.15)])
    assert plugin.keep(ask(1000), fleet.slots(), fleet).tolist() == [True, True, False, True, False, False, True]
    assert plugin.keep(ask(0), fleet.slots(), fleet).all()
    assert make("context-length-aware").keep(ask(1000), fleet.slots(), fleet).all()


def test_nearness_to_the_earlier_pick(make: Make, ask: Ask) -> None:
    fleet = Fleet()
    for number, (host, zone) in enumerate([("h0", "z0"), ("h0", "z0"), ("h1", "z0"), ("h2", "z1")]):
        labels = {"kubernetes.io/hostname": host, "topology.kubernetes.io/zone": zone}
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:1", labels=labels))
    scorer, keep = make("topology-affinity-scorer"), make("topology-affinity-filter", min_affinity="zone")
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [0, 0, 0, 0]
    assert keep.keep(ask(), fleet.slots(), fleet).all()
    request = ask(peer=0)
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [1, 1, 0.05, 0]
    assert keep.keep(request, fleet.slots(), fleet).tolist() == [True, True, True, False]
    assert keep.keep(request, np.array([3]), fleet).all(), "nobody near: keep all"


def test_a_named_profiles_pick_is_remembered_instead_of_the_destinations(fleet: Fleet, make: Make, ask: Ask) -> None:
    scorer = make("session-affinity-scorer", strategy="session_id", profile_name="prefill")
    request = ask(headers={"x-session-id": "s"})
    scorer.picked(request, {"decode": np.array([2])}, fleet)
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 0, 0, 0]
    scorer.picked(request, {"decode": np.array([2]), "prefill": np.array([1])}, fleet)
    assert scorer.score(request, fleet.slots(), fleet).tolist() == [0, 1, 0, 0]


def test_what_plugins_remember_is_taken_over(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(64, matched=[0, 0, 0, 0], headers={"x-session-id": "s"})
    for kind, more in (("session-affinity-scorer", {"strategy": "session_id"}), ("no-hit-lru-scorer", {})):
        old, newer, fresh = (make(kind, **more) for _ in range(3))
        old.picked(request, {"default": np.array([1])}, fleet)
        newer.take_over(old)
        seen = newer.score(request, fleet.slots(), fleet).tolist()
        assert seen == old.score(request, fleet.slots(), fleet).tolist()
        assert seen != fresh.score(request, fleet.slots(), fleet).tolist()
