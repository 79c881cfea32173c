"""Images in their places: ids, boundaries and names of prefixes."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.block_key import block_keys, media_extras, root_key
from tokenization.images import Placed
from tokenization.placeholders import expand
from tokenization.segments import Boundary, KeyChainCache
from tokenization.tokenized import Extra

PAD = 9
ROOT = root_key("m")


def ids(*values: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.array(values, dtype=np.uint32)


def boundaries(*places: int) -> tuple[Boundary, ...]:
    return tuple(Boundary(place, str(place).encode()) for place in places)


def test_fewer_places_than_images_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 images for 1 placeholders"):
        expand(ids(1, PAD), (), PAD, [Placed("a", 2), Placed("b", 2)])


def test_places_beyond_the_images_are_ordinary_tokens() -> None:
    found = expand(ids(PAD, 1, PAD), (), PAD, [Placed("a", 3)])
    assert found.token_ids.tolist() == [PAD, PAD, PAD, 1, PAD]
    assert found.extras == (Extra("a", 0, 3),)


def test_a_place_of_an_unknown_image_ends_the_prompt_at_the_boundary_before_it() -> None:
    found = expand(ids(1, PAD, 2, 3, PAD, 4), boundaries(1, 3, 6), PAD, [Placed("a", 2)], more=True)
    assert found.token_ids.tolist() == [1, PAD, PAD, 2]
    assert [boundary.tokens for boundary in found.boundaries] == [1, 4]
    assert not len(expand(ids(1, PAD, 2), (), PAD, [], more=True).token_ids)


def test_boundaries_move_and_their_names_know_the_images_before_them() -> None:
    prompt, places = ids(1, PAD, 2, PAD, 3), boundaries(1, 3, 5)
    one = expand(prompt, places, PAD, [Placed("a", 2), Placed("b", 3)])
    two = expand(prompt, places, PAD, [Placed("a", 2), Placed("c", 3)])
    assert [boundary.tokens for boundary in one.boundaries] == [1, 4, 8]
    names = [[boundary.identity for boundary in found.boundaries] for found in (one, two)]
    assert names[0][:2] == names[1][:2]
    assert names[0][2] != names[1][2]
    assert names[0][0] == places[0].identity


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 2)), min_size=1, max_size=6), st.data()
)
def test_cached_chains_of_prompts_with_images_are_those_hashed_at_once(
    turns: list[tuple[list[int], int]], data: st.DataObject
) -> None:
    """Many prompts of few tokens and two images share one cache; every turn is a text and then maybe an image (0 = none)."""
    cache = KeyChainCache(block_keys)
    images = {1: Placed("one", 5), 2: Placed("two", 5)}
    for _ in range(4):
        chosen = data.draw(st.permutations(turns))
        prompt: list[int] = []
        places, shown, identity = [], [], b""
        for text, image in chosen:
            prompt += [*text, *([PAD] if image else [])]
            shown += [images[image]] if image else []
            identity = hashlib.blake2b(identity + bytes(text) + bytes([99 if image else 98]), digest_size=16).digest()
            places.append(Boundary(len(prompt), identity))
        found = expand(ids(*prompt), places, PAD, shown)
        extras = media_extras(((extra.identifier, extra.offset) for extra in found.extras), 4)
        keys = cache.keys(found.token_ids, found.boundaries, ROOT, 4, extras)
        assert keys == block_keys(ROOT, found.token_ids, 4, extras)
