import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deciders.handoff import (
    NotAnObject,
    bootstrap_body,
    decode_body,
    prefill_body,
    transfer_params,
    with_transfer,
    without_transfer,
)

CHAT = "/v1/chat/completions"
ANSWER = {
    "id": "x",
    "choices": [],
    "kv_transfer_params": {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "e",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "remote_blocks_expiry_time": None,
    },
}


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'"text"', b"\xff"])
def test_a_body_that_is_no_object_cannot_be_handed_off(body: bytes) -> None:
    for call in (lambda: prefill_body(CHAT, body), lambda: decode_body(body, {}), lambda: bootstrap_body(body, "h", 1)):
        with pytest.raises(NotAnObject):
            call()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": 3}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": {"do_remote_prefill": false, "remote_host": "10.9.9.9"}}',
    ],
)
def test_an_answer_without_usable_transfer_parameters_gives_none(answer: bytes) -> None:
    assert transfer_params(answer) is None


def test_without_parameters_the_decode_engine_gets_the_clients_own_bytes() -> None:
    body = b'{ "model" : "m",  "temperature": 1.10 }'
    assert decode_body(body, None) is body


def test_transfer_parameters_of_the_client_are_never_passed_on() -> None:
    body = b'{"model": "m", "kv_transfer_params": {"remote_host": "10.9.9.9"}}'
    assert json.loads(decode_body(body, None)) == {"model": "m"}
    assert json.loads(without_transfer(body)) == {"model": "m"}
    assert json.loads(prefill_body(CHAT, body))["kv_transfer_params"]["remote_host"] is None
    assert json.loads(decode_body(body, {"a": 1}))["kv_transfer_params"] == {"a": 1}


def test_a_field_name_with_escapes_hides_nothing() -> None:
    body = b'{"model": "m", "kv\\u005ftransfer_params": {"remote_host": "10.9.9.9"}}'
    assert json.loads(without_transfer(body)) == {"model": "m"}


def test_token_ids_among_the_transfer_parameters_reach_both_legs() -> None:
    body = b'{"model": "m", "kv_transfer_params": {"prompt_token_ids": [1, 2], "remote_host": "10.9.9.9"}}'
    assert json.loads(without_transfer(body))["kv_transfer_params"] == {"prompt_token_ids": [1, 2]}
    assert json.loads(decode_body(body, {"a": 1}))["kv_transfer_params"] == {"a": 1, "prompt_token_ids": [1, 2]}
    first = json.loads(prefill_body(CHAT, body))["kv_transfer_params"]
    assert (first["prompt_token_ids"], first["remote_host"], first["do_remote_decode"]) == ([1, 2], None, True)


def test_given_transfer_parameters_replace_all_others_and_leave_the_rest_alone() -> None:
    sent = with_transfer(b'{"temperature": 1.10, "kv_transfer_params": {"x": 1}}', {"prompt_token_ids": [7]})
    assert b"1.10" in sent
    assert json.loads(sent)["kv_transfer_params"] == {"prompt_token_ids": [7]}


def test_the_prefill_leg_of_a_chat_computes_one_token_and_keeps_its_blocks() -> None:
    body = {
        "model": "m",
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 900,
        "n": 3,
    }
    assert json.loads(prefill_body(CHAT, json.dumps(body).encode())) == {
        "model": "m",
        "messages": [],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "min_tokens": 1,
        "n": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "limits"),
    [
        ("/v1/completions?x=1", {"max_tokens": 1, "min_tokens": 1}),
        ("/v1/responses", {"max_output_tokens": 1}),
        ("/v1/messages", {"max_tokens": 1}),
        ("/inference/v1/generate", {"sampling_params": {"top_p": 0.5, "max_tokens": 1, "min_tokens": 1}}),
    ],
)
def test_every_api_is_limited_in_its_own_words(path: str, limits: dict[str, object]) -> None:
    body = {"sampling_params": {"top_p": 0.5, "max_tokens": 70}} if "generate" in path else {"model": "m"}
    sent = json.loads(prefill_body(path, json.dumps(body).encode()))
    assert {key: sent[key] for key in limits} == limits


