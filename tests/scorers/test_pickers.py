from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleet.fleet import Fleet
from fleet.request import Request

Make = Callable[..., Any]
Ask = Callable[..., Request]
PICKERS = ["max-score-picker", "weighted-random-picker", "random-picker"]


def times(picker: Any, request: Request, fleet: Fleet, scores: list[float], rounds: int = 4000) -> list[float]:
    counts = Counter(int(picker.pick(request, fleet.slots(), np.array(scores), fleet)[0]) for _ in range(rounds))
    return [counts[slot] / rounds for slot in range(len(scores))]


@pytest.mark.parametrize("type_", PICKERS)
def test_a_seed_repeats_the_choices(fleet: Fleet, make: Make, ask: Ask, type_: str) -> None:
    scores = np.array([1.0, 1, 0.5, 1])
    runs = []
    for _ in range(2):
        picker = make(type_, seed=7, max_num_of_endpoints=3)
        runs.append([picker.pick(ask(), fleet.slots(), scores, fleet).tolist() for _ in range(20)])
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs[0]}) > 1


@pytest.mark.parametrize("type_", PICKERS)
@pytest.mark.parametrize(("most", "count"), [(0, 1), (-3, 1), (2, 2), (9, 4)])
def test_as_many_different_endpoints_as_wanted_and_there_are(
    fleet: Fleet, make: Make, ask: Ask, type_: str, most: int, count: int
) -> None:
    picked = make(type_, max_num_of_endpoints=most).pick(ask(), fleet.slots(), np.zeros(4), fleet)
    assert len(set(picked.tolist())) == len(picked) == count


def test_max_score_is_in_order_of_score_and_random_among_equals(fleet: Fleet, make: Make, ask: Ask) -> None:
    picker = make("max-score-picker", max_num_of_endpoints=4, seed=1)
    assert picker.pick(ask(), fleet.slots(), np.array([0.1, 3, 2, 0.5]), fleet).tolist() == [1, 2, 3, 0]
    shares = times(make("max-score-picker", seed=1), ask(), fleet, [1, 1, 0, 1])
    assert shares == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3], abs=0.05)


def test_weighted_random_picks_in_proportion_and_never_zero(fleet: Fleet, make: Make, ask: Ask) -> None:
    shares = times(make("weighted-random-picker", seed=1), ask(), fleet, [1, 2, 0, 1])
    assert shares == pytest.approx([0.25, 0.5, 0, 0.25], abs=0.05)
    even = times(make("weighted-random-picker", seed=1), ask(), fleet, [0, 0, -1, 0])
    assert even == pytest.approx([0.25] * 4, abs=0.05)
    ordered = make("weighted-random-picker", max_num_of_endpoints=4, seed=1)
    assert ordered.pick(ask(), fleet.slots(), np.array([1e-9, 0, 1, 0]), fleet).tolist()[:2] == [2, 0]


def test_random_does_not_look_at_scores(fleet: Fleet, make: Make, ask: Ask) -> None:
    assert times(make("random-picker", seed=1), ask(), fleet, [9, 0, 0, 0]) == pytest.approx([0.25] * 4, abs=0.05)
