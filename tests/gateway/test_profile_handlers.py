from typing import Any

import numpy as np
import pytest

from fleet import plugin
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet, Slots
from fleet.plugin import Decider
from fleet.request import Request
from gateway.profile_handlers import (
    DataParallelProfileHandler,
    DisaggProfileHandler,
    HeaderProfileHandler,
    PdProfileHandler,
    SingleProfileHandler,
    StageDeciders,
    StagedHandler,
    StageNames,
    UnknownProfile,
)

REQUEST = Request(id="r", model="m", target_model="m", path="/")


def fleet_of(*addresses: str) -> Fleet:
    fleet = Fleet()
    for number, address in enumerate(addresses):
        fleet.add(Endpoint(name=f"e{number}", address=address))
    return fleet


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.intp)


def handler(kind: Any, existing: list[str], **parameters: Any) -> Any:
    made = kind("h", kind.Parameters(**parameters))
    made.bind(lambda name, wanted: Decider(name, plugin.Parameters()))
    made.use_profiles(existing)
    return made


def order(made: StagedHandler, request: Request = REQUEST) -> list[str]:
    """The profiles in the order in which they run, each finding slot 0."""
    picks: dict[str, Slots] = {}
    while (name := made.next_profile(request, picks, Fleet())) is not None:
        picks[name] = slots(0)
    return list(picks)


def test_one_profile_handlers_refuse_several() -> None:
    for kind in (SingleProfileHandler, DataParallelProfileHandler):
        with pytest.raises(ValueError, match="exactly one profile, but there are 2: a, b"):
            handler(kind, ["a", "b"])


def test_nested_and_flat_parameters_do_not_mix() -> None:
    with pytest.raises(ValueError, match=r"decodeProfile is the older spelling of profiles\.decode"):
        DisaggProfileHandler.Parameters(decode_profile="d", deciders=StageDeciders(prefill="p"))


def test_two_spellings_of_one_decider_are_refused() -> None:
    with pytest.raises(ValueError, match="mean the same"):
        DisaggProfileHandler.Parameters(decider_plugin_name="a", prefill_decider_plugin_name="b")


def test_prefill_first_takes_no_prefill_decider() -> None:
    with pytest.raises(ValueError, match="always prefills"):
        DisaggProfileHandler.Parameters(stage_order="prefill-first", deciders=StageDeciders(prefill="p"))


def test_a_missing_decode_profile_and_a_misspelled_stage_are_named() -> None:
    with pytest.raises(ValueError, match="no profile named 'decode'; did you mean 'decoed'"):
        handler(DisaggProfileHandler, ["decoed", "prefill"])
    with pytest.raises(ValueError, match="no profile named 'prefil'; did you mean 'prefill'"):
        handler(DisaggProfileHandler, ["decode", "prefill"], profiles=StageNames(prefill="prefil"))


def test_a_profile_that_would_never_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="never runs the profile 'batch'"):
        handler(DisaggProfileHandler, ["decode", "batch"])


def test_a_header_default_that_does_not_exist_is_an_error_unless_there_is_only_one_profile() -> None:
    with pytest.raises(ValueError, match="no profile named 'decode'"):
        handler(HeaderProfileHandler, ["a", "b"])
    assert order(handler(HeaderProfileHandler, ["a"])) == ["a"]


def test_a_header_value_chooses_the_profile_and_an_unknown_one_raises() -> None:
    made = handler(HeaderProfileHandler, ["a", "b"], header_name="X-Kind", default_profile="a")
    chosen = Request(id="r", model="m", target_model="m", path="/", headers={"x-kind": "b"})
    assert order(made) == ["a"]
    assert order(made, chosen) == ["b"]
    assert made.primary({"b": slots(1)}) == "b"
    with pytest.raises(UnknownProfile):
        order(made, Request(id="r", model="m", target_model="m", path="/", headers={"x-kind": "c"}))


@pytest.mark.parametrize(
    ("profiles", "parameters", "runs"),
    [
        (["decode"], {}, ["decode"]),
        (["prefill", "decode"], {}, ["decode"]),  # no decider: never a prefill stage
        (["prefill", "decode"], {"deciders": StageDeciders(prefill="p")}, ["decode", "prefill"]),
        (["encode", "prefill", "decode"], {"deciders": StageDeciders(prefill="p", encode="e")}, ["decode", "encode", "prefill"]),
        (["encode", "decode"], {"deciders": StageDeciders(prefill="p", encode="e")}, ["decode", "encode"]),
        (["prefill", "decode"], {"stage_order": "prefill-first"}, ["prefill", "decode"]),
        (
            ["encode", "prefill", "decode"],
            {"stage_order": "prefill-first", "deciders": StageDeciders(encode="e")},
            ["prefill", "encode", "decode"],
        ),
        (["p", "d"], {"decode_profile": "d", "prefill_profile": "p", "decider_plugin_name": "x"}, ["d", "p"]),
    ],
)  # fmt: skip
def test_stages_run_in_the_order_that_is_configured(
    profiles: list[str], parameters: dict[str, Any], runs: list[str]
) -> None:
    assert order(handler(DisaggProfileHandler, profiles, **parameters)) == runs


def test_headers_name_the_first_prefill_endpoint_and_all_encoders() -> None:
    made = handler(
        DisaggProfileHandler, ["encode", "prefill", "decode"], deciders=StageDeciders(prefill="p", encode="e")
    )
    fleet = fleet_of("10.0.0.1:8000", "[fd00::1]:8000", "10.0.0.3:8000")
    picks = {"decode": slots(0), "prefill": slots(1, 2), "encode": slots(2, 0)}
    assert made.headers(picks, fleet) == {
        "x-prefiller-host-port": "[fd00::1]:8000",
        "x-encoder-hosts-ports": "10.0.0.3:8000,10.0.0.1:8000",
    }
    assert made.headers({"decode": slots(0), "prefill": slots(), "encode": slots()}, fleet) == {}


def test_an_endpoint_that_does_both_is_not_handed_what_it_has() -> None:
    made = handler(DisaggProfileHandler, ["prefill", "decode"], deciders=StageDeciders(prefill="p"))
    fleet = fleet_of("10.0.0.1:8000", "10.0.0.2:8000")
    same, other = {"decode": slots(1), "prefill": slots(1, 0)}, {"decode": slots(1), "prefill": slots(0)}
    assert (made.prefill_slot(same), made.headers(same, fleet)) == (None, {})
    assert made.prefill_slot(other) == 0
    assert made.prefill_slot({"decode": slots(1)}) is None


def test_the_older_pd_handler_decides_with_its_named_plugin_and_may_rewrite_the_port() -> None:
    made = handler(PdProfileHandler, ["prefill", "decode"], primary_port=8100)
    fleet = fleet_of("10.0.0.1:8000", "10.0.0.2:8000")
    assert order(made) == ["decode", "prefill"]
    assert made.gates["prefill"].name == "prefix-based-pd-decider"
    assert made.address(0, fleet) == "10.0.0.1:8100"
    assert made.headers({"decode": slots(0), "prefill": slots(1)}, fleet) == {
        "x-prefiller-host-port": "10.0.0.2:8000",
        "x-data-parallel-host-port": "10.0.0.1:8000",
    }
