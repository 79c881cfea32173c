"""Backends: off the event loop, within their budget, and never an exception of another kind."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tokenization.backends import EstimateBackend, LocalBackend, text_size
from tokenization.breaker import Breaker, State
from tokenization.engine_backend import EngineBackend
from tokenization.errors import TokenizationError
from tokenization.estimate import estimate
from tokenization.local import LocalTokenizer
from tokenization.tokenized import Extra

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
RENDERED = {"token_ids": [1, 2, 3], "features": None, "request_id": "x"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


# local -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "here"), [(1, True), (5_000, False), (50_000, False)])
async def test_only_the_shortest_requests_are_answered_on_the_event_loop(
    qwen3: LocalTokenizer, monkeypatch: pytest.MonkeyPatch, words: int, here: bool
) -> None:
    backend = LocalBackend(qwen3)
    real, threads = qwen3.tokenize, []

    def noted(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*arguments, **options)

    monkeypatch.setattr(backend.tokenizer, "tokenize", noted)
    body = {"messages": [{"role": "user", "content": "a " * words}]}
    result = await backend.tokenize(CHAT, body)
    assert result.token_ids.tolist() == real(CHAT, body).token_ids.tolist()
    assert (threads[0] == threading.get_ident()) == here
    assert backend.counts == {"ok": 1}
    await backend.close()


async def test_errors_are_counted_by_reason(qwen3: LocalTokenizer) -> None:
    backend = LocalBackend(qwen3)
    with pytest.raises(TokenizationError):
        await backend.tokenize(CHAT, {"messages": 5})
    assert backend.counts == {"invalid_request": 1}
    await backend.close()


async def test_a_bug_costs_one_request_its_prefix_and_is_logged(
    qwen3: LocalTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    backend = LocalBackend(qwen3)
    monkeypatch.setattr(backend.tokenizer, "tokenize", broken)
    with pytest.raises(TokenizationError) as caught:
        await backend.tokenize(CHAT, BODY, size=12)
    assert (caught.value.status, caught.value.reason) == (None, "internal")
    assert backend.counts == {"internal": 1}
    assert "tokenization_failed path=/v1/chat/completions size=12" in caplog.text
    await backend.close()


async def test_images_that_only_the_engine_can_read_are_counted_by_reason(vision: LocalTokenizer) -> None:
    backend = LocalBackend(vision)
    for url in ("https://example.com/a.png", "data:image/png;base64,AAAA"):
        image = {"type": "image_url", "image_url": {"url": url}}
        messages = [{"role": "system", "content": "You see."}, {"role": "user", "content": [image]}]
        assert not (await backend.tokenize(CHAT, {"messages": messages}, engine_model="m")).complete
    assert backend.counts == {"image_url": 1, "image_data": 1}
    await backend.close()


async def test_small_requests_do_not_wait_for_big_ones(qwen3: LocalTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LocalBackend(qwen3)
    gate = threading.Event()
    real = qwen3.tokenize

    def slow_when_big(path: str, body: dict[str, Any], **options: Any) -> Any:
        if len(str(body)) > 100_000:
            gate.wait(10)
        return real(path, body, **options)

    monkeypatch.setattr(backend.tokenizer, "tokenize", slow_when_big)
    big = {"messages": [{"role": "user", "content": "a " * 100_000}]}
    waiting = [asyncio.create_task(backend.tokenize(CHAT, big)) for _ in range(4)]
    await asyncio.sleep(0.05)
    await asyncio.wait_for(backend.tokenize(CHAT, BODY), 5)
    assert not any(task.done() for task in waiting)
    gate.set()
    await asyncio.gather(*waiting)
    await backend.close()


async def test_a_big_prompt_does_not_stop_the_event_loop(qwen3: LocalTokenizer) -> None:
    backend = LocalBackend(qwen3)
    text = "".join(f"{i} caches hold blocks of tokens. " for i in range(60_000))
    beats = [time.perf_counter()]
    task = asyncio.create_task(backend.tokenize(CHAT, {"messages": [{"role": "user", "content": text}]}))
    while not task.done():
        await asyncio.sleep(0.001)
        beats.append(time.perf_counter())
    assert len((await task).token_ids) > 500_000
    assert len(beats) > 5
    await backend.close()


def test_the_size_of_a_body_is_its_text() -> None:
    assert text_size({"a": ["x" * 100, {"b": "y" * 50}]}, 10_000) >= 150
    assert text_size({"prompt": list(range(100_000))}, 64_000) > 64_000
    assert text_size({"a": "x" * 100, "b": ["y"] * 10**6}, 50) < 10**7


# estimate ----------------------------------------------------------------------------------------------------------


async def test_estimate_gives_one_pseudo_token_per_four_bytes() -> None:
    result = await EstimateBackend().tokenize("/v1/completions", {"prompt": "x" * 4001})
    assert (len(result.token_ids), result.source, result.exact) == (1001, "estimate", False)


def test_estimates_of_a_growing_chat_share_their_beginning() -> None:
    turn1 = [{"role": "user", "content": "Hello, how are you?"}]
    turn2 = [
        *turn1,
        {"role": "assistant", "content": [{"type": "text", "text": "fine"}]},
        {"role": "user", "content": "\ud800"},
    ]
    first = estimate(CHAT, {"messages": turn1}).token_ids
    second = estimate(CHAT, {"messages": turn2}).token_ids
    whole = len(first) - 1
    assert second[:whole].tolist() == first[:whole].tolist()


def test_given_ids_are_not_estimated() -> None:
    result = estimate("/v1/completions", {"prompt": [5, 6]})
    assert (result.token_ids.tolist(), result.source) == ([5, 6], "given")


# engine ------------------------------------------------------------------------------------------------------------


class Engine:
    """A server that answers what the test says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {f"{CHAT}/render": RENDERED}
        self.delay_s = 0.0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, json.loads(await request.read())))
        await asyncio.sleep(self.delay_s)
        answer = self.answers.get(request.path, (404, {"error": {"message": "Not Found"}}))
        status, data = answer if isinstance(answer, tuple) else (200, answer)
        return web.Response(status=status, body=data if isinstance(data, bytes) else json.dumps(data).encode())


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    app = web.Application()
    app.router.add_post("/{path:.*}", engine.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def ask(engine: Engine) -> AsyncIterator[EngineBackend]:
    backend = EngineBackend(engine.url, EstimateBackend(), budget_s=0.5, breaker=Breaker(failures=2, open_s=60.0))
    yield backend
    await backend.close()


async def test_the_request_is_sent_to_render_without_its_streaming(engine: Engine, ask: EngineBackend) -> None:
    result = await ask.tokenize(CHAT, {**BODY, "stream": True, "stream_options": {}, "temperature": 1})
    assert (result.token_ids.tolist(), result.source, result.api) == ([1, 2, 3], "engine", "chat")
    assert engine.asked == [(f"{CHAT}/render", {**BODY, "temperature": 1, "return_mm_kwargs": False})]


async def test_completions_answer_one_prompt_per_element(engine: Engine, ask: EngineBackend) -> None:
    engine.answers["/v1/completions/render"] = [{"token_ids": [1]}, {"token_ids": [2, 3]}]
    result = await ask.tokenize("/v1/completions", {"model": "m", "prompt": ["a", "b"]})
    assert [result.token_ids.tolist(), *(ids.tolist() for ids in result.batch)] == [[1], [2, 3]]


async def test_images_without_names_are_still_known_to_be_there(engine: Engine, ask: EngineBackend) -> None:
    engine.answers = {f"{CHAT}/render": (403, {}), "/tokenize": {"tokens": [1, 7, 7, 2]}}
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    result = await ask.tokenize(CHAT, {"model": "m", "messages": [{"role": "user", "content": [image]}]})
    assert (result.extras, result.media) == ((), ("unknown",))


async def test_images_come_with_their_hashes_and_places(engine: Engine, ask: EngineBackend) -> None:
    engine.answers[f"{CHAT}/render"] = {
        "token_ids": [1, 7, 7, 2],
        "features": {"mm_hashes": {"image": ["abc"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}},
    }
    result = await ask.tokenize(CHAT, BODY)
    assert (result.extras, result.media) == ((Extra("abc", 1, 2),), ("image",))


@pytest.mark.parametrize("status", [403, 404])
async def test_without_render_routes_tokenize_is_asked_from_then_on(
    engine: Engine, ask: EngineBackend, status: int
) -> None:
    engine.answers = {f"{CHAT}/render": (status, {}), "/tokenize": {"count": 2, "tokens": [4, 5]}}
    for _ in range(2):
        assert (await ask.tokenize(CHAT, {**BODY, "reasoning_effort": "none"})).token_ids.tolist() == [4, 5]
    assert [path for path, _ in engine.asked] == [f"{CHAT}/render", "/tokenize", "/tokenize"]
    question = engine.asked[-1][1]
    assert question["chat_template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": False}
    assert (question["messages"], question["add_generation_prompt"]) == (BODY["messages"], True)


async def test_an_unknown_model_does_not_switch_render_off(engine: Engine, ask: EngineBackend) -> None:
    engine.answers = {}
    with pytest.raises(TokenizationError) as caught:
        await ask.tokenize(CHAT, BODY)
    assert (caught.value.status, caught.value.reason) == (None, "engine_refused")
    engine.answers = {f"{CHAT}/render": RENDERED}
    assert (await ask.tokenize(CHAT, BODY)).source == "engine"


async def test_what_the_engine_refuses_is_the_clients_400(engine: Engine, ask: EngineBackend) -> None:
    engine.answers[f"{CHAT}/render"] = (400, {"error": {"message": "too long", "type": "BadRequestError"}})
    for _ in range(5):
        with pytest.raises(TokenizationError, match="too long") as caught:
            await ask.tokenize(CHAT, BODY)
        assert caught.value.status == 400
    assert ask.breaker.state(0) is State.CLOSED


async def test_over_budget_the_fallback_answers_at_once_and_is_counted(engine: Engine, ask: EngineBackend) -> None:
    engine.delay_s = 30.0
    started = time.perf_counter()
    results = [await ask.tokenize(CHAT, BODY) for _ in range(10)]
    assert time.perf_counter() - started < 5.0  # two budgets of 0.5 s, then the breaker is open
    assert {result.source for result in results} == {"estimate"}
    assert ask.counts == {"timeout": 2, "breaker_open": 8}
    assert len(engine.asked) == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, {}), "bad_answer"),
        (b"no json", "bad_answer"),
        ({"ids": []}, "bad_answer"),
        ({"token_ids": ["x"]}, "bad_answer"),
    ],
)
async def test_a_broken_answer_is_a_failure(engine: Engine, ask: EngineBackend, answer: Any, reason: str) -> None:
    engine.answers[f"{CHAT}/render"] = answer
    assert (await ask.tokenize(CHAT, BODY)).source == "estimate"
    assert ask.counts == {reason: 1}


