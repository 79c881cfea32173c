"""A long chat costs its new text: the segment cache and the chain of block keys."""

import random
import sys
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from indexer.block_key import block_keys, root_key
from tokenization.encoders import Ids
from tokenization.local import LocalTokenizer
from tokenization.segments import ENTRY_OVERHEAD_BYTES, Boundary, KeyChainCache, SegmentedEncoder

CHAT = "/v1/chat/completions"
ROOT = root_key("m")


class CountingEncoder:
    """One id per character; counts what it is given."""

    name = "counting"

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        self.characters += sum(map(len, texts))
        return [np.array([ord(c) for c in text], dtype=np.uint32) for text in texts]


def test_a_segment_larger_than_the_cache_is_encoded_and_not_kept() -> None:
    segmented = SegmentedEncoder(CountingEncoder(), ["<"], max_bytes=1000)
    text = "<" + "a" * 5000 + "<b"
    assert len(segmented.encode(text)[0]) == len(text)
    assert segmented.cache.stats().entries == 1


def test_the_cache_stays_below_its_bytes_and_drops_the_least_recently_used() -> None:
    encoder = CountingEncoder()
    entry = sys.getsizeof("<a") + 2 * 4 + ENTRY_OVERHEAD_BYTES
    segmented = SegmentedEncoder(encoder, ["<"], max_bytes=3 * entry)
    for text in ("<a<b", "<a<c", "<a<d"):
        segmented.encode(text)
    stats = segmented.cache.stats()
    assert (stats.entries, stats.bytes, stats.evicted) == (3, 3 * entry, 1)
    before = encoder.characters
    segmented.encode("<a<d")
    assert encoder.characters == before
    segmented.encode("<a<b")
    assert encoder.characters == before + 2


def test_texts_without_a_cut_leave_nothing_behind() -> None:
    segmented = SegmentedEncoder(CountingEncoder(), ["<"], max_bytes=10_000)
    assert segmented.encode("plain")[1] == ()
    assert segmented.cache.stats().entries == 0


def test_a_turn_costs_only_its_new_text() -> None:
    encoder = CountingEncoder()
    segmented = SegmentedEncoder(encoder, ["<"], max_bytes=1 << 20)
    history = "".join(f"<user {i}<assistant {i}" for i in range(50))
    segmented.encode(history + "<prompt")
    before = encoder.characters
    segmented.encode(history + "<new words" + "<prompt")
    assert encoder.characters - before == len("<new words")


def test_equal_beginnings_have_equal_boundaries_and_others_do_not() -> None:
    segmented = SegmentedEncoder(CountingEncoder(), ["<"], max_bytes=1 << 20)
    first = segmented.encode("<a<b<c")[1]
    second = segmented.encode("<a<b<d<c")[1]
    assert [b.tokens for b in first] == [2, 4, 6]
    assert first[:2] == second[:2]
    assert first[2].identity != second[2].identity
    assert second[3].identity not in {b.identity for b in first}
    assert segmented.encode("<a<b", start=1)[1][1].identity != first[1].identity


def test_many_threads_get_the_same_ids(qwen3: LocalTokenizer) -> None:
    segmented = SegmentedEncoder(qwen3.segments.encoder, ["<|im_start|>"], max_bytes=20_000)
    texts = [f"<|im_start|>user\n{i % 7} x{i}<|im_start|>assistant\n{i}" for i in range(60)]
    whole = qwen3.segments.encoder.encode(texts)
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in random.Random(seed).choices(range(60), k=200):
            if not np.array_equal(segmented.encode(texts[i])[0], whole[i]):
                wrong.append(texts[i])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert segmented.cache.stats().bytes <= 20_000


def test_text_counts_as_the_bytes_that_it_takes_here() -> None:
    """One character beyond the basic plane, and Python keeps all of the text in four bytes each."""
    plain, wide = (SegmentedEncoder(CountingEncoder(), ["<"], max_bytes=1 << 20) for _ in range(2))
    plain.encode("<" + "a" * 10_000 + "<")
    wide.encode("<" + "a" * 9_999 + "\N{WAVING HAND SIGN}" + "<")
    assert wide.cache.stats().bytes - plain.cache.stats().bytes > 29_000


