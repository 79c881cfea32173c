from typing import Any

import numpy as np
import pytest

from deciders.always_disagg_multimodal_decider import AlwaysDisaggMultimodalDecider
from deciders.always_disagg_pd_decider import AlwaysDisaggPdDecider
from deciders.isl_bounding_pd_decider import IslBoundingPdDecider
from deciders.lookup_table_pd_decider import LookupTablePdDecider
from deciders.prefix_based_pd_decider import PrefixBasedPdDecider
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request


def make_fleet() -> Fleet:
    fleet = Fleet()
    for number in range(2):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
    return fleet


def request(prompt: int = 0, held: dict[int, float] | None = None, producer: str = "p", **fields: Any) -> Request:
    matches = {}
    if held is not None:
        tokens = np.zeros(16)
        for slot, count in held.items():
            tokens[slot] = count
        matches[producer] = Match(tokens=tokens, weighted_tokens=tokens * 0.5, total_tokens=prompt, block_tokens=16)
    return Request(
        id="r",
        model="m",
        target_model="m",
        path="/",
        prompt_tokens=prompt,
        matches=matches,
        default_match="p",
        **fields,
    )


def decide(kind: Any, asked: Request, decode: int = 0, **parameters: Any) -> tuple[bool, str]:
    verdict = kind("d", kind.Parameters(**parameters)).decide(asked, decode, make_fleet())
    return verdict.disaggregate, verdict.reason


def test_always_means_always() -> None:
    assert decide(AlwaysDisaggPdDecider, request()) == (True, "always")


def test_the_multimodal_decider_wants_tokens_and_media() -> None:
    assert decide(AlwaysDisaggMultimodalDecider, request(0, multimodal=True)) == (False, "no-tokens")
    assert decide(AlwaysDisaggMultimodalDecider, request(10)) == (False, "text")
    assert decide(AlwaysDisaggMultimodalDecider, request(10, multimodal=True)) == (True, "multimodal")


@pytest.mark.parametrize(
    ("asked", "parameters", "answer"),
    [
        (request(1000, {0: 0}), {}, (False, "switched-off")),
        (request(0, {0: 0}), {"non_cached_tokens": 16}, (False, "no-tokens")),
        (request(10, {0: 0}), {"non_cached_tokens": 16}, (False, "short-prompt")),
        (request(90, {0: 0}), {"non_cached_tokens": 16, "prompt_tokens": 100}, (False, "short-prompt")),
        (request(1000), {"non_cached_tokens": 16}, (False, "no-match-data")),
        (request(1000, {0: 985}), {"non_cached_tokens": 16}, (False, "cached")),
        (request(1000, {0: 984}), {"non_cached_tokens": 16}, (True, "uncached")),
        (request(1000, {1: 984}), {"non_cached_tokens": 500}, (True, "uncached")),
        (request(16, {0: 0}), {"non_cached_tokens": 16}, (True, "uncached")),
    ],
)
def test_the_prefix_rule_is_llm_ds_over_unweighted_tokens(
    asked: Request, parameters: dict[str, Any], answer: tuple[bool, str]
) -> None:
    assert decide(PrefixBasedPdDecider, asked, **parameters) == answer


def test_a_named_producer_is_the_one_that_is_read() -> None:
    asked = request(1000, {0: 1000}, producer="other")
    assert decide(PrefixBasedPdDecider, asked, non_cached_tokens=16) == (False, "no-match-data")
    named = {"non_cached_tokens": 16, "prefix_match_info_producer_name": "other"}
    assert decide(PrefixBasedPdDecider, asked, **named) == (False, "cached")


def test_nothing_is_held_where_nothing_is_picked_yet() -> None:
    assert decide(PrefixBasedPdDecider, request(1000, {0: 1000}), decode=-1, non_cached_tokens=16) == (True, "uncached")


@pytest.mark.parametrize(
    ("prompt", "held", "answer"),
    [
        (0, 0, (False, "no-tokens")),
        (2048, 0, (True, "long")),
        (10_000, 7952, (True, "long")),
        (10_000, 7953, (False, "short")),
        (1000, 300, (True, "mostly-uncached")),
        (1000, 301, (False, "short")),
    ],
)
def test_isl_bounding_stays_only_below_both_bounds(prompt: int, held: float, answer: tuple[bool, str]) -> None:
    assert decide(IslBoundingPdDecider, request(prompt, {0: held})) == answer


def test_isl_bounding_treats_an_unknown_match_as_nothing_held() -> None:
    assert decide(IslBoundingPdDecider, request(1000)) == (True, "mostly-uncached")


def test_a_busy_decode_endpoint_prefills_nothing_and_an_unknown_capacity_is_calm() -> None:
    fleet, asked = make_fleet(), request(1000, {0: 900})
    decider = IslBoundingPdDecider("d", IslBoundingPdDecider.Parameters(decode_busy_threshold=0.8))
    fleet.reserved_tokens[0] = 8000
    assert decider.decide(asked, 0, fleet).reason == "short"
    fleet.kv_capacity_tokens[0] = 10_000
    assert decider.decide(asked, 0, fleet).reason == "decode-busy"


def test_a_table_of_the_wrong_shape_says_what_shape_it_needs() -> None:
    with pytest.raises(ValueError, match="expected 2 x 3 x 3 cells"):
        LookupTablePdDecider.Parameters(context_tokens=(100,))
    with pytest.raises(ValueError, match="edges must rise"):
        LookupTablePdDecider.Parameters(decoding_requests=(64, 16))


def test_the_table_is_read_by_history_ratio_and_load() -> None:
    cells = (((False,), (True,)), ((True,), (False,)))
    table = {"context_tokens": (100,), "input_output_ratio": (1.0,), "decoding_requests": (), "disaggregate": cells}
    assert decide(LookupTablePdDecider, request(0), **table) == (False, "no-tokens")
    assert decide(LookupTablePdDecider, request(400, {0: 99}), **table) == (False, "table-stay")  # 301 / 400
    assert decide(LookupTablePdDecider, request(499, {0: 99}), **table) == (True, "table-disaggregate")  # 400 / 400
    assert decide(LookupTablePdDecider, request(499, {0: 100}), **table) == (True, "table-disaggregate")  # 399 / 400
    assert decide(LookupTablePdDecider, request(499, {0: 100}, expected_output_tokens=10), **table)[0] is False


def test_the_default_table_keeps_short_turns_and_hands_off_long_prompts() -> None:
    assert decide(LookupTablePdDecider, request(3000, {0: 2960}))[0] is False
    assert decide(LookupTablePdDecider, request(9000, {0: 4000}))[0] is True