async def test_an_engine_that_is_down_is_a_failure(free_port: Callable[[], int]) -> None:
    backend = EngineBackend(f"http://127.0.0.1:{free_port()}", EstimateBackend())
    assert (await backend.tokenize(CHAT, BODY)).source == "estimate"
    assert backend.counts == {"unreachable": 1}
    await backend.close()


async def test_given_ids_ask_nobody(engine: Engine, ask: EngineBackend) -> None:
    result = await ask.tokenize("/inference/v1/generate", {"token_ids": [9, 8]})
    assert (result.token_ids.tolist(), result.source) == ([9, 8], "given")
    assert engine.asked == []


async def test_a_lone_surrogate_is_refused_before_it_is_sent(engine: Engine, ask: EngineBackend) -> None:
    with pytest.raises(TokenizationError) as caught:
        await ask.tokenize(CHAT, {**BODY, "messages": [{"role": "user", "content": "\ud800"}]})
    assert (caught.value.status, caught.value.reason) == (400, "lone_surrogate")
    assert engine.asked == []


async def test_a_cancelled_request_gives_its_place_back(engine: Engine, ask: EngineBackend) -> None:
    engine.delay_s = 30.0
    task = asyncio.create_task(ask.tokenize(CHAT, BODY))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ask.breaker.in_flight == 0
    assert ask.breaker.state(0) is State.CLOSED
