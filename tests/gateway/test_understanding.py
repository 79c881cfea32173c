"""What is counted of prompts with images while a request is understood."""

import json

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.fleet import Fleet
from gateway.config_document import Model
from gateway.extproc.decision import Head, Rejected
from gateway.metrics import Metrics
from gateway.served_models import ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Ask, Understanding
from tokenization.errors import TokenizationError, refuse, unroutable
from tokenization.tokenized import Extra, Source, Tokenized

HEAD = Head(method="POST", path="/v1/chat/completions", headers={"content-type": "application/json"}, request_id="r")
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


class Says:
    """A tokenizer with one answer."""

    def __init__(self, answer: Tokenized | TokenizationError) -> None:
        self.answer = answer

    async def tokenize(self, path: str, body: object, **_: object) -> Tokenized:
        if isinstance(self.answer, TokenizationError):
            raise self.answer
        return self.answer


async def counted(answer: Tokenized | TokenizationError) -> tuple[dict[tuple[str, str], float], float, Ask | Rejected]:
    """(source, outcome) -> prompts with images; tokens of their images; what became of the request."""
    registry = CollectorRegistry()
    models = ServedModels({"m": Model()}, Fleet())
    understanding = Understanding(models, lambda _: Says(answer), 1.0, Metrics(registry), NoTracing(), lambda: 0.0)
    ask = await understanding.understand(HEAD, BODY)
    samples = [sample for family in registry.collect() for sample in family.samples]
    prompts = {
        (it.labels["source"], it.labels["outcome"]): it.value
        for it in samples
        if it.name == "warmroute_media_prompts_total"
    }
    return prompts, registry.get_sample_value("warmroute_media_prompt_tokens_sum") or 0.0, ask


def prompt(source: Source, extras: tuple[Extra, ...], media: tuple[str, ...], unread: str = "") -> Tokenized:
    ids = np.arange(100, dtype=np.uint32)
    return Tokenized(token_ids=ids, extras=extras, media=media, media_unread=unread, source=source)


ONE, TWO, NAMELESS = Extra("a", 3, 16), Extra("b", 40, 4), Extra("", 40, 4)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (refuse("the image's data URL is not base64", "image_refused"), ("local", "image_refused")),
        (unroutable("image_model", "nobody knows --model"), ("local", "image_model")),
        (unroutable("media", "a video"), ("local", "media")),
        (prompt("local", (ONE,), ("image", "image"), "image_url"), ("local", "image_url")),
        (prompt("engine", (), ("unknown",)), ("engine", "unnamed")),
        (prompt("engine", (ONE, NAMELESS), ("image", "image")), ("engine", "unnamed")),
        (prompt("engine", (ONE,), ("image", "image")), ("engine", "unnamed")),
        (prompt("engine", (ONE, TWO), ("image", "image")), ("engine", "named")),
        (prompt("local", (ONE, TWO), ("image", "image")), ("local", "named")),
    ],
)
async def test_a_prompt_with_images_is_counted_by_who_read_them_and_how_far(
    answer: Tokenized | TokenizationError, outcome: tuple[str, str]
) -> None:
    prompts, tokens, ask = await counted(answer)
    assert prompts == {outcome: 1}
    assert tokens == (sum(it.length for it in answer.extras) if isinstance(answer, Tokenized) else 0)
    assert isinstance(ask, Rejected) == (outcome[1] == "image_refused")


@pytest.mark.parametrize("answer", [unroutable("no_template", "none"), refuse("empty"), prompt("local", (), ())])
async def test_a_prompt_without_images_is_not_counted(answer: Tokenized | TokenizationError) -> None:
    prompts, tokens, _ = await counted(answer)
    assert (prompts, tokens) == ({}, 0)
