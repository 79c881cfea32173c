"""What a stream's state lets its endpoint's match count."""

import pytest

from indexer.trust import Reason, Trust, blind, degraded, exact


@pytest.mark.parametrize(
    ("state", "reason"), [("exact", Reason.LOST_BATCHES), ("degraded", Reason.NONE), ("blind", Reason.NONE)]
)
def test_every_state_but_exact_has_a_reason(state: str, reason: Reason) -> None:
    with pytest.raises(ValueError, match="exact has none, all others have one"):
        Trust(state, reason)  # type: ignore[arg-type]


def test_a_blind_stream_counts_nothing_and_a_degraded_one_less_than_an_exact_one() -> None:
    assert blind(Reason.NO_EVENTS, 1.0).weight == 0.0
    assert 0.0 < degraded(Reason.LOST_BATCHES, 1.0).weight < 1.0
    assert exact(1.0).weight == 1.0


def test_a_state_reads_as_one_word_with_its_reason() -> None:
    assert str(exact(0.0)) == "exact"
    assert str(degraded(Reason.LOST_BATCHES, 0.0, "lost 12 batches")) == "degraded(lost_batches)"
    assert str(blind(Reason.UNKNOWN_KIND, 0.0)) == "blind(unknown_kind)"
