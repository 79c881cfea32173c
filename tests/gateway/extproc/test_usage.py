"""Reading usage from responses that pass by."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.extproc import usage as module
from gateway.extproc.usage import ResponseReader, Usage


def sse(*events: Any, newline: str = "\n", done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}" for event in events]
    return "".join(line + newline * 2 for line in [*lines, *(["data: [DONE]"] if done else [])]).encode()


def read(content_type: str, *pieces: bytes) -> Usage:
    reader = ResponseReader(content_type)
    for number, piece in enumerate(pieces):
        reader.feed(piece, float(number))
    return reader.end(float(len(pieces)))


CHAT = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "grüße 🎉"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": " welt"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 32}},
    },
]


def test_broken_and_foreign_bodies_are_counted_and_raise_nothing() -> None:
    assert read("application/json", b"<html>").unreadable == 1
    assert read("application/json", b"[" * 100_000).unreadable == 1
    assert read("application/json", b'{"usage": 3, "choices": {"a": 1}}').unreadable == 1
    assert read("application/json", b'{"usage": null, "choices": null}') == Usage()
    assert read("application/json", b"") == Usage()
    assert read("text/event-stream", b"data: {broken\n\n", b"data: 7\n\n", sse(*CHAT)).unreadable == 1


def test_an_encoded_body_is_not_read() -> None:
    reader = ResponseReader("application/json", "gzip")
    reader.feed(b"\x1f\x8b", 0.0)
    assert reader.end(0.0) == Usage()


def test_an_event_that_never_ends_is_bounded_skipped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVENT_LIMIT", 1000)
    reader = ResponseReader("text/event-stream")
    reader.feed(b"data: ", 0.0)
    for _ in range(100):
        reader.feed(b"x" * 500, 0.0)
        assert len(reader._buffer) <= 1500
    reader.feed(b'"usage":{"prompt_tokens":1}}\n\n' + sse(*CHAT), 1.0)
    usage = reader.end(2.0)
    assert usage.unreadable == 1
    assert usage.prompt_tokens == 40


def test_a_long_json_body_is_read_from_its_tail_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_LIMIT", 10_000)
    monkeypatch.setattr(module, "TAIL", 1_000)
    text = 'a "usage":{"prompt_tokens": 999} in the text }{' * 1000
    body = {
        "choices": [{"text": text, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": None, "x": '}"{'},
        "kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1, 2]},
    }
    reader = ResponseReader("application/json")
    data = json.dumps(body).encode()
    for start in range(0, len(data), 777):
        reader.feed(data[start : start + 777], 0.0)
        assert len(reader._buffer) <= 10_777
    usage = reader.end(0.0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (7, 2, None)
    assert usage.kv_transfer_params == {"remote_engine_id": "e", "remote_block_ids": [1, 2]}
    assert (usage.finish_reason, usage.unreadable) == (None, 0)


def test_a_long_body_without_usage_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_LIMIT", 100)
    assert read("application/json", b'{"data": [' + b"1," * 100 + b"1]}").unreadable == 1


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@given(data=st.data())
def test_a_stream_cut_anywhere_reads_the_same(newline: str, data: st.DataObject) -> None:
    stream = sse(*CHAT, newline=newline)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    usage = read("text/event-stream; charset=utf-8", *pieces)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 3, 32)
    assert usage.finish_reason == "stop"
    assert usage.content_events == 3
    assert usage.unreadable == 0
    first = sum(1 for cut in cuts if cut < stream.index("🎉".encode()) + 1)
    assert usage.first_token_at is not None
    assert usage.first_token_at >= first - 1


def test_the_first_token_is_the_first_content_and_not_the_role() -> None:
    reader = ResponseReader("text/event-stream")
    reader.feed(sse(CHAT[0], done=False), 1.0)
    assert reader.usage.first_token_at is None
    reader.feed(sse(CHAT[1], done=False), 2.0)
    reader.feed(sse(CHAT[2], done=False), 3.0)
    assert reader.usage.first_token_at == 2.0


def test_a_last_event_without_its_blank_line_is_read() -> None:
    assert read("text/event-stream", sse(*CHAT, done=False)[:-2]).prompt_tokens == 40


def test_usage_in_every_event_counts_the_last() -> None:
    events = [
        {"choices": [{"text": "a", "finish_reason": None}], "usage": {"prompt_tokens": 5, "completion_tokens": n}}
        for n in (1, 2, 3)
    ]
    usage = read("text/event-stream", sse(*events))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.content_events) == (5, 3, 3)
    assert usage.cached_tokens is None, "an engine that does not report it is not an engine that had nothing cached"


def test_anthropic_usage_is_merged_over_events_and_its_cached_tokens_belong_to_the_prompt() -> None:
    usage = read(
        "text/event-stream",
        sse(
            {
                "type": "message_start",
                "message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 64, "output_tokens": 1}},
            },
            {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}},
            {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
            {"type": "message_stop"},
            done=False,
        ),
    )
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (74, 9, 64)
    assert usage.finish_reason == "end_turn"
    assert usage.first_token_at == 0.0


def test_responses_api_streaming_and_not() -> None:
    counts = {"input_tokens": 20, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 4}
    final = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": counts}
    streamed = read(
        "text/event-stream",
        sse(
            {"type": "response.created", "response": {"status": "in_progress", "usage": None}},
            {"type": "response.output_text.delta", "delta": "x"},
            {"type": "response.incomplete", "response": final},
            done=False,
        ),
    )
    whole = read("application/json", json.dumps(final).encode())
    for usage in (streamed, whole):
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, 4, 16)
        assert usage.finish_reason == "max_output_tokens"
    assert streamed.first_token_at == 0.0
    assert whole.first_token_at is None


def test_a_json_body_with_hand_off_parameters() -> None:
    body = {
        "choices": [{"finish_reason": "length", "logprobs": {"content": [1, 2, 3]}}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
        "kv_transfer_params": {"remote_port": 1},
    }
    data = json.dumps(body).encode()
    usage = read("application/json", data[:50], data[50:])
    assert (usage.finish_reason, usage.cached_tokens, usage.kv_transfer_params) == ("length", 0, {"remote_port": 1})


def test_answers_of_a_real_engine(shared: Any) -> None:
    answer = json.loads((shared / "captures" / "http_generate.json").read_text())["response"]
    usage = read("application/json", json.dumps(answer).encode())
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 3, None)
    assert usage.finish_reason == "length"
