"""Any scraped number of an endpoint as a score or as a condition."""

import operator
from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.plugin import Filter, Scorer
from fleet.request import Request

COMPARISONS: dict[str, Callable[[Vector, float], Any]] = {
    "LessThan": operator.lt,
    "LessThanOrEqual": operator.le,
    "GreaterThan": operator.gt,
    "GreaterThanOrEqual": operator.ge,
    "Equal": operator.eq,
    "NotEqual": operator.ne,
}


def _check(key: str, name: str, producer: str | None) -> None:
    if not key:
        raise ValueError(f"{name} is required: the attributeKey of a metric in core-metrics-extractor.customMetrics")
    if "/" in key and producer is None:
        raise ValueError(f"{name}: {key!r} contains '/'; write producer and the bare key as two parameters")


class FixedRange(plugin.Parameters, frozen=True, kw_only=True):
    min: float
    max: float

    def __post_init__(self) -> None:
        if self.max <= self.min:
            raise ValueError(f"fixedRange: max ({self.max:g}) must be larger than min ({self.min:g})")


class AdaptiveRange(plugin.Parameters, frozen=True, kw_only=True):
    """The smallest and the largest among the candidates."""


class Normalization(plugin.Parameters, frozen=True, kw_only=True):
    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None

    def __post_init__(self) -> None:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("normalization: fixedRange and adaptiveRange exclude each other")


class LinearAlgorithm(plugin.Parameters, frozen=True, kw_only=True):
    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = Normalization()


class EndpointAttributeScorer(Scorer, type="endpoint-attribute-scorer"):
    """Prefer endpoints by any scraped number, such as GPU utilization.

    Reads: the attribute `attributeKey`, which a `core-metrics-extractor` (customMetrics) or another extractor collects.
    Score: linear from one end of the range to the other, clamped; a missing attribute scores 0. In an adaptive range equal
    values all score 1.
    Source: llm-d-router endpoint-attribute-scorer.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        attribute_key: Annotated[str, Meta(description="The attribute's key.")]
        algorithm: Annotated[LinearAlgorithm, Meta(description="Which way is better, over which range.")]
        producer: Annotated[
            str | None, Meta(description="Who collects it; keys are unique here, so it is not needed.")
        ] = None

        def __post_init__(self) -> None:
            _check(self.attribute_key, "attributeKey", self.producer)

    parameters: Parameters

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        values = fleet.attribute(self.parameters.attribute_key)[candidates]
        known = ~np.isnan(values)
        if not known.any():
            return np.zeros(len(candidates))
        fixed, finite = self.parameters.algorithm.normalization.fixed_range, values[np.isfinite(values)]
        if not fixed and not len(finite):
            return known.astype(float)
        low, high = (fixed.min, fixed.max) if fixed else (float(finite.min()), float(finite.max()))
        if high == low:
            return known.astype(float)
        share = np.clip((values - low) / (high - low), 0.0, 1.0)
        if self.parameters.algorithm.type == "linear_lower_is_better":
            share = 1.0 - share
        return np.where(known, share, 0.0)


class Threshold(plugin.Parameters, frozen=True, kw_only=True):
    operator: Literal["LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Equal", "NotEqual"]
    value: float


class ThresholdAlgorithm(plugin.Parameters, frozen=True, kw_only=True):
    threshold: Threshold
    type: Literal["threshold"] = "threshold"


class EndpointAttributeFilter(Filter, type="endpoint-attribute-filter"):
    """Keep endpoints for which a comparison with any scraped number holds.

    Reads: the attribute `attribute`; an endpoint without it is kept or not as `onMissing` says.
    Source: llm-d-router endpoint-attribute-filter.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        attribute: Annotated[str, Meta(description="The attribute's key.")]
        algorithm: Annotated[ThresholdAlgorithm, Meta(description="The comparison.")]
        producer: Annotated[
            str | None, Meta(description="Who collects it; keys are unique here, so it is not needed.")
        ] = None
        on_missing: Annotated[Literal["Pass", "Fail"], Meta(description="What becomes of an endpoint without it.")] = (
            "Pass"
        )
        fallback_on_empty: Annotated[bool, Meta(description="Keep all where none would be left.")] = False

        def __post_init__(self) -> None:
            _check(self.attribute, "attribute", self.producer)

    parameters: Parameters

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        values = fleet.attribute(self.parameters.attribute)[candidates]
        threshold = self.parameters.algorithm.threshold
        holds = COMPARISONS[threshold.operator](values, threshold.value)
        mask: Mask = np.where(np.isnan(values), self.parameters.on_missing == "Pass", holds)
        if self.parameters.fallback_on_empty and not mask.any():
            return np.ones(len(candidates), np.bool_)
        return mask
