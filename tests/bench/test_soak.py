"""The soak's judgement: what counts as a leak, and how containers are found."""

from collections import deque
from typing import Any

from bench.soak.__main__ import SIZES, WARM, growing
from bench.soak.inside import Inside


def rounds(*values: int) -> list[dict[str, Any]]:
    sizes = dict.fromkeys((*SIZES, "series"), 100)
    return [{**sizes, "census": {"Thing.parts": value}} for value in (*[0] * WARM, *values)]


def test_what_grows_from_pause_to_pause_is_a_leak() -> None:
    (found,) = growing(rounds(10, 20, 30, 40, 50, 60, 70, 80, 90))
    assert found == "Thing.parts grows: [10, 20, 30, 40, 50, 60, 70, 80, 90]"


def test_what_goes_up_and_down_or_hardly_grows_is_none() -> None:
    assert not growing(rounds(90, 10, 80, 20, 90, 30, 95, 40, 99))
    assert not growing(rounds(500, 501, 500, 502, 503, 503, 504, 504, 504))
    assert not growing(rounds())


class Chained:
    def __init__(self) -> None:
        self.waiting = deque(range(5))
        self.by_name = {"a": [1, 2, 3], "b": [4]}
        self.then = lambda: self.waiting


class Slotted:
    __slots__ = ("held", "never_set")

    def __init__(self, other: Chained) -> None:
        self.held = [other, other]


def test_containers_are_counted_once_by_who_owns_them() -> None:
    counts = Inside(Slotted(Chained())).census()
    del counts["objects"]
    assert counts == {
        "Slotted.held": 2,
        "Chained.waiting": 5,
        "Chained.by_name": 2,
        "Chained.by_name[]": 4,
    }
