"""Parity with the engine's ids, and handing ids over to it."""

from typing import Any

import numpy as np
import pytest

from tokenization.handover import with_token_ids
from tokenization.local import LocalTokenizer
from tokenization.parity import compare

CHAT = "/v1/chat/completions"


def words(ids: Any) -> str:
    return "".join(f"<{i}>" for i in ids)


def test_the_first_difference_is_shown_with_its_text_and_what_comes_before() -> None:
    found = compare([1, 2, 9, 9], [1, 2, 3, 4], words)
    assert found is not None
    assert (found.position, found.engine_id, found.router_id) == (2, 9, 3)
    assert found.message == "token 2: the engine has 9 '<9>', the router 3 '<3>', after '<1><2>'"


def test_blocks_in_the_middle_of_a_prompt_are_compared_at_their_place() -> None:
    router = np.arange(100, dtype=np.uint32)
    assert compare(list(range(32, 48)), router, words, offset=32) is None
    found = compare([*range(32, 47), 0], router, words, offset=32)
    assert found is not None
    assert (found.position, found.before) == (47, "<43><44><45><46>")


def test_generated_tokens_behind_the_prompt_are_no_difference() -> None:
    assert compare([1, 2, 3, 77], [1, 2, 3], words) is None
    found = compare([1, 2, 3, 77], [1, 2, 3], words, prompt_only=False)
    assert found is not None
    assert (found.position, found.engine_id, found.router_id, found.router_text) == (3, 77, None, "")


def test_an_engine_that_has_announced_less_is_no_difference() -> None:
    assert compare([1, 2], [1, 2, 3], words) is None
    assert compare([], [1, 2, 3], words) is None


def test_a_doubled_bos_is_found_on_the_second_token(llama3_1: LocalTokenizer) -> None:
    ours = llama3_1.tokenize(CHAT, {"messages": [{"role": "user", "content": "Hi"}]}).token_ids
    found = compare([128000, *ours.tolist()], ours, llama3_1.decode)
    assert found is not None
    assert (
        "token 1: the engine has 128000 '<|begin_of_text|>', the router 128006 '<|start_header_id|>'" in found.message
    )


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}


def test_ids_that_no_tokenizer_has_are_compared_too(qwen3: LocalTokenizer) -> None:
    found = compare([9707, 2**40], [9707, 1879], qwen3.decode)
    assert found is not None
    assert (found.engine_text, found.router_text) == ("", " world")


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


def test_ids_are_handed_over_in_a_copy_of_the_body(qwen3: LocalTokenizer) -> None:
    tokenized = qwen3.tokenize(CHAT, BODY)
    handed = with_token_ids({**BODY, "kv_transfer_params": {"a": 1}}, tokenized)
    assert handed is not None
    assert handed["kv_transfer_params"] == {"a": 1, "prompt_token_ids": tokenized.token_ids.tolist()}
    assert "kv_transfer_params" not in BODY
    assert qwen3.tokenize(CHAT, handed).token_ids.tolist() == tokenized.token_ids.tolist()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        (CHAT, {**BODY, "echo": True}),
        (CHAT, {**BODY, "kv_transfer_params": {"prompt_token_ids": [1, 2]}}),
        (CHAT, {"messages": [*BODY["messages"], {"role": "assistant", "content": "b"}, {"role": "user", "content": [IMAGE]}]}),
    ],
)  # fmt: skip
def test_ids_that_the_engine_would_not_take_are_not_handed_over(
    path: str, body: dict[str, Any], qwen3: LocalTokenizer
) -> None:
    assert with_token_ids(body, qwen3.tokenize(path, body)) is None
