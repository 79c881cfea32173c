"""Rules over time, without a clock."""

from collections.abc import Sequence

import pytest

from gateway.self_watch import ALARMS, Change, SelfWatch, Stream, Window

BLOCK = 16


def streams(events: int = 0, keys: int = 5, where: str = "a/0", role: str = "decode") -> list[Stream]:
    return [Stream(where=where, role=role, events=events, keys=keys)]


def send(watch: SelfWatch, count: int, start: float, *, best: int = 0, chosen: int = 0, where: str = "a/0",
         role: str = "decode", prompt: int = 100) -> None:  # fmt: skip
    for number in range(count):
        watch.routed(where, role, prompt, best, chosen, BLOCK, start + 0.01 * number)


def report(watch: SelfWatch, count: int, start: float, predicted: int, cached: int, prompt: int = 200) -> None:
    for number in range(count):
        watch.reported("a/0", "decode", prompt, predicted, cached, BLOCK, start + 0.01 * number)


def on(changes: Sequence[Change]) -> set[tuple[str, str]]:
    return {(change.alarm, change.where) for change in changes if change.on}


# --- no events


def test_prompts_that_are_computed_and_never_announced_raise_an_alarm() -> None:
    watch = SelfWatch()
    watch.look(streams(), (), 0.0)
    send(watch, 10, 1.0)
    assert on(watch.look(streams(), (), 5.0)) == set(), "events need a moment"
    changes = watch.look(streams(), (), 15.0)
    assert on(changes) == {("no_events", "a/0")}
    assert changes[0].detail == "10 prompts with new blocks and no event in 120 s"
    assert watch.look(streams(), (), 16.0) == [], "said once"


def test_an_event_ends_the_alarm() -> None:
    watch = SelfWatch()
    watch.look(streams(), (), 0.0)
    send(watch, 10, 1.0)
    watch.look(streams(), (), 15.0)
    assert watch.look(streams(events=1), (), 16.0) == [Change(alarm="no_events", where="a/0", on=False)]


def test_what_was_heard_before_the_first_look_counts() -> None:
    watch = SelfWatch()
    send(watch, 20, 0.1)
    for now in range(1, 40):
        assert watch.look(streams(events=20), (), float(now)) == []


def test_a_stream_that_begins_anew_counts_from_nothing() -> None:
    watch = SelfWatch()
    watch.look(streams(events=500), (), 0.0)
    watch.look(streams(events=2), (), 130.0)
    assert watch.events_per_s("a/0") == 2 / 120


def test_silence_without_requests_is_no_alarm() -> None:
    watch = SelfWatch()
    for now in range(0, 600, 10):
        assert watch.look(streams(), (), float(now)) == []


def test_prompts_that_are_all_cached_need_no_events() -> None:
    watch = SelfWatch()
    watch.look(streams(), (), 0.0)
    send(watch, 50, 1.0, best=96, chosen=96)
    assert watch.look(streams(), (), 30.0) == []


def test_a_few_requests_are_no_alarm() -> None:
    watch = SelfWatch()
    watch.look(streams(), (), 0.0)
    send(watch, 9, 1.0)
    assert watch.look(streams(), (), 30.0) == []


def test_an_alarm_ends_with_its_window() -> None:
    watch = SelfWatch()
    watch.look(streams(), (), 0.0)
    send(watch, 10, 1.0)
    assert on(watch.look(streams(), (), 15.0))
    assert watch.look(streams(), (), 130.0) == [Change(alarm="no_events", where="a/0", on=False)]


def test_an_endpoint_that_leaves_takes_its_alarms_along() -> None:
    watch = SelfWatch()
    watch.look(streams(), (), 0.0)
    send(watch, 10, 1.0)
    watch.look(streams(), (), 15.0)
    assert [change.on for change in watch.look([], (), 16.0)] == [False]


# --- no match


def test_no_match_for_any_prompt_of_a_role_raises_an_alarm() -> None:
    watch = SelfWatch()
    send(watch, 30, 1.0)
    assert on(watch.look(streams(events=1), (), 5.0)) == {("no_match", "decode")}


