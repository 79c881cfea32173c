"""The life of one stream: gaps, replays, restarts, silence."""

import pytest

from event_ingest.effects import Apply, AskReplay, DropAll, Effect, Lost, SetTrust
from event_ingest.limits import Limits
from event_ingest.stream import State, Stream
from indexer.trust import Reason

LIMITS = Limits(answer_timeout_s=2.0, questions=3, waiting=5, remembered=100, confirm_above=7, probe_idle_s=10.0)


class Drive:
    """A stream with a clock; engine times are the sequence numbers plus an era per incarnation."""

    def __init__(self, *, can_replay: bool = True, connect: bool = True) -> None:
        self.stream = Stream(can_replay=can_replay, limits=LIMITS)
        self.now = 100.0
        self.log: list[Effect] = []
        self.era = 1000.0
        if connect:
            self.take(self.stream.connected(self.now))

    def take(self, effects: list[Effect]) -> list[Effect]:
        self.log += effects
        return effects

    def live(self, *sequences: int) -> None:
        for seq in sequences:
            self.take(self.stream.live(seq, self.era + seq, f"{self.era:.0f}/{seq}", self.now))

    def replay(self, *sequences: int, end: bool = True) -> None:
        """An answer; a new question closes the socket that it comes from."""
        for seq in sequences:
            effects = self.take(self.stream.replayed(seq, self.era + seq, f"{self.era:.0f}/{seq}", self.now))
            if any(isinstance(effect, AskReplay) for effect in effects):
                return
        if end:
            self.take(self.stream.replay_ended(self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.stream.tick(self.now))

    def synced(self, *sequences: int) -> "Drive":
        self.replay(*sequences)
        self.log.clear()
        return self

    def of(self, kind: type) -> list[Effect]:
        return [effect for effect in self.log if isinstance(effect, kind)]

    @property
    def applied(self) -> list[int]:
        return [effect.seq for effect in self.log if isinstance(effect, Apply)]

    @property
    def asked(self) -> list[int]:
        return [effect.start for effect in self.log if isinstance(effect, AskReplay)]

    @property
    def trust(self) -> str:
        return str(self.stream.trust)


# Without a replay address


def test_without_replay_a_late_join_is_degraded_until_the_cache_is_cleared() -> None:
    drive = Drive(can_replay=False)
    assert drive.trust == "degraded(no_replay)"
    drive.live(7, 8)
    assert drive.applied == [7, 8]
    assert drive.trust == "degraded(no_replay)"
    drive.take(drive.stream.cleared(8, drive.now))
    assert drive.trust == "exact"


def test_without_replay_a_stream_heard_from_its_first_batch_is_exact() -> None:
    drive = Drive(can_replay=False)
    drive.live(0, 1)
    assert (drive.applied, drive.trust) == ([0, 1], "exact")


def test_without_replay_a_gap_distrusts_what_is_held_and_goes_on() -> None:
    drive = Drive(can_replay=False)
    drive.live(0, 3, 4)
    assert drive.applied == [0, 3, 4]
    assert drive.of(Lost) == [Lost("a gap, and no replay address", 2)]
    assert drive.trust == "degraded(lost_batches)"
    assert drive.stream.counters.lost_batches == 2


def test_without_replay_a_reconnect_distrusts_what_is_held() -> None:
    drive = Drive(can_replay=False)
    drive.live(0, 1)
    drive.take(drive.stream.disconnected(drive.now))
    assert drive.trust == "degraded(disconnected)"
    drive.take(drive.stream.connected(drive.now))
    assert len(drive.of(Lost)) == 1
    drive.live(2)
    assert drive.applied == [0, 1, 2]
    assert drive.trust == "degraded(lost_batches)"


def test_a_clear_before_a_loss_does_not_forgive_it() -> None:
    drive = Drive(can_replay=False)
    drive.live(0, 1, 5)
    drive.take(drive.stream.cleared(1, drive.now))
    assert drive.trust == "degraded(lost_batches)"
    drive.take(drive.stream.cleared(5, drive.now))
    assert drive.trust == "exact"


# The first connection


def test_before_anything_is_heard_the_stream_is_blind() -> None:
    drive = Drive(connect=False)
    assert drive.trust == "blind(no_events)"


def test_the_first_connection_asks_for_the_whole_buffer() -> None:
    drive = Drive()
    assert (drive.asked, drive.trust) == ([0], "blind(syncing)")
    drive.replay(0, 1, 2)
    assert (drive.applied, drive.trust) == ([0, 1, 2], "exact")
    assert drive.stream.state is State.LIVE


def test_an_engine_that_has_published_nothing_is_exact_and_empty() -> None:
    drive = Drive()
    drive.replay()
    assert drive.trust == "exact"
    drive.live(0)
    assert (drive.applied, drive.trust) == ([0], "exact")


def test_a_buffer_that_does_not_reach_the_beginning_is_named() -> None:
    drive = Drive()
    drive.replay(3, 4, 5)
    assert drive.applied == [3, 4, 5]
    assert drive.trust == "degraded(lost_batches)"
    assert drive.stream.trust.detail == "the engine's buffer begins at batch 3"
    assert drive.of(Lost) == []


def test_live_batches_from_before_the_beginning_of_the_first_answer_are_dropped_and_counted() -> None:
    drive = Drive()
    drive.live(2, 3, 4)  # before the answer is written the buffer, of two batches, has moved on
    drive.replay(4, 5)
    assert drive.applied == [4, 5]
    assert (drive.stream.waiting, drive.stream.counters.waiting_dropped) == (0, 2)
    assert drive.stream.state is State.LIVE
    for _ in range(4):
        drive.wait(2.5)
    drive.live(6)
    assert drive.applied == [4, 5, 6]
    assert drive.of(Lost) == []


def test_live_batches_during_the_first_replay_wait_their_turn() -> None:
    drive = Drive()
    drive.live(3, 4)
    assert drive.applied == []
    drive.replay(0, 1, 2, 3)
    assert (drive.applied, drive.trust) == ([0, 1, 2, 3, 4], "exact")


def test_an_engine_that_never_answers_is_degraded_and_its_live_batches_are_used() -> None:
    drive = Drive()
    drive.live(5)
    for _ in range(3):
        drive.wait(2.5)
    assert drive.asked == [0, 0, 0]
    assert drive.applied == [5]
    assert drive.trust == "degraded(no_replay)"


def test_what_nobody_answered_is_rebuilt_when_somebody_does() -> None:
    drive = Drive()
    drive.live(5)
    for _ in range(3):
        drive.wait(2.5)
    drive.live(6)
    drive.wait(10.5)
    assert drive.asked[-1] == 0
    drive.replay(0, 1, 2, 3, 4, 5, 6)
    assert drive.of(DropAll) == [DropAll("rebuilding")]
    assert drive.applied == [5, 6, 0, 1, 2, 3, 4, 5, 6]
    assert drive.trust == "exact"


def test_a_repair_that_nobody_answers_makes_nothing_worse() -> None:
    drive = Drive().synced(0)
    drive.live(3)
    for _ in range(3):
        drive.wait(2.5)
    lost = len(drive.of(Lost))
    for _ in range(60):
        drive.live(drive.stream.next_seq or 0)
        drive.wait(1.0)
    assert len(drive.of(Lost)) == lost == 1


# Gaps


def test_a_gap_is_asked_for_from_the_last_batch_applied() -> None:
    drive = Drive().synced(0, 1, 2)
    drive.live(5)
    assert (drive.asked, drive.trust) == ([2], "degraded(catching_up)")
    drive.replay(2, 3, 4, 5)
    assert (drive.applied, drive.trust) == ([3, 4, 5], "exact")
    assert drive.stream.counters.gaps == 1


def test_an_answer_with_a_hole_is_followed_by_a_question_from_before_the_hole() -> None:
    drive = Drive().synced(0)
    drive.live(6)
    drive.replay(0, 1, 2, 4, 5)
    assert drive.asked == [0, 2]
    drive.replay(2, 3, 4, 5, 6)
    assert (drive.applied, drive.trust) == ([1, 2, 3, 4, 5, 6], "exact")


def test_an_answer_without_end_marker_is_followed_by_another_question() -> None:
    drive = Drive().synced(0)
    drive.live(6)
    drive.replay(0, 1, 2, end=False)
    drive.wait(2.5)
    assert drive.asked == [0, 2]
    drive.replay(2, 3, 4, 5, 6)
    assert (drive.applied, drive.trust) == ([1, 2, 3, 4, 5, 6], "exact")


def test_a_long_answer_is_followed_by_a_confirming_question() -> None:
    drive = Drive()
    drive.replay(*range(8))
    assert drive.asked == [0, 7]
    assert drive.trust == "blind(syncing)"
    drive.replay(7, 8)
    assert (drive.applied, drive.trust) == (list(range(9)), "exact")


def test_a_batch_that_the_engine_itself_does_not_have_is_lost_after_bounded_questions() -> None:
    drive = Drive().synced(0, 1)
    drive.live(4)
    for _ in range(5):
        drive.replay(1, 3, 4)
    assert len(drive.asked) == 3
    assert drive.applied == [3, 4]
    assert drive.of(Lost) == [Lost("missing in the engine's answers", 1)]
    assert drive.trust == "degraded(lost_batches)"


def test_a_gap_older_than_the_buffer_is_lost_even_where_the_numbers_join() -> None:
    drive = Drive().synced(0, 1)
    drive.live(9)
    drive.replay(6, 7, 8, 9)
    assert drive.of(Lost) == [Lost("older than the engine's buffer", 4)]
    assert drive.applied == [6, 7, 8, 9]
    joined = Drive().synced(0, 1)
    joined.live(3)
    joined.replay(2, 3)
    assert joined.of(Lost) == [Lost("older than the engine's buffer", 0)]
    assert joined.trust == "degraded(lost_batches)"


def test_what_waits_is_bounded_and_asked_for_again() -> None:
    drive = Drive().synced(0)
    drive.live(*range(5, 15))
    assert drive.stream.waiting == 5
    assert drive.stream.counters.waiting_dropped == 5
    drive.replay(*range(15))
    assert drive.applied == list(range(1, 15))
    drive.replay(14)
    assert drive.trust == "exact"


def test_any_number_of_gaps_is_given_up_at_once() -> None:
    stream = Stream(can_replay=True, limits=Limits(answer_timeout_s=2.0, questions=1, probe_idle_s=0.0))
    stream.connected(0.0)
    stream.replay_ended(0.0)
    for seq in range(1, 6000, 2):
        stream.live(seq, 1000.0 + seq, None, 0.0)
    assert stream.waiting == 3000
    effects = stream.tick(2.5)
    assert [effect.seq for effect in effects if isinstance(effect, Apply)] == list(range(1, 6000, 2))
    assert stream.counters.lost_batches == stream.counters.gaps == 3000


# Duplicates and reordering


def test_duplicates_are_dropped_and_counted() -> None:
    drive = Drive().synced(0, 1, 2)
    drive.live(2, 1, 3, 3)
    assert drive.applied == [3]
    assert drive.stream.counters.duplicates == 3
    assert drive.of(DropAll) == []


def test_reordered_batches_leave_in_order() -> None:
    drive = Drive().synced(0)
    drive.live(2, 1, 3)
    assert drive.applied == [1, 2, 3]
    drive.replay(0, 1, 2, 3)
    assert drive.trust == "exact"
    assert drive.of(DropAll) == []


def test_an_unreadable_batch_keeps_its_place_in_the_sequence() -> None:
    drive = Drive().synced(0)
    drive.take(drive.stream.live(1, None, "broken", drive.now))
    drive.live(2)
    assert drive.applied == [1, 2]
    assert drive.of(DropAll) == []


# Restarts


def test_a_sequence_that_begins_again_is_another_incarnation() -> None:
    drive = Drive().synced(0, 1, 2)
    drive.era = 5000.0
    drive.live(0, 1)
    assert drive.of(DropAll) == [DropAll("engine_restarted")]
    assert (drive.applied, drive.trust) == ([0, 1], "exact")
    assert drive.stream.counters.restarts == 1


def test_a_restart_whose_first_batches_were_missed_is_replayed_from_the_beginning() -> None:
    drive = Drive().synced(0, 1, 2, 3)
    drive.era = 5000.0
    drive.live(2)
    assert drive.of(DropAll) == [DropAll("engine_restarted")]
    assert (drive.asked, drive.trust) == ([0], "blind(syncing)")
    drive.replay(0, 1, 2)
    assert (drive.applied, drive.trust) == ([0, 1, 2], "exact")


def test_a_restart_that_looks_like_a_gap_is_seen_by_the_time_of_the_last_batch() -> None:
    drive = Drive().synced(0, 1)
    drive.era = 5000.0
    drive.live(4)
    assert drive.asked == [1]
    drive.replay(1, 2, 3, 4)
    assert drive.of(DropAll) == [DropAll("engine_restarted")]
    drive.replay(0, 1, 2, 3, 4)
    assert (drive.applied, drive.trust) == ([0, 1, 2, 3, 4], "exact")


def test_a_restart_while_disconnected_is_seen_on_reconnect() -> None:
    drive = Drive().synced(0, 1)
    drive.take(drive.stream.disconnected(drive.now))
    drive.era = 5000.0
    drive.take(drive.stream.connected(drive.now))
    assert drive.asked == [1]
    drive.replay(1, 2)
    assert drive.of(DropAll) == [DropAll("engine_restarted")]
    drive.replay(0, 1, 2)
    assert (drive.applied, drive.trust) == ([0, 1, 2], "exact")


def test_an_engine_that_has_published_less_than_we_have_seen_is_another() -> None:
    drive = Drive().synced(0, 1, 2)
    drive.take(drive.stream.disconnected(drive.now))
    drive.take(drive.stream.connected(drive.now))
    drive.replay()
    assert drive.of(DropAll) == [DropAll("engine_restarted")]
    drive.replay()
    assert drive.trust == "exact"


def test_a_restart_during_a_replay_starts_over() -> None:
    drive = Drive().synced(0, 1)
    drive.live(5)
    drive.era = 5000.0
    drive.live(0)
    assert drive.of(DropAll) == [DropAll("engine_restarted")]
    assert drive.applied == [0]
    assert drive.stream.waiting == 0


# Silence


def test_a_quiet_stream_is_probed_and_a_lost_last_batch_found() -> None:
    drive = Drive().synced(0, 1)
    drive.wait(11)
    assert (drive.asked, drive.trust) == ([0], "exact")
    drive.replay(1, 2)
    assert (drive.applied, drive.trust) == ([2], "exact")


@pytest.mark.parametrize("seconds", [2.0, 9.0])
def test_a_stream_that_speaks_is_not_probed(seconds: float) -> None:
    drive = Drive().synced(0)
    for seq in range(1, 6):
        drive.wait(seconds)
        drive.live(seq)
    assert drive.asked == []


def test_a_doubt_lasts_until_the_cache_is_cleared_after_it() -> None:
    drive = Drive().synced(0)
    drive.take(drive.stream.doubt(Reason.SKIPPED_EVENTS, "bad_event: x", 3, drive.now))
    assert drive.of(SetTrust) == [SetTrust(drive.stream.trust)]
    drive.take(drive.stream.cleared(2, drive.now))
    assert drive.trust == "degraded(skipped_events)"
    drive.take(drive.stream.cleared(3, drive.now))
    assert drive.trust == "exact"


def test_an_answer_that_begins_behind_the_question_with_a_batch_that_came_live_meanwhile_has_lost_nothing() -> None:
    drive = Drive().synced(0, 1)
    drive.wait(11)  # a probe, from batch 1 on
    drive.live(2, 3)
    drive.replay(2, 3)  # the buffer holds two batches by now
    assert drive.trust == "exact"
    assert drive.of(Lost) == []
    assert drive.stream.counters.lost_batches == 0


def test_an_answer_that_begins_with_an_unreadable_batch_takes_nothing_back() -> None:
    drive = Drive().synced(0, 1)
    drive.wait(11)
    drive.live(2, 3)
    drive.take(drive.stream.replayed(2, None, "unreadable", drive.now))
    assert drive.trust == "degraded(lost_batches)", "nobody can say that it is the same engine"
    assert drive.stream.counters.lost_batches == 0
    assert drive.stream.next_seq == 4


# ------------------------------------------------------------------------------------------------------ broken links


def test_what_is_still_in_the_pipe_of_a_broken_link_does_not_make_it_whole() -> None:
    drive = Drive().synced(0, 1)
    drive.take(drive.stream.disconnected(drive.now))
    drive.live(2)
    assert drive.trust == "degraded(disconnected)"
    drive.take(drive.stream.connected(drive.now))
    drive.replay(1, 2)
    assert (drive.applied, drive.trust) == ([2], "exact")


def test_without_replay_what_is_still_in_the_pipe_of_a_broken_link_is_used_and_the_link_stays_broken() -> None:
    drive = Drive(can_replay=False)
    drive.live(0, 1)
    drive.take(drive.stream.disconnected(drive.now))
    drive.live(2)
    assert (drive.applied, drive.trust) == ([0, 1, 2], "degraded(disconnected)")


def test_another_incarnation_that_joins_by_number_before_the_question_is_asked_is_found_out() -> None:
    drive = Drive().synced(0, 1, 2)
    drive.take(drive.stream.disconnected(drive.now))
    drive.era = 5000.0
    drive.live(3)  # 0 to 2 of the new process were published before our subscription had reached it
    drive.take(drive.stream.connected(drive.now))
    assert drive.asked == [2]
    drive.replay(2)
    assert (drive.of(DropAll), drive.trust) == ([DropAll("engine_restarted")], "blind(syncing)")
    drive.replay(0, 1, 2, 3)
    assert (drive.applied, drive.trust) == ([0, 1, 2, 3], "exact")


@pytest.mark.parametrize("sign", ["silence", "response"])
def test_another_incarnation_that_joined_by_number_on_a_link_that_never_broke_is_found_out_by_a_probe(
    sign: str,
) -> None:
    drive = Drive().synced(0)
    drive.era = 5000.0
    drive.live(1, 2)  # its batch 0 was lost on the way
    assert (drive.applied, drive.trust) == ([1, 2], "exact")
    if sign == "silence":
        drive.wait(11)
    else:
        drive.take(drive.stream.probe(drive.now, stale=True))
    assert drive.asked == [0]
    drive.replay(0, 1, 2)
    assert (drive.of(DropAll), drive.trust) == ([DropAll("engine_restarted")], "blind(syncing)")


def test_a_buffer_that_reaches_back_to_the_last_batch_only_is_enough_for_a_probe() -> None:
    drive = Drive().synced(0, 1, 2, 3)
    drive.wait(11)
    drive.replay(3, 4)
    assert (drive.applied, drive.of(Lost), drive.trust) == ([4], [], "exact")


def test_an_engine_that_has_published_less_than_we_have_seen_is_found_out_by_a_probe() -> None:
    drive = Drive().synced(0, 1, 2, 3)
    drive.wait(11)
    drive.replay(0, 1, 2)
    assert (drive.of(DropAll), drive.trust) == ([DropAll("engine_restarted")], "blind(syncing)")


def test_a_wire_that_repeats_what_passed_meanwhile_is_whole_again_without_a_loss() -> None:
    drive = Drive(can_replay=False)
    drive.live(0, 1)
    drive.take(drive.stream.disconnected(drive.now))
    drive.live(2, 3)
    assert drive.trust == "degraded(disconnected)"
    drive.take(drive.stream.resumed(drive.now))
    assert (drive.applied, drive.of(Lost), drive.trust) == ([0, 1, 2, 3], [], "exact")
