from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleet.endpoint import ROLE_LABEL, Endpoint
from fleet.fleet import Fleet
from fleet.request import Request
from scorers.endpoint_attribute import (
    FixedRange,
    LinearAlgorithm,
    Normalization,
    Threshold,
    ThresholdAlgorithm,
)
from scorers.label_filters import Expression
from scorers.utilization_filter import Condition

Make = Callable[..., Any]
Ask = Callable[..., Request]
ROLES = ["encode", "prefill", "decode", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode", None]


def labelled(*labels: dict[str, str]) -> Fleet:
    fleet = Fleet()
    for number, those in enumerate(labels):
        fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000", labels=those))
    return fleet


@pytest.mark.parametrize(
    ("type_", "kept"),
    [
        ("decode-filter", {"decode", "prefill-decode", "both", "encode-prefill-decode", None}),
        ("prefill-filter", {"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"}),
        ("encode-filter", {"encode", "encode-prefill", "encode-prefill-decode"}),
    ],
)
def test_role_filters_keep_what_the_profile_needs(make: Make, ask: Ask, type_: str, kept: set[str | None]) -> None:
    fleet = labelled(*({ROLE_LABEL: role} if role else {} for role in ROLES))
    mask = make(type_).keep(ask(), fleet.slots(), fleet)
    assert {role for role, stays in zip(ROLES, mask.tolist(), strict=True) if stays} == kept


@pytest.mark.parametrize(
    ("operator", "values"), [("In", ()), ("NotIn", ()), ("Exists", ("x",)), ("DoesNotExist", ("x",))]
)
def test_a_selector_expression_with_the_wrong_values_is_refused(operator: Any, values: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="values"):
        Expression(key="k", operator=operator, values=values)


@pytest.mark.parametrize("type_", ["label-selector-filter", "by-label-selector"])
def test_selectors_match_as_kubernetes_does(make: Make, ask: Ask, type_: str) -> None:
    fleet = labelled({"a": "1"}, {"a": "2", "b": "x"}, {"b": "x"}, {})

    def kept(**parameters: Any) -> list[bool]:
        mask: list[bool] = make(type_, **parameters).keep(ask(), fleet.slots(), fleet).tolist()
        return mask

    assert kept() == [True] * 4
    assert kept(match_labels={"a": "2", "b": "x"}) == [False, True, False, False]
    expressions = {
        ("In", ("1", "2")): [True, True, False, False],
        ("NotIn", ("1",)): [False, True, True, True],
        ("Exists", ()): [True, True, False, False],
        ("DoesNotExist", ()): [False, False, True, True],
    }
    for (operator, values), expected in expressions.items():
        expression = Expression(key="a", operator=operator, values=values)  # type: ignore[arg-type]
        assert kept(match_expressions=(expression,)) == expected


def test_a_label_filter_follows_an_endpoint_whose_labels_change(make: Make, ask: Ask) -> None:
    fleet = labelled({"a": "1"})
    plugin = make("label-selector-filter", match_labels={"a": "1"})
    assert plugin.keep(ask(), fleet.slots(), fleet).tolist() == [True]
    fleet.replace(0, Endpoint(name="e0", address="10.0.0.0:8000", labels={"a": "2"}))
    assert plugin.keep(ask(), fleet.slots(), fleet).tolist() == [False]


def test_by_label_takes_values_and_the_unlabelled(make: Make, ask: Ask) -> None:
    fleet = labelled({"a": "1"}, {"a": "2"}, {})
    with pytest.raises(ValueError, match="nothing would pass"):
        make("by-label", label="a")
    one = make("by-label", label="a", valid_values=("1",))
    assert one.keep(ask(), fleet.slots(), fleet).tolist() == [True, False, False]
    none = make("by-label", label="a", allows_no_label=True)
    assert none.keep(ask(), fleet.slots(), fleet).tolist() == [False, False, True]


def test_utilization_needs_every_condition_and_falls_back_only_if_told(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.waiting[:4] = [0, 5, 6, 0]
    fleet.kv_usage[:4] = [0.5, 0.5, 0.5, 0.95]
    conditions = (
        Condition(metric="waiting-queue", max_value=5),
        Condition(metric="kv-cache-utilization", max_value=0.9),
    )
    plugin = make("utilization-filter", conditions=conditions)
    assert plugin.keep(ask(), fleet.slots(), fleet).tolist() == [True, True, False, False]
    assert plugin.keep(ask(), np.array([2, 3]), fleet).tolist() == [False, False]
    falls_back = make("utilization-filter", conditions=conditions, fallback_on_empty=True)
    assert falls_back.keep(ask(), np.array([2, 3]), fleet).tolist() == [True, True]


def test_the_testing_filter_keeps_what_the_header_names_and_nothing_without_it(
    fleet: Fleet, make: Make, ask: Ask
) -> None:
    plugin = make("header-based-testing-filter")
    assert not plugin.keep(ask(), fleet.slots(), fleet).any()
    request = ask(headers={"test-epp-endpoint-selection": "10.0.0.1, 10.0.0.2:8000,10.0.0.3:9"})
    assert plugin.keep(request, fleet.slots(), fleet).tolist() == [False, True, True, False]


def test_an_attribute_scores_over_its_range_and_missing_is_nothing(fleet: Fleet, make: Make, ask: Ask) -> None:
    fixed = LinearAlgorithm(
        type="linear_lower_is_better", normalization=Normalization(fixed_range=FixedRange(min=0, max=1))
    )
    scorer = make("endpoint-attribute-scorer", attribute_key="gpu", algorithm=fixed)
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [0, 0, 0, 0]
    fleet.attribute("gpu")[:3] = [0.25, 0.75, 2]
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [0.75, 0.25, 0, 0]
    adaptive = make(
        "endpoint-attribute-scorer", attribute_key="gpu", algorithm=LinearAlgorithm(type="linear_higher_is_better")
    )
    assert adaptive.score(ask(), np.array([0, 1]), fleet).tolist() == [0, 1]
    assert adaptive.score(ask(), np.array([1, 3]), fleet).tolist() == [1, 0]
    fleet.attribute("gpu")[:4] = [0.25, np.inf, 0.75, -np.inf]
    assert adaptive.score(ask(), fleet.slots(), fleet).tolist() == [0, 1, 1, 0]
    assert adaptive.score(ask(), np.array([1, 3]), fleet).tolist() == [1, 1]
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [0.75, 0, 0.25, 1]


def test_an_attribute_filter_compares_and_says_what_missing_means(fleet: Fleet, make: Make, ask: Ask) -> None:
    fleet.attribute("gpu")[:3] = [0.5, 0.9, 0.95]

    def plugin(**parameters: Any) -> Any:
        algorithm = ThresholdAlgorithm(threshold=Threshold(operator="LessThanOrEqual", value=0.9))
        return make("endpoint-attribute-filter", attribute="gpu", algorithm=algorithm, **parameters)

    assert plugin().keep(ask(), fleet.slots(), fleet).tolist() == [True, True, False, True]
    assert plugin(on_missing="Fail").keep(ask(), fleet.slots(), fleet).tolist() == [True, True, False, False]
    assert plugin(on_missing="Fail").keep(ask(), np.array([2, 3]), fleet).tolist() == [False, False]
    fallback = plugin(on_missing="Fail", fallback_on_empty=True)
    assert fallback.keep(ask(), np.array([2, 3]), fleet).tolist() == [True, True]


def test_mistakes_in_attribute_parameters_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="contains '/'"):
        make("endpoint-attribute-scorer", attribute_key="a/b", algorithm=LinearAlgorithm(type="linear_lower_is_better"))
    with pytest.raises(ValueError, match="larger than min"):
        FixedRange(min=1, max=1)


def test_a_header_may_ask_for_a_label(make: Make, ask: Ask) -> None:
    fleet = labelled({"tier": "gold"}, {"tier": "iron"}, {})
    scorer = make("header-label-affinity-scorer", header_name="X-Tier", label_key="tier")
    assert scorer.score(ask(), fleet.slots(), fleet).tolist() == [0, 0, 0]
    assert scorer.score(ask(headers={"x-tier": "gold"}), fleet.slots(), fleet).tolist() == [1, 0, 0]
