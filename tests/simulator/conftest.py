"""The real Qwen3 tokenizer, loaded once."""

from pathlib import Path

import pytest

from simulator.reply import ReplyWriter
from tokenization.local import LocalTokenizer

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3"


@pytest.fixture(scope="session")
def tokenizer() -> LocalTokenizer:
    return LocalTokenizer.from_directory(MODEL)


@pytest.fixture(scope="session")
def writer(tokenizer: LocalTokenizer) -> ReplyWriter:
    return ReplyWriter(tokenizer, typical_tokens=40)
