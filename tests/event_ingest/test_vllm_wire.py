"""Decoding of the batches that vLLM and SGLang publish."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from event_ingest.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Extra, Item, Reason
from event_ingest.recording import read
from event_ingest.vllm_wire import decode

TOKENS = b"".join(n.to_bytes(4, "little") for n in range(1, 5))
MAP = {
    "type": "BlockStored",
    "block_hashes": [7, 8],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}


def batch_of(*events: Any, ts: Any = 1.5, tail: tuple[Any, ...] = (0,)) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), *tail])


def only_event(event: Any) -> Any:
    decoded = decode(batch_of(event))
    assert decoded.skipped == ()
    assert decoded.batch is not None
    return decoded.batch.events[0]


def only_reason(*events: Any) -> Reason:
    decoded = decode(batch_of(*events))
    assert len(decoded.skipped) == 1, decoded
    return decoded.skipped[0].reason


# Broken input


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 3000,
        b"\xc0",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
    ],
)
def test_a_payload_that_is_no_batch_is_lost_with_a_reason(payload: bytes) -> None:
    decoded = decode(payload)
    assert decoded.batch is None
    assert [s.reason for s in decoded.skipped] == [Reason.BAD_BATCH]
    assert decoded.skipped[0].loses == "removals"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (5, Reason.BAD_EVENT),
        ([], Reason.BAD_EVENT),
        ([3, []], Reason.BAD_EVENT),
        ({}, Reason.BAD_EVENT),
        ({"type": "BlockUpgraded"}, Reason.UNKNOWN_KIND),
        (["BlockUpgraded", [1]], Reason.UNKNOWN_KIND),
        ({"type": "BlockRemoved"}, Reason.MISSING_FIELD),
        (["BlockRemoved"], Reason.MISSING_FIELD),
        ({**MAP, "block_hashes": 7}, Reason.BAD_FIELD),
        ({**MAP, "block_hashes": [b"short"]}, Reason.BAD_HASH),
        ({**MAP, "block_hashes": [1.5, 2]}, Reason.BAD_HASH),
        ({**MAP, "parent_block_hash": "x"}, Reason.BAD_HASH),
        ({**MAP, "token_ids": [1, -2, 3, 4]}, Reason.BAD_TOKENS),
        ({**MAP, "token_ids": [1, 1 << 32]}, Reason.BAD_TOKENS),
        ({**MAP, "token_ids": ["a"]}, Reason.BAD_TOKENS),
        ({**MAP, "token_ids": [[1, 2], 3]}, Reason.BAD_TOKENS),
        ({**MAP, "block_size": -1}, Reason.BAD_FIELD),
        ({**MAP, "block_size": True}, Reason.BAD_FIELD),
        ({**MAP, "medium": 3}, Reason.BAD_FIELD),
        ({**MAP, "lora_id": 1.5}, Reason.BAD_FIELD),
        ({**MAP, "extra_keys": [None]}, Reason.BAD_EXTRA_KEYS),
        ({**MAP, "extra_keys": [["s"], [3.5]]}, Reason.BAD_EXTRA_KEYS),
    ],
)
def test_one_bad_event_costs_one_event(event: Any, reason: Reason) -> None:
    decoded = decode(batch_of(MAP, event, ["AllBlocksCleared"]))
    assert [s.reason for s in decoded.skipped] == [reason]
    assert decoded.batch is not None
    assert [type(e) for e in decoded.batch.events] == [BlockStored, AllBlocksCleared]


def test_an_event_with_broken_text_costs_one_event() -> None:
    payload = b"\x92\xcb" + b"\0" * 8 + b"\x92" + b"\x91\xa2\xff\xfe" + msgspec.msgpack.encode(["AllBlocksCleared"])
    decoded = decode(payload)
    assert [s.reason for s in decoded.skipped] == [Reason.BAD_EVENT]
    assert decoded.batch == Batch(0.0, (AllBlocksCleared(),), None)


@pytest.mark.parametrize("ts", [math.nan, math.inf, "now", None, True])
def test_a_batch_with_a_bad_time_keeps_its_events(ts: Any) -> None:
    decoded = decode(batch_of(["AllBlocksCleared"], ts=ts))
    assert [s.reason for s in decoded.skipped] == [Reason.BAD_TIMESTAMP]
    assert decoded.batch == Batch(0.0, (AllBlocksCleared(),), 0)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_decoder_raise(payload: bytes) -> None:
    decode(payload)


values = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(),
        st.text(max_size=8), st.binary(max_size=12),
        st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "GPU"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=12),
        st.dictionaries(st.sampled_from([*MAP, "extra_keys", "group_idx", "kv_cache_spec_kind", "cache_salt"]), inner),
    ),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=300)
@given(values, st.lists(st.one_of(values, st.just(MAP)), max_size=5))
def test_no_value_makes_the_decoder_raise_and_good_events_survive(ts: Any, events: list[Any]) -> None:
    decoded = decode(msgspec.msgpack.encode([ts, events, 0]))
    assert decoded.batch is not None
    assert len(decoded.batch.events) + len([s for s in decoded.skipped if s.reason != Reason.BAD_TIMESTAMP]) == len(
        events
    )
    assert sum(e == only_event(MAP) for e in decoded.batch.events) >= sum(e is MAP for e in events)


# The forms


def test_a_recorded_map_event_is_decoded_in_full(captures: Path) -> None:
    message = next(read(captures / "a_prefill_decode_b16.jsonl"))
    decoded = decode(message.frames[-1])
    assert decoded.skipped == ()
    assert decoded.batch is not None
    assert decoded.batch.rank == 0
    (event,) = decoded.batch.events
    assert isinstance(event, BlockStored)
    assert event.hashes[:2] == (7837861907691630001, 15322746730154648418)
    assert (event.parent, event.block_tokens, event.medium, event.group, event.kind) == (
        None,
        16,
        "GPU",
        0,
        "full_attention",
    )
    assert event.tokens[:8] == (18611).to_bytes(4, "little") + (75606).to_bytes(4, "little")
    assert event.extras == ()


def test_recorded_digests_become_the_same_hashes_as_recorded_integers(captures: Path) -> None:
    message = next(read(captures / "f_sha256_cbor_b16_bytes.jsonl"))
    batch = decode(message.frames[-1]).batch
    assert batch is not None
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.hashes[:2] == (4364018932989086499, 14413253790341792266)


def test_every_recorded_batch_is_decoded_without_a_skip(shared: Path) -> None:
    for file in sorted((shared / "captures").glob("*.jsonl")):
        for message in read(file):
            if not message.is_end:
                assert decode(message.frames[-1]).skipped == (), file.name


FULL_ARRAY = ["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "cpu", "ad1", [["ad1"], ["ad1", ["img", 1]]]]


@pytest.mark.parametrize("length", range(4, len(FULL_ARRAY) + 1))
def test_arrays_of_every_length_are_the_map_with_defaults(length: int) -> None:
    event = only_event(FULL_ARRAY[: length + 1])
    assert (event.hashes, event.tokens, event.block_tokens) == ((7, 8), TOKENS, 2)
    assert event.medium == ("CPU" if length >= 6 else "GPU")
    assert event.lora == ("ad1" if length >= 7 else None)
    assert event.extras == ((None, Extra(items=(Item("img", 1),))) if length >= 8 else ())


@pytest.mark.parametrize(
    "tail",
    [
        [2, "sliding_window", 64],
        [None, 2, "sliding_window", 64],
        [[None, {"mm_hash": 1}], 2, "sliding_window", 64],
        [2, "sliding_window", 64, "LOCAL", None, {"more": 1}],
    ],
)
def test_what_follows_the_extra_keys_is_told_apart_by_type(tail: list[Any]) -> None:
    event = only_event([*FULL_ARRAY, *tail])
    assert (event.group, event.kind, event.window) == (2, "sliding_window", 64)


def test_an_absent_kind_leaves_group_and_window_in_order() -> None:
    event = only_event([*FULL_ARRAY, 1, None, 32])
    assert (event.group, event.kind, event.window) == (1, None, 32)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (["BlockRemoved", [1]], BlockRemoved(hashes=(1,))),
        (["BlockRemoved", [1, 2], "CPU"], BlockRemoved(hashes=(1, 2), medium="CPU")),
        (["BlockRemoved", [1], None, 2, "more"], BlockRemoved(hashes=(1,), group=2)),
        ({"type": "BlockRemoved", "block_hashes": [], "medium": None, "later": 1}, BlockRemoved(hashes=())),
        ({"type": "AllBlocksCleared", "medium": "CPU"}, AllBlocksCleared()),
    ],
)
def test_removals_and_clears_are_decoded_in_both_forms(event: Any, expected: Any) -> None:
    assert only_event(event) == expected


def test_a_batch_may_have_two_or_more_than_three_elements() -> None:
    assert decode(batch_of(MAP, tail=())).batch is not None
    assert decode(batch_of(MAP, tail=(3, 17, {"digest": 1}))).batch == Batch(1.5, (only_event(MAP),), 3)


def test_signed_hashes_are_the_same_as_unsigned_ones() -> None:
    event = only_event(["BlockStored", [-1, -(1 << 63)], -222, [1, 2, 3, 4], 2])
    assert event.hashes == ((1 << 64) - 1, 1 << 63)
    assert event.parent == 18446744073709551394


def test_a_salt_in_the_place_of_the_adapter_is_a_salt() -> None:
    event = only_event(["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", {"cache_salt": "s"}])
    assert event.lora is None
    assert event.extras == (Extra(salt="s"), None)


def test_token_pairs_count_as_their_first_tokens() -> None:
    event = only_event(["BlockStored", [7, 8], None, [[1, 2], [2, 3], [3, 4], [4, 5]], 2])
    assert event.tokens == TOKENS


def test_a_string_is_the_adapter_only_where_the_event_has_one() -> None:
    assert only_event({**MAP, "extra_keys": [["s"], None]}).extras == (Extra(salt="s"), None)
    named = only_event({**MAP, "lora_name": "ad1", "extra_keys": [["ad1", "s"], ["ad1"]]})
    assert (named.lora, named.extras) == ("ad1", (Extra(salt="s"), None))


def test_an_adapter_known_by_number_only_is_not_the_base_model() -> None:
    assert only_event({**MAP, "lora_id": 3}).lora not in (None, "3")


def test_embeddings_and_media_are_sorted_out() -> None:
    event = only_event({**MAP, "extra_keys": [[["img", -3], ["img2", 1]], [b"digest"]]})
    assert event.extras == (Extra(items=(Item("img", -3), Item("img2", 1))), Extra(embeds=b"digest"))


def test_location_only_events_have_no_tokens() -> None:
    event = only_event(
        {**MAP, "token_ids": [], "block_size": 0, "medium": "storage", "locality": "REMOTE", "ownership": "t"}
    )
    assert (event.tokens, event.block_tokens, event.medium, event.locality) == (b"", 0, "STORAGE", "REMOTE")