def test_the_decode_leg_is_the_clients_request_with_the_answers_parameters_unchanged() -> None:
    body = {"model": "m", "stream": True, "max_tokens": 900}
    params = transfer_params(json.dumps(ANSWER).encode())
    assert json.loads(decode_body(json.dumps(body).encode(), params)) == {
        **body,
        "kv_transfer_params": ANSWER["kv_transfer_params"],
    }


def test_numbers_keep_their_digits() -> None:
    body = b'{"temperature": 1.10, "seed": 123456789012345678901234567890, "logit_bias": {"5": 1e2}}'
    sent = decode_body(body, {"a": 1})
    assert b"1.10" in sent
    assert b"123456789012345678901234567890" in sent
    assert b"1e2" in sent


def test_both_sglang_legs_meet_in_a_room() -> None:
    sent = json.loads(bootstrap_body(b'{"model": "m"}', "10.0.0.1", 2**62, 9000))
    assert sent == {"model": "m", "bootstrap_host": "10.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 2**62}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda it: st.lists(it, max_size=3) | st.dictionaries(st.text(), it, max_size=3),
)


@settings(max_examples=60)
@given(st.dictionaries(st.text(), JSON))
def test_fields_that_nobody_names_pass_through_both_legs(body: dict[str, object]) -> None:
    touched = {
        "stream",
        "stream_options",
        "max_tokens",
        "min_tokens",
        "max_completion_tokens",
        "n",
        "kv_transfer_params",
    }
    raw = msgspec.json.encode(body)
    kept = {key: value for key, value in body.items() if key not in touched}
    sent = json.loads(prefill_body(CHAT, raw))
    assert {key: value for key, value in sent.items() if key not in touched} == kept
    assert json.loads(decode_body(raw, {"a": 1})) == {**body, "kv_transfer_params": {"a": 1}}


@pytest.mark.parametrize(
    "body",
    [
        b'{"seed": NaN, "kv_transfer_params": {"remote_host": "x"}}',
        b'{"user": "\\ud800", "kv_transfer_params": {"remote_host": "x"}}',
        b'{"user": "\\ud800", "kv_transfer_param\\u0073": [1]}',
        '{"kv_transfer_params": {"remote_host": "x"}}'.encode("utf-16"),
        '{"kv_transfer_params": {"remote_host": "x"}}'.encode("utf-32"),
    ],
)
def test_what_only_the_engines_decoder_reads_hides_no_transfer_parameters(body: bytes) -> None:
    left = json.loads(without_transfer(body))
    assert "kv_transfer_params" not in left
    assert decode_body(body, None) == without_transfer(body)


def test_token_ids_of_a_body_that_only_python_reads_stay() -> None:
    left = json.loads(without_transfer(b'{"x": Infinity, "kv_transfer_params": {"prompt_token_ids": [1, 2], "a": 1}}'))
    assert left == {"x": float("inf"), "kv_transfer_params": {"prompt_token_ids": [1, 2]}}


def test_a_body_that_only_python_reads_and_that_has_none_keeps_its_bytes() -> None:
    for body in (b'{"kv_transfer_params2": NaN}', '{"a": 1}'.encode("utf-16"), b"\x00"):
        try:
            assert without_transfer(body) is body
        except NotAnObject:
            assert body == b"\x00"


def test_an_answer_nested_beyond_reason_has_no_parameters() -> None:
    deep = b"[" * 200_000 + b"]" * 200_000
    assert transfer_params(b'{"x": ' + deep + b', "kv_transfer_params": {"do_remote_prefill": true}}') is None
    assert transfer_params(b'{"kv_transfer_params": {"do_remote_prefill": true, "x": ' + deep + b"}}") is None
    with pytest.raises(NotAnObject):
        prefill_body(CHAT, b'{"messages": ' + deep + b"}")
