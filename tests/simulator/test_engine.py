from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import Engine
from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashChain, HashRecipe
from simulator.kv_events import Cleared, KvEvent, Removed, Stored
from simulator.sequence import Phase, Submission
from simulator.virtual_time import run

RECIPE = HashRecipe.of("sha256_cbor", "0", 16)


def engine(blocks: int = 100, **changes: object) -> Engine:
    return Engine(EngineSettings(recipe=RECIPE, blocks=blocks, **changes))  # type: ignore[arg-type]


def request(name: str, prompt: Sequence[int], reply: int = 1, **changes: object) -> Submission:
    return Submission(id=name, prompt=prompt, reply=[7] * reply, **changes)  # type: ignore[arg-type]


def play(one: Engine, *requests: Submission) -> list[KvEvent]:
    return [event for _, outcome in run(one, [(0.0, r) for r in requests]) for event in outcome.events]


def stored_blocks(events: list[KvEvent]) -> list[int]:
    return [len(event.digests) for event in events if isinstance(event, Stored)]


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="request big: needs 10 blocks, the engine has 9"):
        engine(blocks=10).submit(request("big", range(150), 2), 0.0)


def test_a_second_request_with_the_same_id_is_refused() -> None:
    one = engine()
    one.submit(request("a", range(20)), 0.0)
    with pytest.raises(ValueError, match="the id is in use"):
        one.submit(request("a", range(20)), 0.0)


@pytest.mark.parametrize(("reply", "blocks"), [(16, [4]), (17, [4, 1])])
def test_the_block_completed_by_the_last_sampled_token_is_not_stored(reply: int, blocks: list[int]) -> None:
    assert stored_blocks(play(engine(), request("a", range(64), reply))) == blocks


def test_a_prompt_of_exactly_k_blocks_hits_one_less_and_stores_the_last_again() -> None:
    one = engine()
    play(one, request("a", range(64)))
    again = request("b", range(64))
    events = play(one, again)
    assert one.counters.prefix_hits == 48
    assert stored_blocks(events) == [1]
    assert (one.pool.copies, len(one.pool.cached_digests)) == (5, 4)


def test_a_long_prompt_is_stored_chunk_by_chunk_with_the_parent_of_the_chunk_before() -> None:
    events = play(engine(token_budget=256), request("a", range(1000)))
    assert stored_blocks(events) == [16, 16, 16, 14]
    stores = [event for event in events if isinstance(event, Stored)]
    assert [b.parent == a.digests[-1] for a, b in pairwise(stores)] == [True] * 3


def test_a_reset_of_an_idle_engine_is_announced_at_the_head_of_the_next_step() -> None:
    one = engine()
    play(one, request("a", range(40)))
    assert one.reset_prefix_cache()
    assert one.begin_step(0.0) is None
    events = play(one, request("b", range(40)))
    assert isinstance(events[0], Cleared)
    assert stored_blocks(events) == [2]


def test_a_reset_fails_while_a_request_runs() -> None:
    one = engine()
    one.submit(request("a", range(40), 5), 0.0)
    one.begin_step(0.0)
    assert not one.reset_prefix_cache()


def test_nothing_is_visible_before_the_step_ends() -> None:
    one = engine()
    sequence = one.submit(request("a", range(640), 2), 1.0)
    step = one.begin_step(1.0)
    assert step is not None
    assert sequence.first_token_at is None
    outcome = one.finish_step(step)
    assert sequence.first_token_at == step.ends > 1.0
    assert len(outcome.events) == 1


def test_speed_divides_every_step_time() -> None:
    ends = []
    for speed in (1.0, 4.0):
        one = engine(speed=speed)
        one.submit(request("a", range(640)), 0.0)
        step = one.begin_step(0.0)
        assert step is not None
        ends.append(step.ends)
    assert ends[0] == pytest.approx(4 * ends[1])


def test_an_abort_during_a_step_takes_effect_at_its_end_and_leaves_the_blocks_cached() -> None:
    one = engine()
    sequence = one.submit(request("a", range(64), 50), 0.0)
    step = one.begin_step(0.0)
    assert step is not None
    one.end("a", "abort", 0.0)
    assert sequence.phase is Phase.RUNNING
    outcome = one.finish_step(step)
    assert [output.finish for output in outcome.outputs] == [None, "abort"]
    assert not one.busy
    assert (one.pool.used, one.pool.copies) == (0, 4)
    assert not any(isinstance(event, Removed) for event in outcome.events)


