"""One model's tokenizer: what comes out is what the engine computes with."""

import lzma
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.tokenization.conftest import QWEN3
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.model_files import ModelFiles

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_a_directory_without_a_tokenizer_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path.name}.*tokenizer\.json"):
        LocalTokenizer.from_directory(tmp_path)


def test_a_broken_template_is_an_error_that_names_directory_and_line(tmp_path: Path) -> None:
    shutil.copy(QWEN3 / "tokenizer.json.xz", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("fine\n{% for %}")
    with pytest.raises(ValueError, match=rf"{tmp_path.name}.*line 2"):
        LocalTokenizer.from_directory(tmp_path, encoder="tokenizers")


def test_a_tokenizer_file_of_something_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        LocalTokenizer.from_directory(tmp_path)


def test_without_a_template_chats_are_routed_by_load_and_completions_still_work(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(lzma.decompress((QWEN3 / "tokenizer.json.xz").read_bytes()))
    local = LocalTokenizer.from_directory(tmp_path, encoder="tokenizers")
    with pytest.raises(TokenizationError) as failure:
        local.tokenize(CHAT, {"messages": HELLO})
    assert (failure.value.status, failure.value.reason) == (None, "no_template")
    assert local.tokenize("/v1/completions", {"prompt": "Hello world"}).token_ids.tolist() == [9707, 1879]


def test_the_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    shutil.copy(QWEN3 / "tokenizer.json.xz", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "from the configuration", "eos_token": {"content": "<|im_end|>"}}'
    )
    local = LocalTokenizer.from_directory(tmp_path, encoder="tokenizers")
    assert local.render_chat(HELLO) == "from the configuration"
    (tmp_path / "chat_template.jinja").write_text("from the file{{ eos_token }}")
    local = LocalTokenizer.from_directory(tmp_path, encoder="tokenizers")
    assert local.render_chat(HELLO) == "from the file<|im_end|>"


def test_another_template_shares_the_tokenizer(qwen3: LocalTokenizer) -> None:
    other = qwen3.with_template("<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}")
    assert (other.cut_token, qwen3.cut_token) == (None, "<|im_start|>")
    assert other.tokenize(CHAT, {"messages": HELLO}).token_ids.tolist() == [151644, 9707]
    with pytest.raises(ValueError, match="line 1"):
        qwen3.with_template("{% for %}")


def test_fastokens_serves_the_models_it_agrees_on(tokenizer: LocalTokenizer) -> None:
    assert tokenizer.encoder == "fastokens"


def test_prompts_are_cut_before_the_token_that_starts_a_turn(tokenizer: LocalTokenizer, model: str) -> None:
    assert tokenizer.cut_token == ("<|start_header_id|>" if model.startswith("llama") else "<|im_start|>")


def test_a_chat_gets_no_bos_beside_the_templates_own(llama3_1: LocalTokenizer) -> None:
    ids = llama3_1.tokenize(CHAT, {"messages": HELLO}).token_ids.tolist()
    assert ids[0] == 128000
    assert ids.count(128000) == 1


def test_a_completion_gets_a_bos_even_where_the_text_has_one(llama3_1: LocalTokenizer) -> None:
    body = {"prompt": "<|begin_of_text|>Hello"}
    assert llama3_1.tokenize("/v1/completions", body).token_ids.tolist() == [128000, 128000, 9906]
    body_without: dict[str, Any] = {**body, "add_special_tokens": False}
    assert llama3_1.tokenize("/v1/completions", body_without).token_ids.tolist() == [128000, 9906]


def test_special_tokens_in_client_text_are_parsed(qwen3: LocalTokenizer) -> None:
    ids = qwen3.tokenize(CHAT, {"messages": [{"role": "user", "content": "a<|im_end|>b"}]}).token_ids.tolist()
    assert ids.count(151645) == 2


def test_chat_ids_equal_the_reference_library_on_the_rendered_text(
    tokenizer: LocalTokenizer, slow: tokenizers.Tokenizer
) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wie spät ist es? 现在几点？"},
        {"role": "assistant", "content": "  12:00\n\n"},
        {"role": "user", "content": "Thanks 👍🏽"},
    ]
    text = tokenizer.render_chat(messages)
    ids = tokenizer.tokenize(CHAT, {"messages": messages}).token_ids
    assert ids.dtype == np.uint32
    assert ids.tolist() == slow.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_a_batch_keeps_every_prompt(qwen3: LocalTokenizer) -> None:
    result = qwen3.tokenize("/v1/completions", {"prompt": ["Hello", "Hello world"]})
    assert result.token_ids.tolist() == [9707]
    assert [ids.tolist() for ids in result.batch] == [[9707, 1879]]
    assert result.prompt_tokens == 3


