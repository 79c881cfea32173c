import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.pending import PendingPrompts
from fleet.request import Match


def chain(letters: str) -> list[int]:
    """Chained keys: every key stands for everything before it."""
    return [hash(letters[: end + 1]) for end in range(len(letters))]


def test_nothing_on_its_way_matches_nothing() -> None:
    assert PendingPrompts().leading(chain("abc"), 4).tolist() == [0, 0, 0, 0]


def test_a_slot_counts_the_longest_of_its_prompts() -> None:
    pending = PendingPrompts()
    pending.add(1, chain("abx"))
    pending.add(1, chain("abcy"))
    pending.add(2, chain("a"))
    assert pending.leading(chain("abcd"), 4).tolist() == [0, 3, 1, 0]


def test_equal_prompts_are_counted_and_the_second_survives_removal_of_the_first() -> None:
    pending = PendingPrompts()
    pending.add(0, chain("abc"))
    pending.add(0, chain("abc"))
    pending.remove(0, chain("abc"))
    assert pending.leading(chain("abc"), 1).tolist() == [3]
    pending.remove(0, chain("abc"))
    assert pending.leading(chain("abc"), 1).tolist() == [0]
    assert len(pending) == 0


def test_a_prompt_without_full_blocks_is_harmless() -> None:
    pending = PendingPrompts()
    pending.add(0, [])
    assert pending.leading([], 1).tolist() == [0]
    pending.remove(0, [])
    assert len(pending) == 0


prompts = st.text("ab", max_size=7)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), prompts), max_size=25), prompts, st.randoms(use_true_random=False))
def test_it_answers_as_a_plain_multiset_of_keys_does(
    sent: list[tuple[int, str]], prompt: str, rng: random.Random
) -> None:
    pending = PendingPrompts()
    model: list[tuple[int, str]] = []
    for slot, text in sent:
        if model and rng.random() < 0.4:
            gone = model.pop(rng.randrange(len(model)))
            pending.remove(gone[0], chain(gone[1]))
        pending.add(slot, chain(text))
        model.append((slot, text))
        expected = [0] * 4
        for holder, other in model:
            agreed = 0
            while agreed < min(len(other), len(prompt)) and other[agreed] == prompt[agreed]:
                agreed += 1
            expected[holder] = max(expected[holder], agreed)
        assert pending.leading(chain(prompt), 4).tolist() == expected
    for slot, text in model:
        pending.remove(slot, chain(text))
    assert not pending._root.children


def test_the_same_question_is_answered_anew_when_something_changed() -> None:
    pending, keys = PendingPrompts(), [1, 2, 3]
    assert pending.leading(keys, 2).tolist() == [0, 0]
    pending.add(1, [1, 2])
    assert pending.leading(keys, 2).tolist() == [0, 2]
    assert pending.leading(keys, 4).tolist() == [0, 2, 0, 0]
    pending.remove(1, [1, 2])
    assert pending.leading(keys, 4).tolist() == [0, 0, 0, 0]


def test_held_tokens_are_matched_or_on_their_way_whichever_is_more_and_follow_every_change() -> None:
    pending, keys = PendingPrompts(), chain("abc")
    matched = np.array([16.0, 48.0, 0.0])
    match = Match(tokens=matched, weighted_tokens=matched, total_tokens=48, block_tokens=16, keys=keys)
    for slot in (0, 1, 2):
        pending.add(slot, chain("abx"))
    assert pending.held(match, 3).tolist() == [32, 48, 32]
    assert pending.held(match, 4).tolist() == [32, 48, 32, 0], "the fourth slot was added after the match was made"
    pending.remove(0, chain("abx"))
    assert pending.held(match, 4).tolist() == [16, 48, 32, 0]
    pending.add(3, keys)
    assert pending.held(match, 4).tolist() == [16, 48, 32, 48]
    fewer = Match(tokens=matched / 2, weighted_tokens=matched, total_tokens=48, block_tokens=16, keys=keys)
    assert pending.held(fewer, 4).tolist() == [8, 32, 32, 48], "another match of the same prompt"
    assert matched.tolist() == [16, 48, 0], "the match itself is not written to"
