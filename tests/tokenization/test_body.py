"""Bodies: which prompts they hold, and hostile ones that must cost nothing but themselves."""

import contextlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenization.conftest import load
from tokenization.body import PROMPT_PATHS, decode_body, parse_body
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.prompt import Chat, Text, Tokens

CHAT = "/v1/chat/completions"


def failure(path: str, body: Any) -> TokenizationError:
    with pytest.raises(TokenizationError) as caught:
        parse_body(path, body)
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b'{"a": }', b"[1]", b"null", b'"x"', b'{"a": "\xff"}', b"{" * 100_000, b'{"a":' * 100_000 + b"1"],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(TokenizationError) as caught:
        decode_body(raw)
    assert (caught.value.status, caught.value.reason) == (400, "malformed_json")


@pytest.mark.parametrize("raw", [b'{"a": "\\ud800"}', b'{"a": NaN}', b'{"a": 1e400}', b'\xef\xbb\xbf{"a": 1}'[3:]])
def test_what_pythons_json_reads_is_read(raw: bytes) -> None:
    assert "a" in decode_body(raw)


def test_a_path_without_prompts_is_routed_by_load() -> None:
    assert (failure("/v1/models", {}).status, failure("/v1/models", {}).reason) == (None, "no_prompt")


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/v1/responses", {"input": "a", "previous_response_id": "r1"}, "stored_history"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"mm_hashes": {}, "x": 1}}, "multimodal"),
        ("/v1/embeddings", {}, "no_prompt"),
        ("/score", {"queries": {"content": []}}, "multimodal"),
        ("/rerank", {}, "no_prompt"),
    ],
)
def test_what_only_the_engine_can_tokenize_is_routed_by_load(path: str, body: dict[str, Any], reason: str) -> None:
    assert (failure(path, body).status, failure(path, body).reason) == (None, reason)


@pytest.mark.parametrize("path", sorted(PROMPT_PATHS))
@pytest.mark.parametrize("body", [[], "x", None, 5], ids=repr)
def test_a_body_that_is_no_object_is_refused_everywhere(path: str, body: Any) -> None:
    assert failure(path, body).status == 400


def test_a_message_error_says_where_it_is() -> None:
    body = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": {"x": 1}}]}
    assert failure(CHAT, body).message == "messages[1].content must be a string or an array of parts"


def test_query_strings_and_trailing_slashes_do_not_matter() -> None:
    assert parse_body("/v1/completions/?x=1", {"prompt": "a"}).prompts == (Text(text="a"),)


def test_pooling_takes_texts_ids_and_messages() -> None:
    assert parse_body("/v1/embeddings", {"input": ["a", "b"]}).prompts == (Text(text="a"), Text(text="b"))
    assert parse_body("/pooling", {"input": [[1, 2], [3]]}).prompts == (Tokens([1, 2]), Tokens([3]))
    chat = parse_body("/classify", {"messages": [{"role": "user", "content": "a"}]}).prompts[0]
    assert isinstance(chat, Chat)
    assert chat.template_kwargs == {"add_generation_prompt": False, "continue_final_message": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": "q", "text_2": ["a", "b"]}),
        ("/v1/score", {"queries": ["q", "r"], "documents": ["a", "b"]}),
        ("/rerank", {"query": "q", "documents": ["a"]}),
        ("/v2/rerank", {"query": "q", "documents": ["a"]}),
    ],
)
def test_scoring_uses_the_query_as_a_prefix_and_says_so(path: str, body: dict[str, Any]) -> None:
    request = parse_body(path, body)
    assert request.prompts == (Text(text="q"),)
    assert request.prefix_only


def test_custom_and_namespaced_tools_become_functions() -> None:
    tools = [
        {"type": "custom", "name": "run"},
        {"type": "namespace", "name": "fs", "tools": [{"type": "function", "name": "read"}]},
        {"type": "web_search"},
    ]
    chat = parse_body("/v1/responses", {"input": "a", "tools": tools}).prompts[0]
    assert isinstance(chat, Chat)
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["run", "fs__read"]


def test_tools_added_and_removed_in_system_messages_are_resolved() -> None:
    schema = {"type": "object"}
    changes = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}},
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": {"name": "c", "input_schema": schema}},
        },
    ]
    body = {
        "messages": [{"role": "user", "content": "x"}, {"role": "system", "content": changes}],
        "tools": [{"name": name, "input_schema": schema} for name in "ab"],
        "max_tokens": 1,
    }
    chat = parse_body("/v1/messages", body).prompts[0]
    assert isinstance(chat, Chat)
    assert [tool["function"]["name"] for tool in chat.tools or ()] == ["b", "c"]


# Hostile input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
def test_a_lone_surrogate_is_refused_as_the_engine_does(path: str, qwen3: LocalTokenizer) -> None:
    text = "a\ud800b"
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"prompt": text, "input": text, "messages": messages, "max_tokens": 1}
    if path == "/v1/responses":
        del body["prompt"]
    with pytest.raises(TokenizationError) as caught:
        qwen3.tokenize(path, body)
    assert (caught.value.status, caught.value.reason) == (400, "lone_surrogate")


def test_nul_is_text_like_any_other(qwen3: LocalTokenizer) -> None:
    ids = qwen3.tokenize("/v1/completions", {"prompt": "a\0b"}).token_ids
    assert qwen3.decode(ids) == "a\0b"


@pytest.mark.parametrize("character", ["a", " ", "\n", "\u0301", "\U0001f600"])
def test_ten_million_times_one_character_is_routed_by_load_at_once(character: str, qwen3: LocalTokenizer) -> None:
    body = {"messages": [{"role": "user", "content": character * 10_000_000}]}
    start = time.perf_counter()
    with pytest.raises(TokenizationError) as caught:
        qwen3.tokenize(CHAT, body)
    assert (caught.value.status, caught.value.reason) == (None, "too_long")
    assert time.perf_counter() - start < 5.0  # encoding it would take that long; rendering takes milliseconds


def test_a_deeply_nested_tool_schema_is_refused_not_crashed_on(qwen3: LocalTokenizer) -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"properties": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    with pytest.raises(TokenizationError) as caught:
        qwen3.tokenize(CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    assert caught.value.status == 400


def test_deeply_nested_arguments_of_a_past_call_read_as_none(qwen3: LocalTokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '"arguments": {}' in qwen3.decode(qwen3.tokenize(CHAT, {"messages": messages}).token_ids)


_json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls", "id", "input"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
_fields = [
    "messages",
    "prompt",
    "input",
    "tools",
    "tool_choice",
    "system",
    "token_ids",
    "chat_template_kwargs",
    "documents",
]
_fields += ["reasoning_effort", "kv_transfer_params", "thinking", "output_config", "reasoning", "instructions", "query"]


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(sorted(PROMPT_PATHS)), body=st.dictionaries(st.sampled_from(_fields), _json, max_size=5))
def test_no_json_makes_it_fail_in_any_other_way(path: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(TokenizationError):
        assert len(load("qwen3").tokenize(path, body).token_ids) >= 0
