"""What speaks against a picture, and what ends it."""

from event_ingest.doubts import Doubts
from indexer.trust import Reason


def claims(doubts: Doubts) -> tuple[str, Reason]:
    state, reason, _ = doubts.claim()
    return state, reason


def test_a_loss_ends_with_a_clear_after_it_and_with_none_before() -> None:
    doubts = Doubts()
    doubts.lost("3 batches", 7)
    doubts.cleared(6)
    assert claims(doubts) == ("degraded", Reason.LOST_BATCHES)
    doubts.cleared(7)
    assert claims(doubts) == ("exact", Reason.NONE)


def test_an_event_that_could_not_be_used_does_not_hide_a_loss_and_prolongs_it() -> None:
    doubts = Doubts()
    doubts.lost("3 batches", 7)
    doubts.unused(Reason.SKIPPED_EVENTS, "bad_event", 9)
    doubts.cannot_ask("joined at batch 12")
    assert claims(doubts) == ("degraded", Reason.LOST_BATCHES)
    doubts.cleared(8)
    assert doubts.has_fault
    doubts.cleared(9)
    assert not doubts.has_fault


def test_a_later_loss_is_the_one_that_is_named() -> None:
    doubts = Doubts()
    doubts.unused(Reason.SKIPPED_EVENTS, "bad_event", 3)
    doubts.lost("2 batches", 5)
    assert claims(doubts) == ("degraded", Reason.LOST_BATCHES)


def test_a_doubt_is_named_where_there_is_no_fault_and_survives_forgiveness() -> None:
    doubts = Doubts()
    doubts.doubted = True
    doubts.cannot_ask("joined at batch 2")
    assert claims(doubts) == ("degraded", Reason.NO_REPLAY)
    doubts.forgive()
    assert claims(doubts) == ("degraded", Reason.CATCHING_UP)
    doubts.cleared(100)
    assert claims(doubts) == ("degraded", Reason.CATCHING_UP)