def test_one_match_is_enough() -> None:
    watch = SelfWatch()
    send(watch, 29, 1.0)
    send(watch, 1, 2.0, best=16)
    assert watch.look(streams(events=1), (), 5.0) == []


def test_prompts_that_share_nothing_are_no_alarm_where_engines_say_so() -> None:
    watch = SelfWatch()
    send(watch, 100, 1.0)
    report(watch, 100, 2.0, 0, 0)
    assert watch.look(streams(events=1), (), 5.0) == []


def test_prompts_shorter_than_two_blocks_say_nothing() -> None:
    watch = SelfWatch()
    send(watch, 100, 1.0, prompt=30)
    assert ("no_match", "decode") not in on(watch.look(streams(events=1), (), 5.0))


# --- predictions


def test_predictions_that_disagree_with_reports_raise_an_alarm() -> None:
    watch = SelfWatch()
    report(watch, 5, 1.0, 96, 96)
    report(watch, 5, 2.0, 96, 0)
    changes = watch.look(streams(), (), 3.0)
    assert on(changes) == {("cached_disagrees", "a/0")}
    assert changes[0].detail == "5 of 10 reports in 120 s disagree; last: predicted 96, reported 0 of 200"


@pytest.mark.parametrize(("predicted", "cached"), [(96, 96), (96, 80), (80, 96), (0, 16)])
def test_a_block_more_or_less_agrees(predicted: int, cached: int) -> None:
    watch = SelfWatch()
    report(watch, 50, 1.0, predicted, cached)
    assert watch.look(streams(), (), 3.0) == []


# --- roles


def test_a_role_without_keys_beside_one_that_has_some_raises_an_alarm() -> None:
    watch = SelfWatch()
    fleet = [*streams(3, 40, "p/0", "prefill"), *streams(0, 0, "d/0", "decode")]
    watch.look(fleet, (), 0.0)
    send(watch, 10, 1.0, where="d/0", role="decode", best=32, chosen=0)
    changes = watch.look(fleet, (), 15.0)
    assert ("role_keys_missing", "decode") in on(changes)
    assert next(c for c in changes if c.alarm == "role_keys_missing").detail.endswith("0 keys; prefill 40")


def test_a_role_whose_engines_were_started_again_holds_nothing_yet_and_that_is_no_alarm_until_it_stays_so() -> None:
    watch = SelfWatch()
    before = [*streams(3, 40, "p/0", "prefill"), *streams(5, 30, "d/0", "decode")]
    after = [*streams(3, 40, "p/0", "prefill"), *streams(5, 0, "d/0", "decode")]
    send(watch, 50, 1.0, where="d/0", role="decode", best=32, chosen=0)
    watch.look(before, (), 20.0)
    assert ("role_keys_missing", "decode") not in on(watch.look(after, (), 21.0))
    assert ("role_keys_missing", "decode") not in on(watch.look(after, (), 60.0))
    send(watch, 10, 61.0, where="d/0", role="decode", best=32, chosen=0)
    assert ("role_keys_missing", "decode") in on(watch.look(after, (), 75.0))


def test_a_role_that_is_not_used_needs_no_keys() -> None:
    watch = SelfWatch()
    fleet = [*streams(3, 40, "p/0", "prefill"), *streams(0, 0, "d/0", "decode")]
    watch.look(fleet, (), 0.0)
    assert watch.look(fleet, (), 15.0) == []


# --- threads


def test_a_dead_thread_raises_an_alarm() -> None:
    assert on(SelfWatch().look([], ["kv-events"], 1.0)) == {("thread_died", "kv-events")}


# --- parts


def test_a_window_forgets() -> None:
    window = Window(10.0)
    for now in range(20):
        window.add(1, float(now))
    assert window.total == 11
    assert window.before(15.0) == 6
    window.forget(100.0)
    assert window.total == 0


def test_the_rate_of_a_stream_is_over_the_window() -> None:
    watch = SelfWatch()
    watch.look(streams(0), (), 0.0)
    watch.look(streams(60), (), 1.0)
    assert watch.events_per_s("a/0") == 0.5
    assert watch.events_per_s("nobody") == 0.0


def test_alarm_names_are_fixed() -> None:
    assert ALARMS == ("no_events", "no_match", "cached_disagrees", "role_keys_missing", "thread_died")
