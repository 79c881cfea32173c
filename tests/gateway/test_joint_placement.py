"""Joint placement: who goes together, where the cap and the balance send them, against a model that tries everything."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.joint_placement import Loads, Placed, Prompt, Rules, Why, place, waterline

BLOCK = 64


def keys(*words: str | int) -> list[int]:
    """Chained keys of a prompt of these blocks."""
    return [hash(words[: end + 1]) for end in range(len(words))]


def prompt(words: Sequence[str | int], candidates: Sequence[int], tail: int = 0) -> Prompt:
    return Prompt(keys(*words), len(words) * BLOCK + tail, np.array(candidates, np.intp))


def idle(slots: int, level: Sequence[float] = (), chosen_at: Sequence[float] = ()) -> Loads:
    return Loads(np.array(level or [0.0] * slots), np.array(chosen_at or [0.0] * slots))


def slots_of(placed: Sequence[Placed]) -> list[int | None]:
    return [it.slot for it in placed]


# What must not happen


def test_a_prompt_whose_endpoints_are_all_gone_is_not_placed() -> None:
    gone, stays, other = place([prompt("a", []), prompt("a", [0]), prompt("a", [0])], idle(1), Rules())
    assert (gone.slot, gone.why) == (None, Why.NO_ENDPOINT)
    assert stays.slot == other.slot == 0
    assert stays.group == 2, "who cannot go anywhere is no company"


def test_nothing_is_said_about_a_prompt_of_its_own() -> None:
    """What it has cached somewhere is other producers' business; a full match at random would outweigh it."""
    alone, short = place([prompt("ab", [0, 1]), prompt("", [0, 1])], idle(2), Rules())
    assert {alone.why, short.why} == {Why.ALONE}
    assert alone.slot is None


def test_prompts_without_a_full_block_are_never_alike() -> None:
    assert slots_of(place([prompt("", [0]), prompt("", [0])], idle(1), Rules(min_colocate_blocks=1))) == [None, None]


def test_no_endpoint_outside_a_prompts_candidates_is_used() -> None:
    placed = place([prompt("a", [0]), prompt("a", [1]), prompt("a", [1, 2])], idle(3), Rules())
    assert slots_of(placed) == [0, 1, 1]
    assert [it.why for it in placed] == [Why.SEPARATED, Why.COLOCATED, Why.COLOCATED]


def test_nothing_at_all_is_placed_nowhere() -> None:
    assert place([], idle(0), Rules(min_colocate_blocks=2, by_tokens=True)) == []


# What should


def test_equal_prompts_go_together_and_groups_apart() -> None:
    placed = slots_of(place([prompt([name], range(4)) for name in "abcd" * 8], idle(4), Rules()))
    assert len({placed[0], placed[1], placed[2], placed[3]}) == 4
    assert all(placed[index] == placed[index % 4] for index in range(32))


def test_a_tail_shorter_than_a_block_does_not_tell_prompts_apart() -> None:
    assert slots_of(place([prompt("a", [0, 1], tail=3), prompt("a", [0, 1], tail=40)], idle(2), Rules())) == [0, 0]


def test_a_beginning_in_common_counts_from_the_configured_length_on() -> None:
    window = [prompt(["system", "document", name], range(4)) for name in "abc"]
    assert slots_of(place(window, idle(4), Rules(min_colocate_blocks=3))) == [None] * 3
    (first, *others) = place(window, idle(4, level=[9, 9, 9, 0]), Rules(min_colocate_blocks=2))
    assert (first.slot, first.group, first.together, first.why) == (3, 3, 3, Why.COLOCATED)
    assert all(it == first for it in others)


def test_a_beginning_that_all_share_does_not_pull_all_to_one_endpoint() -> None:
    """The waterline: twelve prompts over four endpoints are three each."""
    window = [prompt(["system", str(number)], range(4)) for number in range(12)]
    counts = Counter(slots_of(place(window, idle(4), Rules(min_colocate_blocks=1))))
    assert sorted(counts.values()) == [3, 3, 3, 3]