def test_a_waiting_request_can_be_aborted() -> None:
    one = engine(max_running=1)
    one.submit(request("a", range(64), 5), 0.0)
    one.submit(request("b", range(64), 5), 0.0)
    one.end("b", "abort", 0.0)
    assert [sequence.id for sequence in one.waiting] == ["a"]


def test_where_room_runs_out_the_youngest_request_starts_over_and_all_still_finish() -> None:
    one = engine(blocks=24)
    requests = [request(f"r{n}", range(100 * n, 100 * n + 60), 120) for n in range(4)]
    play(one, *requests)
    assert one.counters.preemptions > 0
    assert not one.busy


def test_with_reserved_output_nothing_is_ever_preempted() -> None:
    one = engine(blocks=24, reserve_output=True)
    play(one, *[request(f"r{n}", range(100 * n, 100 * n + 60), 120) for n in range(4)])
    assert one.counters.preemptions == 0
    assert not one.busy


def test_the_step_budget_is_shared_and_the_head_of_the_queue_blocks_the_rest() -> None:
    one = engine(token_budget=100)
    for start, name in enumerate("abc"):
        one.submit(request(name, range(start * 100, start * 100 + 60)), 0.0)
    step = one.begin_step(0.0)
    assert step is not None
    assert [tokens for _, tokens in step.work] == [60, 40]
    assert [sequence.id for sequence in one.waiting] == ["c"]


def test_kept_blocks_stay_in_use_until_they_are_released_once() -> None:
    one = engine()
    play(one, request("p", range(100), keep_blocks=True))
    assert len(one.kept_blocks("p")) == one.pool.used == 7
    assert one.release("p")
    assert not one.release("p")
    assert one.pool.used == 0


def test_an_aborted_prefill_leg_keeps_nothing() -> None:
    one = engine()
    one.submit(request("p", range(100), keep_blocks=True), 0.0)
    one.end("p", "abort", 0.0)
    assert one.kept_blocks("p") == []


def test_a_transferred_prompt_counts_as_external_and_is_stored_with_the_next_step() -> None:
    one = engine()
    sequence = one.submit(request("d", range(100), 3, source="elsewhere"), 0.0)
    step = one.begin_step(0.0)
    assert step is not None
    assert (step.tokens, step.ends, one.finish_step(step).events) == (0, 0.0, ())
    assert [load.id for load in one.take_loads()] == ["d"]
    assert one.begin_step(0.0) is None
    one.loaded("d")
    step = one.begin_step(0.0)
    assert step is not None
    assert step.tokens == 1
    assert stored_blocks(list(one.finish_step(step).events)) == [6]
    assert (sequence.cached_tokens, sequence.external_tokens, one.counters.prefix_hits) == (99, 99, 0)


def test_a_failed_transfer_is_computed_here() -> None:
    one = engine()
    sequence = one.submit(request("d", range(100), 1, source="elsewhere"), 0.0)
    step = one.begin_step(0.0)
    assert step is not None
    one.finish_step(step)
    one.load_failed("d")
    step = one.begin_step(0.0)
    assert step is not None
    assert step.tokens == 100
    assert (sequence.cached_tokens, one.counters.external_hits) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(min_value=12, max_value=40),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 100), st.integers(1, 40), st.booleans()), min_size=1, max_size=25
    ),
)
def test_a_reference_counting_reader_of_the_events_always_knows_the_hit(
    blocks: int, plan: list[tuple[int, int, int, bool]]
) -> None:
    """One request at a time, so that the reader has seen everything; prompts share families of prefixes."""
    one = engine(blocks=blocks, token_budget=64)
    index: Counter[bytes] = Counter()
    for number, (family, length, reply, reset) in enumerate(plan):
        if reset:
            one.reset_prefix_cache()
            index.clear()  # the reader is told: the announcement itself comes with the next step
        prompt = [family * 1000 + i for i in range(length)]
        sequence = one.submit(request(f"r{number}", prompt, reply), 0.0)
        digests = HashChain(RECIPE, prompt).digests[: (length - 1) // 16]
        predicted = next((i for i, digest in enumerate(digests) if not index[digest]), len(digests)) * 16
        for _, outcome in run(one, []):
            for event in outcome.events:
                if isinstance(event, Stored):
                    index.update(event.digests)
                elif isinstance(event, Removed):
                    index[event.digest] -= 1
                else:
                    index.clear()
        assert sequence.cached_tokens == predicted
        assert one.pool.used == 0
        assert +index == Counter({d: one.pool.copies_of(d) for d in one.pool.cached_digests})
