"""When an engine is asked, from which batch on, and how often in vain."""

import pytest

from event_ingest.effects import AskReplay
from event_ingest.limits import Limits
from event_ingest.questions import Questions

LIMITS = Limits(answer_timeout_s=2.0, questions=3, confirm_above=2, probe_idle_s=30.0, probe_again_s=1.0, probe_back=4)


def quiet_since(now: float, *, can_replay: bool = True) -> Questions:
    questions = Questions(LIMITS, can_replay=can_replay)
    questions.heard_at = now
    return questions


@pytest.mark.parametrize(("next_seq", "start", "known"), [(None, 0, False), (0, 0, False), (1, 0, True), (9, 8, True)])
def test_a_question_begins_at_the_last_batch_applied(next_seq: int | None, start: int, known: bool) -> None:
    questions = quiet_since(0.0)
    assert questions.ask(next_seq, 5.0) == AskReplay(start)
    assert questions.open is not None
    assert (questions.open.known, questions.open.deadline) == (known, 7.0)


def test_an_engine_that_cannot_be_asked_is_not() -> None:
    assert quiet_since(0.0, can_replay=False).due(9, 1000.0) is None


def test_a_quiet_stream_is_asked_from_further_back_once_per_silence() -> None:
    questions = quiet_since(0.0)
    assert questions.due(9, 29.9) is None
    assert questions.due(9, 30.0) == AskReplay(4)
    questions.close()
    assert questions.due(9, 59.9) is None


def test_probes_for_responses_are_a_second_apart_and_none_is_forgotten() -> None:
    questions = quiet_since(0.0)
    questions.wanted = True
    assert questions.probe(9, 1.0) == AskReplay(4)
    questions.wanted = True
    assert questions.probe(9, 2.5) is None, "one is open"
    questions.close()
    assert questions.probe(9, 1.9) is None, "too early"
    assert questions.due(9, 2.0) == AskReplay(4)
    assert not questions.wanted


def test_what_nobody_answers_is_asked_for_from_the_beginning_and_ever_more_rarely() -> None:
    questions = quiet_since(0.0)
    now = 0.0
    questions.repair_later(now)
    waits = []
    for _ in range(7):
        began = now
        while (asked := questions.due(9, now)) is None:
            now += 1.0
            questions.heard_at = now  # it speaks all the time, so nothing but the repair is due
        assert asked == AskReplay(0)
        waits.append(now - began)
        questions.close()
        questions.repair_still_later(now)
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]


def test_answers_that_get_us_further_take_failures_back_and_long_ones_are_confirmed() -> None:
    questions = quiet_since(0.0)
    questions.failures = 2
    assert questions.worth_another()
    questions.failures = 3
    assert not questions.worth_another()
    questions.ask(5, 0.0)
    question = questions.open
    assert question is not None
    for seq in (4, 5):
        questions.answered(question, seq, 1.0)
    question.progress = True
    assert (question.deadline, question.has_less_than_we()) == (3.0, False)
    assert not questions.worth_confirming(question)
    questions.answered(question, 6, 1.5)
    assert questions.worth_confirming(question)
    assert questions.close() is question
    assert questions.failures == 0


def test_an_answer_that_ends_before_the_last_batch_applied_comes_from_another_process() -> None:
    questions = quiet_since(0.0)
    questions.ask(5, 0.0)
    question = questions.open
    assert question is not None
    questions.answered(question, 3, 1.0)
    assert question.has_less_than_we()