def test_a_group_that_is_larger_than_the_cap_fills_one_endpoint_after_the_other() -> None:
    counts = Counter(slots_of(place([prompt("a", range(4))] * 10, idle(4), Rules(max_per_replica=4))))
    assert sorted(counts.values()) == [2, 4, 4]


def test_a_cap_that_the_fleet_is_too_small_for_is_an_even_spread() -> None:
    counts = Counter(slots_of(place([prompt("a", range(3))] * 11, idle(3), Rules(max_per_replica=2))))
    assert sorted(counts.values()) == [3, 4, 4]


def test_what_the_books_say_is_part_of_the_balance() -> None:
    placed = place([prompt([name], range(3)) for name in "aabbcc"], idle(3, level=[5, 0, 3]), Rules())
    assert slots_of(placed) == [1, 1, 1, 1, 2, 2]


def test_the_heaviest_group_is_placed_first() -> None:
    counts = Counter(slots_of(place([prompt([name], [0, 1]) for name in "aabbcccc"], idle(2), Rules())))
    assert counts == {0: 4, 1: 4}


def test_ties_go_to_who_was_chosen_the_longest_ago() -> None:
    assert slots_of(place([prompt("a", range(3))] * 2, idle(3, chosen_at=[7, 2, 9]), Rules())) == [1, 1]


def test_balance_by_tokens_weighs_a_prefix_once_and_tails_each() -> None:
    long, short = ["l", *range(9)], ["s"]
    window = [prompt(long, [0, 1])] * 2 + [prompt(short, [0, 1], tail=8)] * 6
    by_requests = slots_of(place(window, idle(2), Rules()))
    assert by_requests[0] != by_requests[2]
    window += [prompt(["t"], [0, 1])] * 2
    by_tokens = slots_of(place(window, idle(2), Rules(by_tokens=True)))
    assert by_tokens[2] == by_tokens[8] != by_tokens[0], "ten blocks weigh more than both the others"


def test_blocks_that_the_window_has_put_somewhere_cost_nothing_there() -> None:
    rules = Rules(by_tokens=True, min_colocate_blocks=8)
    shared = list("sharedpre")
    window = [*[prompt([*shared, "x"], [0, 1])] * 2, *[prompt([*shared, "y"], [0, 1])] * 2, *[prompt("z", [0, 1])] * 2]
    placed = slots_of(place(window, idle(2), rules))
    assert placed[0] == placed[2] != placed[4]


def test_who_may_go_to_few_endpoints_chooses_first() -> None:
    window = [prompt("a", [0, 1]), prompt("a", [0])]
    assert slots_of(place(window, idle(2), Rules(max_per_replica=1))) == [1, 0]


@pytest.mark.parametrize(
    ("levels", "amount", "line"),
    [([0, 0], 3, 1.5), ([4, 0], 2, 2.0), ([4, 0], 8, 6.0), ([1, 2, 9], 3, 3.0), ([5], 0, 5.0), ([0, 4], 4, 4.0)],
)
def test_the_waterline_is_where_all_levels_end_up(levels: list[float], amount: float, line: float) -> None:
    assert waterline(np.array(levels, np.float64), amount) == line


# Properties

WORDS = st.lists(st.sampled_from("ab"), max_size=3)


@st.composite
def windows(draw: st.DrawFn, same_candidates: bool = False) -> tuple[list[Prompt], Loads]:
    slots = draw(st.integers(1, 4))
    everywhere = list(range(slots))
    choice = st.just(everywhere) if same_candidates else st.lists(st.sampled_from(everywhere), unique=True).map(sorted)
    made = draw(st.lists(st.tuples(WORDS, choice, st.integers(0, BLOCK - 1)), max_size=14))
    level = draw(st.lists(st.integers(0, 6), min_size=slots, max_size=slots))
    return [prompt(words, where, tail) for words, where, tail in made], idle(slots, level)


RULES = st.builds(
    Rules,
    block_tokens=st.just(BLOCK),
    max_per_replica=st.none() | st.integers(1, 3),
    min_colocate_blocks=st.integers(0, 3),
    by_tokens=st.booleans(),
)


