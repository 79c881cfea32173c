"""The router's own keys: chained, incremental, and different wherever an engine must not share."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.block_key import block_keys, media_extra, media_extras, next_key, pack_tokens, root_key

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=80)
block_sizes = st.integers(1, 20)


@pytest.mark.parametrize("bad", [[-1], [2**32], [1, 2, -5], np.array([-1], dtype=np.int64), np.array([2**32])])
def test_a_token_id_outside_32_bits_is_refused_instead_of_wrapped(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must be 0"):
        pack_tokens(bad)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        block_keys(root_key("m"), [1, 2], 0)


def test_a_media_item_before_the_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="before the sequence"):
        media_extras([("img", -1)], 16)


@given(tokens, block_sizes)
def test_only_full_blocks_have_keys(ids: list[int], size: int) -> None:
    keys = block_keys(root_key("m"), ids, size)
    assert len(keys) == len(ids) // size
    assert keys == block_keys(root_key("m"), ids[: len(keys) * size], size)
    assert all(0 <= key < 2**64 for key in keys)


@given(tokens, tokens, block_sizes)
def test_a_chain_continues_from_any_of_its_keys(first: list[int], second: list[int], size: int) -> None:
    first = first[: len(first) // size * size]
    root = root_key("m")
    head = block_keys(root, first, size)
    assert block_keys(root, first + second, size) == head + block_keys(head[-1] if head else root, second, size)


@given(tokens, block_sizes)
def test_lists_arrays_and_packed_buffers_give_the_same_keys_as_one_step_at_a_time(ids: list[int], size: int) -> None:
    root = root_key("m")
    expected, key = [], root
    for start in range(0, len(ids) - size + 1, size):
        key = next_key(key, pack_tokens(ids[start : start + size]))
        expected.append(key)
    for form in (ids, tuple(ids), np.array(ids, dtype=np.uint32), np.array(ids, dtype=np.int64), pack_tokens(ids)):
        assert block_keys(root, form, size) == expected
    assert block_keys(root, ids, size, {}) == expected
    assert block_keys(root, ids, size, {0: b""}) == expected


def test_a_changed_token_changes_its_block_and_all_later_ones_only() -> None:
    ids = list(range(64))
    changed = [*ids[:20], 999, *ids[21:]]
    before, after = block_keys(root_key("m"), ids, 16), block_keys(root_key("m"), changed, 16)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False, False]


def test_models_adapters_and_salts_never_share_a_root() -> None:
    roots = [
        root_key("m"),
        root_key("m2"),
        root_key("m", lora="a"),
        root_key("a"),
        root_key("m", salt="a"),
        root_key("ma"),
        root_key("m", lora="a", salt="b"),
        root_key("m", lora="b", salt="a"),
        root_key("m", lora=""),
        root_key("m", salt=""),
        root_key("m", lora="ab"),
        root_key("m", lora="a", salt="a"),
        root_key(""),
    ]
    assert len(set(roots)) == len(roots)


def test_block_sizes_do_not_share_keys() -> None:
    ids = list(range(64))
    by_size = [set(block_keys(root_key("m"), ids, size)) for size in (4, 8, 16, 32, 64)]
    assert len(set().union(*by_size)) == sum(map(len, by_size))


def test_an_extra_changes_its_block_and_what_follows() -> None:
    ids = list(range(64))
    plain = block_keys(root_key("m"), ids, 16)
    with_image = block_keys(root_key("m"), ids, 16, media_extras([("img-0", 20)], 16))
    other_image = block_keys(root_key("m"), ids, 16, media_extras([("img-1", 20)], 16))
    moved = block_keys(root_key("m"), ids, 16, media_extras([("img-0", 21)], 16))
    assert plain[0] == with_image[0] == other_image[0] == moved[0]
    assert len({plain[1], with_image[1], other_image[1], moved[1]}) == 4
    assert len({plain[3], with_image[3], other_image[3], moved[3]}) == 4


def test_extras_as_an_engine_announces_them_give_the_request_sides_keys() -> None:
    """An image of 40 tokens from token 20 on: the engine lists it in every block it touches, the request once."""
    ids, root = list(range(80)), root_key("m")
    announced = {
        0: media_extra([]),
        1: media_extra([("img-0", 4)]),
        2: media_extra([("img-0", -12)]),
        3: media_extra([("img-0", -28)]),
    }
    assert block_keys(root, ids, 16, announced) == block_keys(root, ids, 16, media_extras([("img-0", 20)], 16))


def test_the_order_of_media_items_does_not_matter_but_their_ids_and_offsets_do() -> None:
    assert media_extra([("a", 1), ("b", 2)]) == media_extra([("b", 2), ("a", 1)])
    assert media_extra([("a", 1), ("b", 2)]) != media_extra([("a", 2), ("b", 1)])
    assert media_extra([("ab", 1)]) != media_extra([("a", 1), ("b", 1)])


def test_keys_are_what_they_were_when_a_snapshot_was_written() -> None:
    """Golden values: changing them makes stored keys of other processes meaningless."""
    root = root_key("tiny", lora="ad1", salt="tenant-a")
    assert root_key("tiny") == GOLDEN_ROOT
    assert block_keys(root, range(1, 33), 16) == GOLDEN_KEYS


GOLDEN_ROOT = 17216709278874070361
GOLDEN_KEYS = [16740568890381244699, 7762235726466151107]
