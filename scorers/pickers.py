"""Pickers: from total scores to the destination and its fallbacks."""

import random
from typing import Annotated

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Slots, Vector
from fleet.plugin import Picker
from fleet.request import Request


class PickerParameters(plugin.Parameters, frozen=True, kw_only=True):
    max_num_of_endpoints: Annotated[int, Meta(description="Endpoints to pick, best first; 0 or less means 1.")] = 1
    seed: Annotated[int | None, Meta(description="For repeatable choices, in tests and simulations.")] = None


class _RandomPicker(Picker):
    parameters: PickerParameters

    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self.rng = np.random.default_rng(self.parameters.seed)
        self.ties = random.Random(self.parameters.seed)  # one number from NumPy's costs as much as a scorer
        self.most = max(self.parameters.max_num_of_endpoints, 1)

    def best(self, candidates: Slots, keys: Vector) -> Slots:
        """The candidates with the largest keys, in that order; equal keys in random order."""
        if self.most == 1:
            one = int(keys.argmax())
            equal = (keys == keys[one]).nonzero()[0]
            if len(equal) > 1:
                one = equal.item(int(self.ties.random() * len(equal)))
            return candidates[one : one + 1]
        order = np.lexsort((self.rng.random(len(keys)), -keys))
        return candidates[order[: self.most]]


class MaxScorePicker(_RandomPicker, type="max-score-picker"):
    """Pick the endpoints with the highest total score; among equal ones a random one.

    The default. Exact scores make it deterministic up to ties.
    Source: llm-d-router max-score-picker.
    """

    parameters: PickerParameters
    Parameters = PickerParameters

    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        return self.best(candidates, scores)


class WeightedRandomPicker(_RandomPicker, type="weighted-random-picker"):
    """Pick at random, an endpoint with twice the score twice as often.

    Use it with several router replicas that do not share their books: they then do not all make the same choice. The score
    decides how often, so it needs a load scorer whose values differ.
    Each candidate draws u^(1/score) and the largest draws win; a score of 0 never wins against a positive one. Uniform
    where no score is positive.
    Source: llm-d-router weighted-random-picker (A-Res sampling).
    """

    parameters: PickerParameters
    Parameters = PickerParameters

    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        positive = scores > 0
        if not positive.any():
            return self.best(candidates, self.rng.random(len(candidates)))
        # log(u) / score orders as u^(1/score) does and does not vanish for small scores.
        draws = np.log(1.0 - self.rng.random(len(candidates))) / np.where(positive, scores, 1.0)
        return self.best(candidates, np.where(positive, draws, -np.inf))


class RandomPicker(_RandomPicker, type="random-picker"):
    """Pick at random, whatever the scores.

    The baseline to compare with.
    Source: llm-d-router random-picker.
    """

    parameters: PickerParameters
    Parameters = PickerParameters

    def pick(self, request: Request, candidates: Slots, scores: Vector, fleet: Fleet) -> Slots:
        return self.best(candidates, self.rng.random(len(candidates)))
