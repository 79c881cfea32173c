"""Token ids and refusals of a real vLLM 0.32 for the same requests (tests/data/tokenizers/README.md)."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tokenization.conftest import load
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer

RECORDED = Path(__file__).resolve().parent.parent / "data" / "tokenizers" / "vllm_0_32_render.jsonl"
CASES: list[dict[str, Any]] = [json.loads(line) for line in RECORDED.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['path']}: {case['name']}" for case in CASES])
def test_ids_and_refusals_equal_the_engines(case: dict[str, Any], tokenizer: LocalTokenizer, model: str) -> None:
    expected = case["answers"][model]
    before = json.dumps(case["body"])
    if expected == 400:
        with pytest.raises(TokenizationError) as refusal:
            tokenizer.tokenize(case["path"], case["body"])
        assert refusal.value.status == 400
        return
    result = tokenizer.tokenize(case["path"], case["body"])
    assert json.dumps(case["body"]) == before, "the body belongs to the caller"
    ids: Any = result.token_ids.tolist()
    if case["path"] == "/v1/completions":
        ids = [ids, *(others.tolist() for others in result.batch)]
    assert ids == expected


CAPTURES = ("http_render_chat", "http_render_completions", "http_messages_render", "http_tokenize", "http_generate")

# The recorded engine had the template of Llama 3, not 3.1: no date block, every message trimmed.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def llama3(shared: Path) -> LocalTokenizer:
    if not (shared / "tokenizers" / "llama3_1").is_dir():
        pytest.skip("needs the Llama 3.1 tokenizer from the shared fixtures")
    return load("llama3_1", shared).with_template(LLAMA3)


@pytest.mark.parametrize("name", CAPTURES)
def test_ids_equal_the_captured_http_answers(name: str, llama3: LocalTokenizer, shared: Path) -> None:
    capture = json.loads((shared / "captures" / f"{name}.json").read_text())
    answer = capture["response"][0] if isinstance(capture["response"], list) else capture["response"]
    result = llama3.tokenize(capture["path"], capture["body"])
    if name == "http_generate":
        assert result.token_ids.tolist() == capture["body"]["token_ids"]
        assert result.source == "given"
    else:
        assert result.token_ids.tolist() == answer.get("token_ids", answer.get("tokens"))
