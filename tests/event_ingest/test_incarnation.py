"""What tells one process of an engine from the next, and what leaves in order."""

import pytest

from event_ingest.incarnation import Incarnation
from event_ingest.limits import Limits


def heard(*sequences: int, can_replay: bool = True, remembered: int = 10) -> Incarnation:
    """A process whose batches arrived live and were applied; batch n has the time 1000 + n."""
    incarnation = Incarnation(Limits(waiting=3, remembered=remembered), can_replay=can_replay)
    for seq in sequences:
        incarnation.heard(seq, 1000.0 + seq)
        incarnation.apply(seq, 1000.0 + seq)
    return incarnation


@pytest.mark.parametrize(
    ("seq", "ts", "another"),
    [
        (2, 5000.0, True),  # the number is known, with another time
        (2, 1002.0, False),  # it comes twice
        (4, 1004.0, False),  # the next one
        (9, 5000.0, False),  # a gap, or another process: only an answer can tell
        (2, None, False),  # unreadable
    ],
)
def test_a_known_number_is_told_by_its_time(seq: int, ts: float | None, another: bool) -> None:
    assert heard(0, 1, 2, 3).is_another(seq, ts) is another


def test_a_number_that_is_no_longer_remembered_falls_back() -> None:
    incarnation = heard(*range(6), remembered=2)
    assert incarnation.is_another(1, 1001.0)
    assert not incarnation.is_another(4, 1004.0)


def test_a_batch_that_waits_is_known_by_its_time_too() -> None:
    incarnation = heard(0)
    incarnation.heard(5, 1005.0)
    incarnation.wait(5, 1005.0, None)
    assert incarnation.is_another(5, 5000.0)
    assert incarnation.is_another(3, 5000.0), "later than batch 5 by its time, and before it by its number"
    assert not incarnation.is_another(3, 1003.0)


@pytest.mark.parametrize("can_replay", [True, False])
def test_without_any_time_the_number_alone_decides_unless_batches_are_repeated(can_replay: bool) -> None:
    incarnation = Incarnation(Limits(), can_replay=can_replay)
    for seq in (0, 1, 2):
        incarnation.heard(seq, None)
        incarnation.apply(seq, None)
    assert incarnation.is_another(0, None) is not can_replay


def test_what_waits_leaves_in_order_once_and_only_when_its_turn_has_come() -> None:
    incarnation = heard(0)
    for seq in (3, 2):
        assert incarnation.wait(seq, None, f"item {seq}") == "waits"
    assert incarnation.wait(3, None, "again") == "duplicate"
    assert incarnation.take_ready() is None
    incarnation.apply(1, None)
    assert [incarnation.take_ready() for _ in range(3)] == [(2, "item 2"), (3, "item 3"), None]
    assert incarnation.next == 4


def test_of_too_many_that_wait_the_newest_is_dropped() -> None:
    incarnation = heard(0)
    for seq in (3, 5, 7):
        incarnation.wait(seq, None, None)
    assert incarnation.wait(9, None, None) == "dropped"
    assert sorted(incarnation.waiting) == [3, 5, 7]
    assert incarnation.wait(4, None, None) == "dropped"
    assert sorted(incarnation.waiting) == [3, 4, 5]
