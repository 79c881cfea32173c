"""Where KV blocks could be pulled from: the fleet is e0..e3, and e0 computes unless a test says otherwise."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import Hint, registered
from fleet.request import Match, Request

Make = Callable[..., Any]
Ask = Callable[..., Request]
HEADER = "x-kv-cache-source-host-port"
PICKS = {"default": np.array([0])}


def hint(producer: Any, request: Request, fleet: Fleet, picks: Any = None, primary: str = "default") -> Hint:
    told = producer.request_headers(request, picks or PICKS, primary, fleet.slots(), fleet)
    assert isinstance(told, Hint)
    return told


def test_a_prompt_that_was_not_matched_has_no_source(fleet: Fleet, make: Make, ask: Ask) -> None:
    assert hint(make("p2p-source-producer"), ask(), fleet) == Hint(outcome="no_match")
    other = make("p2p-source-producer", prefix_match_info_producer_name="another")
    assert hint(other, ask(matched=[0, 512, 0, 0]), fleet) == Hint(outcome="no_match")


@pytest.mark.parametrize("matched", [[512, 0, 0, 0], [512, 512, 512, 512], [0, 0, 0, 0]])
def test_nobody_is_named_who_holds_no_more(fleet: Fleet, make: Make, ask: Ask, matched: list[float]) -> None:
    told = hint(make("p2p-source-producer"), ask(matched=matched), fleet)
    assert (told.outcome, told.headers, told.endpoint) == ("no_better", {}, None)
    assert told.numbers == {"computing_tokens": matched[0], "best_tokens": matched[1]}


@pytest.mark.parametrize(("delta", "named"), [(1, True), (256, True), (257, False)])
def test_the_difference_must_reach_the_limit(fleet: Fleet, make: Make, ask: Ask, delta: int, named: bool) -> None:
    producer = make("p2p-source-producer", min_cached_token_delta=delta)
    assert (hint(producer, ask(matched=[256, 0, 512, 0]), fleet).outcome == "named") is named


def test_the_source_is_named_with_the_numbers_it_follows_from(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.waiting[2] = 3
    told = hint(make("p2p-source-producer"), ask(matched=[256, 0, 512, 0]), fleet)
    assert told == Hint(
        outcome="named",
        headers={HEADER: "10.0.0.2:8000"},
        endpoint=2,
        numbers={"computing_tokens": 256, "source_tokens": 512, "waiting": 3, "sources": 1},
    )


def test_the_prefill_pick_computes_where_there_is_one(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(matched=[512, 0, 0, 256])
    picks = {"decode": np.array([0]), "prefill": np.array([1])}
    assert hint(make("p2p-source-producer"), request, fleet, picks, "decode").headers == {HEADER: "10.0.0.0:8000"}
    renamed = make("p2p-source-producer", prefill_profile_name="p")
    assert hint(renamed, request, fleet, picks, "decode").outcome == "no_better"
    nobody = {"decode": np.array([0]), "prefill": np.empty(0, np.intp)}
    assert hint(make("p2p-source-producer"), request, fleet, nobody, "decode").outcome == "no_better"


def test_endpoints_that_should_get_nothing_are_no_sources(fleet: Fleet, make: Make, ask: Ask) -> None:
    producer, request = make("p2p-source-producer"), ask(matched=[0, 512, 512, 512])
    fleet.healthy[1], fleet.tripped[2], fleet.draining[3] = False, True, True
    assert hint(producer, request, fleet).outcome == "no_better"
    fleet.tripped[2] = False
    assert {hint(producer, request, fleet).endpoint for _ in range(20)} == {2}


def test_only_candidates_are_sources(fleet: Fleet, make: Make, ask: Ask) -> None:
    told = make("p2p-source-producer").request_headers(
        ask(matched=[0, 64, 512, 0]), PICKS, "default", np.array([0, 1, 3]), fleet
    )
    assert told.endpoint == 1


def test_what_no_exact_stream_announced_is_not_relied_on(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(matched=[0, 512, 256, 0])
    match = request.matches["p"]
    request.matches = {"p": msgspec.structs.replace(match, announced_tokens=np.array([0.0, 0, 128, 0]))}
    told = hint(make("p2p-source-producer"), request, fleet)
    assert (told.endpoint, told.numbers["source_tokens"]) == (2, 128)


def test_tokens_count_in_full_whatever_their_tier(fleet: Fleet, make: Make, ask: Ask) -> None:
    request = ask(matched=[0, 512, 0, 0])
    request.matches = {"p": msgspec.structs.replace(request.matches["p"], weighted_tokens=np.zeros(4))}
    assert hint(make("p2p-source-producer"), request, fleet).numbers["source_tokens"] == 512


def test_another_rank_at_the_same_address_is_no_source(make: Make, ask: Ask) -> None:
    fleet = Fleet()
    for rank in range(2):
        fleet.add(Endpoint(name="e", address="10.0.0.1:8000", rank=rank))
    assert hint(make("p2p-source-producer"), ask(matched=[0, 512]), fleet).outcome == "no_better"


def test_a_source_that_joined_after_the_match_holds_nothing(fleet: Fleet, make: Make, ask: Ask) -> None:
    assert hint(make("p2p-source-producer"), ask(matched=[0, 512]), fleet).endpoint == 1


def test_idle_sources_are_drawn_more_often_by_their_waiting_requests(fleet: Fleet, make: Make, ask: Ask) -> None:
    producer = make("p2p-source-producer")
    producer.rng = np.random.default_rng(1)
    fleet.waiting[:4] = [0, 0, 3, 0]
    request = ask(matched=[0, 512, 512, 480])
    drawn = Counter(hint(producer, request, fleet).endpoint for _ in range(1000))
    assert set(drawn) == {1, 2}, "480 is two blocks behind the best"
    assert drawn[1] / 1000 == pytest.approx(1 / (1 + 1 / 4), abs=0.05)


@given(
    held=st.lists(st.integers(0, 64), min_size=2, max_size=6),
    announced=st.lists(st.integers(0, 64), min_size=6, max_size=6),
    able=st.lists(st.booleans(), min_size=6, max_size=6),
    delta=st.integers(1, 300),
)
def test_whoever_is_named_is_able_near_the_best_and_worth_it(
    held: list[int], announced: list[int], able: list[bool], delta: int
) -> None:
    fleet = Fleet()
    for number in range(len(held)):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
        fleet.healthy[number] = able[number]
    tokens, relied = np.array(held) * 16.0, np.array(announced[: len(held)]) * 16.0
    match = Match(tokens=tokens, weighted_tokens=tokens, announced_tokens=relied, total_tokens=1024, block_tokens=16)
    request = Request(id="r", model="m", target_model="m", path="/", matches={"p": match}, default_match="p")
    kind = registered()["p2p-source-producer"]
    told = hint(kind("p", kind.Parameters(min_cached_token_delta=delta)), request, fleet)
    possible = {slot: relied[slot] for slot in range(1, len(held)) if able[slot]}
    best = max(possible.values(), default=0.0)
    assert (told.outcome == "named") == (best >= tokens[0] + delta)
    assert bool(told.headers) == (told.outcome == "named")
    if told.endpoint is not None:
        assert told.endpoint in possible
        assert relied[told.endpoint] >= max(best - 16, tokens[0] + delta)