# Key chains --------------------------------------------------------------------------------------------------------


class CountingKeys:
    """The real key function; counts the tokens it hashes."""

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, parent: int, ids: Ids, block_tokens: int, extras: Mapping[int, bytes]) -> list[int]:
        self.tokens += len(ids) // block_tokens * block_tokens
        return block_keys(parent, ids, block_tokens, extras)


def _prompt(draw: random.Random, turns: list[int]) -> tuple[Ids, tuple[Boundary, ...]]:
    """Ids and boundaries of turns; a turn's number decides over its ids and length."""
    parts, boundaries, identity, total = [], [], b"", 0
    for turn in turns:
        ids = np.random.default_rng(turn).integers(0, 1000, turn * 7 % 60).astype(np.uint32)
        parts.append(ids)
        total += len(ids)
        identity += turn.to_bytes(2, "little")
        boundaries.append(Boundary(total, identity))
    return np.concatenate(parts), tuple(boundaries)


@pytest.mark.parametrize("max_bytes", [128 << 20, 20_000, 1])
def test_keys_equal_those_of_the_whole_prompt_whatever_is_cached(max_bytes: int) -> None:
    draw = random.Random(3)
    cache = KeyChainCache(block_keys, max_bytes)
    talks: list[list[int]] = [[draw.randrange(1, 500)] for _ in range(5)]
    for _ in range(300):
        talk = draw.choice(talks)
        if draw.random() < 0.1:
            talks.append(talk := talk[: draw.randint(1, len(talk))])
        talk.append(draw.randrange(1, 500))
        ids, boundaries = _prompt(draw, talk)
        root, block = draw.choice([(ROOT, 16), (root_key("n"), 16), (ROOT, 64)])
        assert cache.keys(ids, boundaries, root, block) == block_keys(root, ids, block)
        assert len(cache) * 8 <= max_bytes


@pytest.mark.parametrize("turn_tokens", [4, 70, 2000])
def test_key_chains_take_no_more_memory_than_they_may(turn_tokens: int) -> None:
    def extend(parent: int, ids: Ids, block_tokens: int, extras: Mapping[int, bytes]) -> list[int]:
        return [1 << 60] * (len(ids) // block_tokens)

    ids = np.zeros(turn_tokens, np.uint32)
    tracemalloc.start()
    try:
        cache = KeyChainCache(extend, 2_000_000)
        for turn in range(12_000):
            cache.keys(ids, (Boundary(turn_tokens, turn.to_bytes(16, "little")),), ROOT, 16)
        assert 1_200_000 < tracemalloc.get_traced_memory()[0] < 2_300_000
    finally:
        tracemalloc.stop()


def test_keys_without_boundaries_are_computed_and_not_kept() -> None:
    cache = KeyChainCache(block_keys)
    ids = np.arange(100, dtype=np.uint32)
    assert cache.keys(ids, (), ROOT, 16) == block_keys(ROOT, ids, 16)
    assert len(cache) == 0


def test_a_chat_of_fifty_turns_and_40k_tokens_costs_only_its_new_text(qwen3: LocalTokenizer) -> None:
    draw = random.Random(8)
    words = [f"word{i}" for i in range(500)]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length))

    counting = CountingKeys()
    cache = KeyChainCache(counting)
    stats = qwen3.segments.cache.stats
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(100)}]
    hashed = encoded = tokens = 0
    for _ in range(50):
        messages.append({"role": "user", "content": text(140)})
        before, tokens_before = counting.tokens, stats().miss_tokens
        result = qwen3.tokenize(CHAT, {"messages": messages})
        keys = cache.keys(result.token_ids, result.boundaries, ROOT, 16)
        new_tokens = len(result.token_ids) - tokens
        hashed, encoded, tokens = counting.tokens - before, stats().miss_tokens - tokens_before, len(result.token_ids)
        assert encoded <= new_tokens + 8
        # The last turn's header is text that the next prompt continues differently: its blocks are hashed again.
        assert hashed <= new_tokens + 32
        messages.append({"role": "assistant", "content": text(140)})
    assert tokens > 40_000
    assert keys == block_keys(ROOT, result.token_ids, 16)
