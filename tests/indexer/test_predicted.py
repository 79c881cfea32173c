"""Predicted blocks against a model of requests, and beside real ones."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import tier
from indexer.index import Index
from indexer.predicted import Predicted

TTL = 10.0


@pytest.mark.parametrize(("ttl_s", "max_entries"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_limits_must_be_positive(ttl_s: float, max_entries: int) -> None:
    with pytest.raises(ValueError, match="ttl_s must be above 0"):
        Predicted(ttl_s, max_entries)


def test_a_ticket_can_be_released_twice_or_after_its_expiry() -> None:
    predicted = Predicted(TTL)
    ticket = predicted.predict(0, [1, 2], now=0.0)
    assert predicted.expire(TTL) == 1
    predicted.release(ticket)
    predicted.release(ticket)
    assert predicted.stats().expired == 2
    assert predicted.stats().released == 0


def test_a_block_stays_expected_while_another_request_refers_to_it() -> None:
    predicted = Predicted(TTL)
    first = predicted.predict(0, [1, 2, 3], now=0.0)
    predicted.predict(0, [1, 2, 4], now=1.0)
    predicted.release(first)
    assert [predicted.holders(key) for key in (1, 2, 3, 4)] == [1, 1, 0, 1]


def test_expiry_ends_only_what_is_due() -> None:
    predicted = Predicted(TTL)
    predicted.predict(0, [1, 2], now=0.0)
    predicted.predict(1, [1, 3], now=5.0)
    assert predicted.expire(9.9) == 0
    assert predicted.expire(10.0) == 1
    assert [predicted.holders(key) for key in (1, 2, 3)] == [2, 0, 2]
    assert predicted.expire(15.0) == 1
    assert not predicted


def test_a_confirmed_block_is_the_indexs_and_no_later_expiry_ends_a_newer_prediction_of_it() -> None:
    predicted = Predicted(TTL)
    predicted.predict(0, [1, 2], now=0.0)
    assert predicted.confirm(0, [1, 2, 9]) == 2
    assert not predicted
    predicted.predict(0, [1], now=5.0)  # the block was evicted and is computed again
    predicted.expire(TTL)
    assert predicted.holders(1) == 1


def test_expiry_never_removes_a_real_block() -> None:
    index, predicted = Index(), Predicted(TTL)
    index.add(0, tier.GPU, [1, 2])
    predicted.predict(0, [1, 2, 3], now=0.0)
    assert index.match([1, 2, 3], predicted).by_slot() == {0: 3}
    predicted.expire(100.0)
    assert index.match([1, 2, 3], predicted).by_slot() == {0: 2}


def test_siblings_see_what_the_first_was_sent_to() -> None:
    index, predicted = Index(), Predicted(TTL)
    index.add(0, tier.GPU, [1])
    index.set_dense(0, True)
    index.set_dense(4, True)
    predicted.predict(4, [1, 2, 3], now=0.0)
    matched = index.match([1, 2, 3, 4], predicted)
    assert matched.by_slot() == {0: 1, 4: 3}
    assert matched.by_tier(4) == (0, 0, 0, 3)
    assert index.match([1, 2, 3, 4]).by_slot() == {0: 1}


def test_the_oldest_requests_go_first_when_the_bound_is_reached() -> None:
    predicted = Predicted(TTL, max_entries=4)
    predicted.predict(0, [1, 2], now=0.0)
    predicted.predict(0, [3, 4], now=0.0)
    predicted.predict(0, [5], now=0.0)
    assert [predicted.holders(key) for key in range(1, 6)] == [0, 0, 1, 1, 1]
    predicted.predict(0, [11, 12, 13, 14, 15, 16], now=0.0)
    assert [predicted.holders(key) for key in (11, 14, 15)] == [1, 1, 0]
    stats = predicted.stats()
    assert stats.entries == 4
    assert stats.evicted == 2 + 3 + 2


step = st.one_of(
    st.tuples(st.just("predict"), st.integers(0, 2), st.sets(st.integers(0, 5))),
    st.tuples(st.just("release"), st.integers(0, 10), st.none()),
    st.tuples(st.just("confirm"), st.integers(0, 2), st.sets(st.integers(0, 5))),
    st.tuples(st.just("clear"), st.integers(0, 2), st.none()),
    st.tuples(st.just("wait"), st.integers(0, 6), st.none()),
)


@given(st.lists(step, max_size=40))
@settings(max_examples=200)
def test_a_block_is_expected_exactly_while_an_unfinished_request_refers_to_it(
    steps: list[tuple[str, int, set[int] | None]],
) -> None:
    predicted, now = Predicted(TTL), 0.0
    alive: dict[int, tuple[int, set[int], float]] = {}
    for kind, number, keys in steps:
        if kind == "predict":
            assert keys is not None
            alive[predicted.predict(number, keys, now)] = (number, set(keys), now + TTL)
        elif kind == "release":
            predicted.release(number)
            alive.pop(number, None)
        elif kind == "confirm":
            assert keys is not None
            predicted.confirm(number, keys)
            for slot, wanted, _ in alive.values():
                if slot == number:
                    wanted -= keys
        elif kind == "clear":
            predicted.clear(number)
            alive = {ticket: known for ticket, known in alive.items() if known[0] != number}
        else:
            now += number
            predicted.expire(now)
            alive = {ticket: known for ticket, known in alive.items() if known[2] > now}
        for key in range(6):
            expected = sum(1 << slot for slot in range(3) if any(s == slot and key in k for s, k, _ in alive.values()))
            assert predicted.holders(key) == expected
        assert predicted.stats().entries == sum(len(keys) for _, keys, _ in alive.values())
        assert bool(predicted) == any(keys for _, keys, _ in alive.values())


def test_threads_leave_nothing_behind() -> None:
    predicted = Predicted(TTL)

    def work(slot: int) -> None:
        for round_ in range(200):
            ticket = predicted.predict(slot, range(round_, round_ + 20), now=0.0)
            predicted.confirm(slot, range(round_, round_ + 5))
            predicted.release(ticket)

    workers = [threading.Thread(target=work, args=(slot,)) for slot in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not predicted
    assert predicted.stats().entries == 0