@given(windows(), RULES)
def test_every_prompt_with_company_is_placed_once_on_a_candidate(
    window: tuple[list[Prompt], Loads], rules: Rules
) -> None:
    prompts, loads = window
    placed = place(prompts, loads, rules)
    assert len(placed) == len(prompts)
    able = [it for it in prompts if len(it.candidates)]
    least = rules.min_colocate_blocks
    for it, answer in zip(prompts, placed, strict=True):
        alike = [other for other in able if other is not it and it.keys and other.keys == it.keys]
        kin = [other for other in able if other is not it and least and other.keys[:least] == it.keys[:least]]
        wanted = bool(len(it.candidates) and (alike or (kin and len(it.keys) >= least)))
        assert (answer.slot is not None) == wanted
        assert answer.slot is None or answer.slot in it.candidates.tolist()
    assert slots_of(place(prompts, loads, rules)) == slots_of(placed), "the same input has the same answer"


@given(windows(), RULES)
def test_the_cap_is_exceeded_only_where_no_candidate_has_room(window: tuple[list[Prompt], Loads], rules: Rules) -> None:
    prompts, loads = window
    placed = place(prompts, loads, rules)
    if (most := rules.max_per_replica) is None:
        return
    for group, members in _groups(prompts, placed).items():
        counts = Counter(placed[index].slot for index in members)
        for slot, count in counts.items():
            if count > most:
                here = [prompts[index] for index in members if placed[index].slot == slot]
                full = [all(counts[other] >= most for other in it.candidates.tolist()) for it in here]
                assert sum(full) >= count - most, group


@given(windows(same_candidates=True), RULES)
def test_a_group_stays_together_as_far_as_the_cap_permits(window: tuple[list[Prompt], Loads], rules: Rules) -> None:
    prompts, loads = window
    placed = place(prompts, loads, rules)
    endpoints, most = len(loads.level), rules.max_per_replica
    for members in _groups(prompts, placed).values():
        counts = Counter(placed[index].slot for index in members)
        if most is None:
            assert len(counts) == 1
        else:
            assert len(counts) == min(endpoints, -(-len(members) // most))
            assert max(counts.values()) <= max(most, -(-len(members) // endpoints))


def _groups(prompts: Sequence[Prompt], placed: Sequence[Placed]) -> dict[tuple[int, ...], list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (it, answer) in enumerate(zip(prompts, placed, strict=True)):
        if answer.slot is not None:
            groups.setdefault(tuple(it.keys), []).append(index)
    return groups


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(2, 6), min_size=1, max_size=5),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_fullest_endpoint_is_near_the_best_that_is_possible(
    sizes: list[int], level: list[int], by_tokens: bool
) -> None:
    """Graham: putting whole jobs on the least loaded of m machines ends below (2 - 1/m) times the best of all ways."""
    endpoints = len(level)
    if by_tokens:  # two prompts of one, two .. blocks: a prefix, and one token for the second
        window = [prompt([group, *range(size)], range(endpoints)) for group, size in enumerate(sizes) for _ in range(2)]
        jobs = [(size + 1) * BLOCK + 1 for size in sizes]
    else:
        window = [prompt([group], range(endpoints)) for group, size in enumerate(sizes) for _ in range(size)]
        jobs = sizes
    placed = place(window, idle(endpoints, level), Rules(by_tokens=by_tokens))
    where = {it.keys[0]: answer.slot for it, answer in zip(window, placed, strict=True)}
    got = _fullest(level, jobs, [slot or 0 for slot in where.values()])
    best = min(_fullest(level, jobs, way) for way in itertools.product(range(endpoints), repeat=len(jobs)))
    assert got <= (2 - 1 / endpoints) * best
    if not any(level):
        assert got <= (4 / 3 - 1 / (3 * endpoints)) * best + 1e-9, "the largest first, from nothing"


def _fullest(level: Sequence[int], jobs: Sequence[int], way: Sequence[int]) -> int:
    total = list(level)
    for job, slot in zip(jobs, way, strict=True):
        total[slot] += job
    return max(total)
