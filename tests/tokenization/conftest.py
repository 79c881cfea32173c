"""Tokenizers for the tests: Qwen3 from the repository, Qwen2.5 derived from it, Llama 3.1 from the shared fixtures."""

import json
import lzma
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tokenization.local import LocalTokenizer
from tokenization.model_files import ModelFiles, read_model_files

REPOSITORY = Path(__file__).resolve().parent.parent.parent
QWEN3 = REPOSITORY / "configs" / "models" / "qwen3"
QWEN2_5_TEMPLATE = REPOSITORY / "tests" / "data" / "tokenizers" / "qwen2_5" / "chat_template.jinja"
QWEN2_5_LAST_ID = 151664


@cache
def qwen3_spec() -> dict[str, Any]:
    """Qwen3's tokenizer.json, parsed. Copy before changing."""
    with lzma.open(QWEN3 / "tokenizer.json.xz") as file:
        return dict(json.load(file))


@cache
def qwen2_5_files() -> ModelFiles:
    """The same BPE without the four tokens that Qwen3 added."""
    spec = dict(qwen3_spec())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["id"] <= QWEN2_5_LAST_ID]
    return ModelFiles(
        tokenizer=json.dumps(spec, ensure_ascii=False),
        templates={"default": QWEN2_5_TEMPLATE.read_text("utf-8")},
        special_tokens={},
    )


@cache
def load(name: str, shared: Path | None = None) -> LocalTokenizer:
    if name == "qwen3":
        return LocalTokenizer.from_directory(QWEN3)
    if name == "qwen2_5":
        return LocalTokenizer(qwen2_5_files())
    assert shared is not None
    return LocalTokenizer.from_directory(shared / "tokenizers" / name)


@cache
def reference(name: str, shared: Path | None = None) -> tokenizers.Tokenizer:
    """The library that defines what is right."""
    if name == "qwen2_5":
        return tokenizers.Tokenizer.from_str(qwen2_5_files().tokenizer)
    assert name == "qwen3" or shared is not None
    directory = QWEN3 if name == "qwen3" else Path(str(shared)) / "tokenizers" / name
    return tokenizers.Tokenizer.from_str(read_model_files(directory).tokenizer)


@pytest.fixture(scope="session")
def qwen3() -> LocalTokenizer:
    return load("qwen3")


@pytest.fixture(scope="session")
def qwen2_5() -> LocalTokenizer:
    return load("qwen2_5")


@pytest.fixture(scope="session")
def llama3_1(shared: Path) -> LocalTokenizer:
    if not (shared / "tokenizers" / "llama3_1").is_dir():
        pytest.skip("needs the Llama 3.1 tokenizer from the shared fixtures")
    return load("llama3_1", shared)


@pytest.fixture(scope="session")
def vision(tmp_path_factory: pytest.TempPathFactory) -> LocalTokenizer:
    """The Qwen2.5-VL that tests/vllm/make_model.py makes, without its weights."""
    folder = tmp_path_factory.mktemp("vision")
    shutil.copy(QWEN3 / "tokenizer.json.xz", folder)
    shutil.copy(REPOSITORY / "tests" / "vllm" / "vision_template.jinja", folder / "chat_template.jinja")
    (folder / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 200_704}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, "patch_size": 14, "merge_size": 2}))
    return LocalTokenizer.from_directory(folder, trust_request_chat_template=True)


@pytest.fixture(params=["qwen3", "qwen2_5", "llama3_1"])
def model(request: pytest.FixtureRequest) -> str:
    """The name of each tokenizer in turn; skips what is not here."""
    request.getfixturevalue(request.param)
    return str(request.param)


@pytest.fixture
def tokenizer(model: str, request: pytest.FixtureRequest) -> LocalTokenizer:
    """Each tokenizer in turn."""
    found = request.getfixturevalue(model)
    assert isinstance(found, LocalTokenizer)
    return found


@pytest.fixture
def slow(model: str, request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    """The reference library's tokenizer of `model`."""
    return reference(model, None if model.startswith("qwen") else request.getfixturevalue("shared"))
