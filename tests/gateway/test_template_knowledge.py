"""What the template probe finds reaches requests and metrics, and its failures only the log."""

import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from gateway.config_document import Model
from gateway.metrics import Metrics
from gateway.served_models import Served
from gateway.template_knowledge import TemplateKnowledge
from tokenization.local import LocalTokenizer

QWEN3 = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3"


@pytest.fixture(scope="module")
def qwen3() -> LocalTokenizer:
    return LocalTokenizer.from_directory(QWEN3)


@pytest.fixture
def knowledge() -> TemplateKnowledge:
    return TemplateKnowledge(Metrics(CollectorRegistry()))


def metric(knowledge: TemplateKnowledge, model: str) -> float | None:
    registry = knowledge._metrics.registry
    return registry.get_sample_value("warmroute_template_rewrites_history", {"model": model})


async def test_a_template_that_breaks_the_probe_is_unknown_and_logged(
    knowledge: TemplateKnowledge,
    qwen3: LocalTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def explode(*_: Any, **__: Any) -> str:
        raise RuntimeError("boom")

    monkeypatch.setattr(qwen3, "render_chat", explode)
    await knowledge.learn({}, {"": qwen3})
    assert knowledge.rewrites_history(Served("m", "m")) is None
    assert metric(knowledge, "default") is None
    assert "template_probe_failed model=default" in caplog.text


async def test_qwen3_drops_think_blocks_by_default(knowledge: TemplateKnowledge, qwen3: LocalTokenizer) -> None:
    assert knowledge.rewrites_history(Served("m", "m")) is None  # nothing was learned yet
    await knowledge.learn({"m": Model()}, {"m": qwen3})
    assert knowledge.rewrites_history(Served("alias", "m")) is True
    assert knowledge.rewrites_history(Served("other", "other")) is None
    assert metric(knowledge, "m") == 1.0


async def test_what_the_configuration_says_is_believed(knowledge: TemplateKnowledge, qwen3: LocalTokenizer) -> None:
    await knowledge.learn({"m": Model(rewrites_history=False)}, {"m": qwen3, "": qwen3})
    assert knowledge.rewrites_history(Served("m", "m")) is False
    assert knowledge.rewrites_history(Served("adapter", "another")) is True
    await knowledge.learn({"m": Model(rewrites_history=True)}, {})
    assert (metric(knowledge, "m"), metric(knowledge, "default")) == (1.0, None)


async def test_a_tokenizer_that_a_reload_keeps_is_not_asked_again(
    knowledge: TemplateKnowledge, qwen3: LocalTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            await knowledge.learn({"m": Model()}, {"m": qwen3})
    assert caplog.text.count("template_probed") == 1
    assert knowledge.rewrites_history(Served("m", "m")) is True
    await knowledge.learn({}, {})  # another configuration in between: what it does not use is not remembered
    assert knowledge.rewrites_history(Served("m", "m")) is None
    assert not knowledge._found