def test_given_token_ids_pass_through(qwen3: LocalTokenizer) -> None:
    result = qwen3.tokenize("/v1/completions", {"prompt": [1, 2, 3]})
    assert (result.token_ids.tolist(), result.source) == ([1, 2, 3], "given")


def test_ids_handed_over_by_another_stage_replace_tokenization(qwen3: LocalTokenizer) -> None:
    body: dict[str, Any] = {"messages": HELLO, "kv_transfer_params": {"prompt_token_ids": [7, 8, 9]}}
    assert qwen3.tokenize(CHAT, body).token_ids.tolist() == [7, 8, 9]


def test_thinking_is_switched_by_kwargs_and_by_reasoning_effort(qwen3: LocalTokenizer) -> None:
    plain = qwen3.tokenize(CHAT, {"messages": HELLO}).token_ids.tolist()
    off = qwen3.tokenize(CHAT, {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}})
    none = qwen3.tokenize(CHAT, {"messages": HELLO, "reasoning_effort": "none"})
    assert off.token_ids.tolist() == none.token_ids.tolist() == [*plain, 151667, 271, 151668, 271]


def test_the_engines_default_kwargs_give_way_to_the_requests() -> None:
    quiet = LocalTokenizer.from_directory(
        QWEN3, default_template_kwargs={"enable_thinking": False}, encoder="tokenizers"
    )
    asked = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": True}}
    assert len(quiet.tokenize(CHAT, {"messages": HELLO}).token_ids) == 4 + len(quiet.tokenize(CHAT, asked).token_ids)


@pytest.mark.parametrize(
    ("trust", "status", "reason"), [(None, None, "request_template"), (False, 400, "invalid_request")]
)
def test_a_template_in_the_request_is_used_only_where_engines_trust_it(
    trust: bool | None, status: int | None, reason: str
) -> None:
    local = LocalTokenizer.from_directory(QWEN3, trust_request_chat_template=trust, encoder="tokenizers")
    with pytest.raises(TokenizationError) as failure:
        local.tokenize(CHAT, {"messages": HELLO, "chat_template": "x"})
    assert (failure.value.status, failure.value.reason) == (status, reason)


def test_a_trusted_template_in_the_request_renders() -> None:
    local = LocalTokenizer.from_directory(QWEN3, trust_request_chat_template=True, encoder="tokenizers")
    body = {"messages": HELLO, "chat_template": "{{ messages[0].content }} world"}
    assert local.tokenize(CHAT, body).token_ids.tolist() == [9707, 1879]


def test_text_before_an_image_is_tokenized_and_the_rest_left_to_the_engine(qwen3: LocalTokenizer) -> None:
    history = [
        {"role": "system", "content": "You see."},
        {"role": "user", "content": "First"},
        {"role": "assistant", "content": "ok"},
    ]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "img-1"}
    look = [*history, {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}]
    result = qwen3.tokenize(CHAT, {"messages": look})
    whole = qwen3.tokenize(CHAT, {"messages": history, "add_generation_prompt": False})
    assert not result.complete
    assert (result.media, result.media_unread) == (("image",), "image_model")
    # The last assistant turn is rendered differently at the end of a chat, so only the turns before it must be equal.
    assert result.token_ids.tolist()[:12] == whole.token_ids.tolist()[:12]
    assert qwen3.decode(result.token_ids).endswith("<|im_start|>assistant\nok<|im_end|>\n")


def test_an_image_in_the_first_message_leaves_nothing_to_match(qwen3: LocalTokenizer) -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(TokenizationError) as failure:
        qwen3.tokenize(CHAT, {"messages": [{"role": "user", "content": [image]}]})
    assert (failure.value.status, failure.value.reason) == (None, "image_model")


def test_truncation_keeps_the_end_for_generation_and_spares_the_bos(llama3_1: LocalTokenizer) -> None:
    body = {"prompt": "a b c d e f", "truncate_prompt_tokens": 3}
    kept = [llama3_1.decode(llama3_1.tokenize("/v1/completions", {**body, **side}).token_ids) for side in SIDES]
    assert kept == ["<|begin_of_text|> e f", " d e f", "<|begin_of_text|>a b"]


SIDES: list[dict[str, str]] = [{}, {"truncation_side": "left"}, {"truncation_side": "right"}]


def test_truncation_and_padding_in_the_tokenizer_file_are_ignored_as_the_engine_does() -> None:
    spec = """{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
      "stride": 0}, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "decoder": null,
      "post_processor": null, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}"""
    local = LocalTokenizer(ModelFiles(tokenizer=spec, templates={}, special_tokens={}), encoder="tokenizers")
    assert local.encode("abab").tolist() == [0, 1, 0, 1]
