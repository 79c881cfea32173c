"""Keep endpoints by their labels."""

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Filter
from fleet.request import Request


class Expression(plugin.Parameters, frozen=True, kw_only=True):
    key: Annotated[str, Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        takes = self.operator in ("In", "NotIn")
        if takes != bool(self.values):
            raise ValueError(f"{self.operator} {'needs values' if takes else 'takes no values'} (key {self.key!r})")

    def holds(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":  # as Kubernetes has it: a label that is not there is not in
            return value not in self.values
        return (value is not None) == (self.operator == "Exists")


class SelectorParameters(plugin.Parameters, frozen=True, kw_only=True):
    match_labels: Annotated[dict[str, str], Meta(description="Labels that must have these values.")] = msgspec.field(
        default_factory=dict
    )
    match_expressions: Annotated[
        tuple[Expression, ...], Meta(description="Conditions: key, operator In, NotIn, Exists or DoesNotExist, values.")
    ] = ()


class _SelectorFilter(Filter):
    parameters: SelectorParameters

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        return fleet.mask_of(self, lambda endpoint: self._holds(endpoint.labels))[candidates]

    def _holds(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.parameters.match_labels.items()) and all(
            expression.holds(labels) for expression in self.parameters.match_expressions
        )


class LabelSelectorFilter(_SelectorFilter, type="label-selector-filter"):
    """Keep endpoints whose labels match a Kubernetes label selector; an empty selector matches all.

    Source: llm-d-router label-selector-filter.
    """

    parameters: SelectorParameters
    Parameters = SelectorParameters


class ByLabelSelector(_SelectorFilter, type="by-label-selector"):
    """The older name of `label-selector-filter`.

    Source: llm-d-router by-label-selector.
    """

    deprecated = "use label-selector-filter, same parameters"
    parameters: SelectorParameters
    Parameters = SelectorParameters


class ByLabel(Filter, type="by-label"):
    """Keep endpoints whose label has one of the given values.

    Source: llm-d-router by-label.
    """

    deprecated = "use label-selector-filter with matchExpressions"

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        label: Annotated[str, Meta(min_length=1, description="The label.")]
        valid_values: Annotated[tuple[str, ...], Meta(description="Values to keep.")] = ()
        allows_no_label: Annotated[bool, Meta(description="Keep endpoints without the label too.")] = False

        def __post_init__(self) -> None:
            if not self.valid_values and not self.allows_no_label:
                raise ValueError("nothing would pass: give validValues or allowsNoLabel: true")

    parameters: Parameters

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        label, values = self.parameters.label, self.parameters.valid_values

        def passes(labels: Mapping[str, str]) -> bool:
            return labels[label] in values if label in labels else self.parameters.allows_no_label

        return fleet.mask_of(self, lambda endpoint: passes(endpoint.labels))[candidates]
