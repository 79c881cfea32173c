"""One stream from frames to index entries and trust."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from event_ingest.effects import AskReplay, SetTrust
from event_ingest.pipeline import EventPath
from event_ingest.recording import read
from event_ingest.stream import END_MARKER
from event_ingest.verify import Verifier
from indexer import tier
from indexer.block_key import block_keys, root_key
from indexer.index import Index

RECORDED = list(read(Path(__file__).resolve().parent.parent / "data" / "captures" / "c1_eviction_b16.jsonl"))


def frames(seq: int, *events: Any, ts: float | None = None) -> list[bytes]:
    payload = msgspec.msgpack.encode([ts if ts is not None else 100.0 + seq, list(events), 0])
    return [b"topic", seq.to_bytes(8, "big"), payload]


def stored(tokens: list[int], first: int = 1, **fields: Any) -> dict[str, Any]:
    """One chain of blocks of four tokens with hashes `first`, `first + 1`, ..."""
    return {
        "type": "BlockStored",
        "block_hashes": [first + number for number in range(len(tokens) // 4)],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": 4,
        **fields,
    }


TOKENS = list(range(16))
KEYS = block_keys(root_key("m"), TOKENS, 4)


def path_on(index: Index, *, can_replay: bool = False, **options: Any) -> EventPath:
    path = EventPath(index, 2, name="e", model="m", can_replay=can_replay, **options)
    path.connected(0.0)
    return path


def tiers(index: Index) -> tuple[int, ...]:
    return index.match(KEYS).by_tier(2)[:3]


# Faults


def test_frames_of_another_shape_are_counted() -> None:
    path = path_on(Index())
    for strange in ([], [b""], [b"t", b"1234", b""], [b"t", b"123456789", b""]):
        path.feed(strange, 0.0)
        path.feed_replay(strange, 0.0)
    assert path.skipped == {"bad_frames": 8}


def test_a_corrupt_batch_distrusts_what_is_held_and_keeps_the_stream() -> None:
    index = Index()
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS)), 0.0)
    outcomes = path.feed([b"t", (1).to_bytes(8, "big"), b"\xc1"], 1.0)
    assert [str(o.trust) for o in outcomes if isinstance(o, SetTrust)] == ["degraded(skipped_events)"]
    assert tiers(index) == (0, 0, 4)
    path.feed(frames(2, stored(list(range(50, 58)), 50)), 2.0)
    assert path.skipped == {"bad_batch": 1}
    assert index.stats().keys == 6


def test_a_corrupt_store_can_only_cost_matches() -> None:
    index = Index()
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS), stored([1, 2, 3, -4], 9)), 0.0)
    assert str(path.trust) == "degraded(skipped_events)"
    assert tiers(index) == (4, 0, 0)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), None, "now", True])
def test_a_time_that_is_none_costs_nothing_and_makes_no_earlier_batch_another_engines(time: Any) -> None:
    index = Index()
    path = path_on(index, can_replay=True)
    path.feed_replay([b"", *frames(0, stored(TOKENS))], 0.0)
    path.feed_replay([b"", b"", END_MARKER, b""], 0.0)
    payload = msgspec.msgpack.encode([time, [stored([9] * 4, 50)], 0])
    path.feed([b"topic", (2).to_bytes(8, "big"), payload], 0.0, wall=200.0)
    path.feed(frames(1, stored([8] * 4, 60)), 0.0)  # late, and with a time
    assert path.skipped == {"bad_timestamp": 1}
    assert path.lag_s == 0.0
    path.feed_replay([b"", *frames(0, stored(TOKENS))], 0.0)
    path.feed_replay([b"", b"", END_MARKER, b""], 0.0)
    assert (path.stream.counters.restarts, path.ledger.held_keys, str(path.trust)) == (0, 6, "exact")


def test_an_unknown_kind_of_event_marks_the_trust_only() -> None:
    index = Index()
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS), {"type": "BlockPinned"}), 0.0)
    assert (str(path.trust), tiers(index)) == ("degraded(skipped_events)", (4, 0, 0))
    path.feed(frames(1, {"type": "AllBlocksCleared"}), 0.0)
    assert (str(path.trust), index.stats().entries) == ("exact", 0)


def test_a_cache_kind_without_a_hit_rule_blinds_the_stream() -> None:
    path = path_on(Index())
    path.feed(frames(0, stored(TOKENS, group_idx=1, kv_cache_spec_kind="chunked_local_attention")), 0.0)
    assert str(path.trust) == "blind(unknown_kind)"
    assert path.skipped == {"unsupported_cache_kind": 1}


def test_an_index_that_had_to_forget_is_named() -> None:
    index = Index(max_keys=2, shards=1)
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS)), 0.0)
    assert str(path.trust) == "degraded(index_evicted)"


garbage = st.one_of(
    st.lists(st.binary(max_size=12), max_size=5),
    st.tuples(st.just(b"t"), st.integers(0, 20).map(lambda n: n.to_bytes(8, "big")), st.binary(max_size=30)).map(list),
    st.tuples(st.sampled_from(RECORDED), st.integers(0, 400), st.integers(0, 255)).map(
        lambda x: [*x[0].frames[:2], x[0].frames[2][: x[1]] + bytes([x[2]]) + x[0].frames[2][x[1] + 1 :]]
    ),
    st.just([b"", b"", END_MARKER, b""]),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(garbage, st.booleans()), max_size=12), st.booleans())
def test_malformed_frames_crash_nothing_and_lose_no_stream(
    noise: list[tuple[list[bytes], bool]], can_replay: bool
) -> None:
    index = Index()
    path = path_on(index, can_replay=can_replay)
    for number, message in enumerate(RECORDED):
        for strange, replay in noise[number::7]:
            (path.feed_replay if replay else path.feed)(strange, float(number))
        path.feed(message.frames, float(number))
    for number in range(100):
        path.tick(100.0 + 5 * number)
    # Whatever was heard: an engine that speaks again from the beginning is followed again.
    path.feed(frames(0, {"type": "AllBlocksCleared"}, stored(TOKENS), ts=4e9), 999.0)
    for seq in range(1, 30):
        path.feed(frames(seq, ts=4e9 + seq), 999.0)
    for number in range(200):
        for outcome in path.tick(1000.0 + number):
            if isinstance(outcome, AskReplay):
                for seq in range(outcome.start, 30):
                    events = [{"type": "AllBlocksCleared"}, stored(TOKENS)] if seq == 0 else []
                    path.feed_replay([b"", *frames(seq, *events, ts=4e9 + seq)], 1000.0 + number)
                path.feed_replay([b"", b"", END_MARKER, b""], 1000.0 + number)
    assert index.match(KEYS).by_slot() == {2: 4}


# Reports from the engine


def test_reports_that_agree_heal_a_stream_whose_suspects_are_settled() -> None:
    index = Index()
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS)), 0.0)
    path.feed(frames(3), 0.0)
    assert (str(path.trust), tiers(index)) == ("degraded(lost_batches)", (0, 0, 4))
    path.observe(KEYS, 17, 16, 8, 1.0)
    assert tiers(index) == (2, 0, 0)
    for _ in range(16):
        assert path.trust.state == "degraded"
        path.observe(KEYS, 17, 8, 8, 1.0)
    assert str(path.trust) == "exact"


def test_reports_agree_where_the_engines_blocks_are_smaller_than_the_routers() -> None:
    index = Index()
    path = path_on(index, block_tokens=8)
    path.feed(frames(0, {"type": "BlockStored"}), 0.0)
    path.feed(frames(1, stored(TOKENS[:12])), 0.0)
    assert str(path.trust) == "degraded(skipped_events)"
    for _ in range(16):
        path.observe(block_keys(root_key("m"), TOKENS, 8), 17, 8, 12, 1.0)  # 12 tokens are 8 in whole router blocks
    assert str(path.trust) == "exact"


def test_a_capped_prompt_disproves_nothing_beyond_what_could_be_reused() -> None:
    index = Index()
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS)), 0.0)
    path.feed(frames(3), 0.0)
    path.observe(KEYS, 16, 12, 12, 1.0)
    assert tiers(index) == (3, 0, 1)


def test_predictions_that_are_too_high_again_and_again_degrade_the_stream() -> None:
    path = path_on(Index())
    path.feed(frames(0, stored(TOKENS)), 0.0)
    for _ in range(8):
        assert path.trust.state == "exact"
        path.observe(KEYS, 17, 16, 4, 1.0)
    assert str(path.trust) == "degraded(overpredicted)"
    for _ in range(40):
        path.observe(KEYS, 17, 4, 4, 1.0)
    assert str(path.trust) == "exact"


# Otherwise


def test_a_closed_path_leaves_nothing_behind() -> None:
    index = Index()
    path = path_on(index)
    path.feed(frames(0, stored(TOKENS), stored(TOKENS, group_idx=1, kv_cache_spec_kind="mamba", block_hashes=[4])), 0.0)
    assert index.stats().entries == 5
    path.close()
    assert index.stats().entries == 0


def test_counters_have_one_name_each_and_no_secrets() -> None:
    path = path_on(Index(), verifier=Verifier("sha256", None))
    path.feed(frames(0, stored(TOKENS)), 0.0, wall=101.5)
    counters = path.counters()
    assert (counters["applied"], counters["keys"], counters["engine_blocks"]) == (1, 4, 4)
    assert path.lag_s == 1.5
    assert path.verifier is not None
    assert path.verifier.mismatch
    assert path.trust.state == "exact"  # keys come from tokens: the engine's own hashes do not matter
    assert tier.GPU == 0


def test_blocks_that_were_evicted_between_a_decision_and_its_prefill_are_no_fault() -> None:
    path = path_on(Index())
    path.feed(frames(0, stored(TOKENS)), 0.0)
    path.feed(frames(1, {"type": "BlockRemoved", "block_hashes": [3, 4], "medium": "GPU"}), 5.0)
    for _ in range(20):
        path.observe(KEYS, 17, 16, 8, 6.0, 4.0)  # decided before the eviction was announced
    assert path.trust.state == "exact"
    for _ in range(8):
        path.observe(KEYS, 17, 16, 8, 6.0, 5.5)  # decided after it: these blocks should not have been counted
    assert str(path.trust) == "degraded(overpredicted)"


def test_the_numbers_of_a_stream_may_be_read_while_another_thread_feeds_it() -> None:
    path, stop = path_on(Index()), threading.Event()

    def feed() -> None:
        for seq in range(100_000):
            if stop.is_set():
                return
            path.feed(frames(seq, stored([seq, *range(79)], seq * 20 + 1)), 1.0)

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        while path.stream.counters.applied < 2000:  # a walk over 40,000 keys would be interrupted
            path.counters()
    finally:
        stop.set()
        thread.join()
    assert path.counters()["keys"] == path.stream.counters.applied * 20
