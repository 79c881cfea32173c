"""Finding a model's files."""

import os
from pathlib import Path

import pytest

from tests.tokenization.conftest import QWEN3
from tokenization.model_files import find_model_directory, read_model_files


def test_a_model_that_is_nowhere_is_an_error_that_says_where_was_looked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Qwen/Qwen3-8B.*models--Qwen--Qwen3-8B"):
        find_model_directory("Qwen/Qwen3-8B", tmp_path)


def test_a_directory_is_itself() -> None:
    assert find_model_directory(str(QWEN3)) == QWEN3


def test_the_hub_cache_gives_the_snapshot_of_main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "hub" / "models--Qwen--Qwen3-8B"
    for revision in ("aaa", "bbb"):
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "tokenizer.json").write_text("{}")
    os.utime(model / "snapshots" / "aaa", (1, 1))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert find_model_directory("Qwen/Qwen3-8B").name == "bbb"
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa")
    assert find_model_directory("Qwen/Qwen3-8B").name == "aaa"


def test_special_tokens_are_read_in_both_notations(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null, "chat_template": '
        '[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}'
    )
    files = read_model_files(tmp_path)
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.templates == {"default": "a", "tool_use": "b"}


def test_a_broken_configuration_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not valid JSON"):
        read_model_files(tmp_path)


def test_a_directory_that_is_not_there_is_told_from_one_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        read_model_files(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json and no"):
        read_model_files(tmp_path)
