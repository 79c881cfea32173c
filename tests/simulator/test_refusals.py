"""Planted refusals: what a client sees while they last, and afterwards."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from simulator.reply import ReplyWriter
from simulator.server import EngineServer
from simulator.settings import ServerSettings
from tokenization.local import LocalTokenizer

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.fixture
async def client(tokenizer: LocalTokenizer, writer: ReplyWriter, free_port: Callable[[], int]) -> Any:
    engine = EngineServer(ServerSettings(port=free_port(), speed=20.0, blocks=512), tokenizer, writer)
    async with TestClient(TestServer(engine.app(), host="127.0.0.1", port=engine.settings.port)) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "expected"),
        (b'{"status": 503}', "missing required field `seconds`"),
        (b'{"status": 503, "seconds": 1, "engine": 2}', "unknown field `engine`"),
        (b'{"status": 200, "seconds": 1}', "status 200: not an error; expected 400 to 599"),
    ],
)
async def test_a_plan_that_is_none_is_refused(client: Any, body: bytes, message: str) -> None:
    async with client.post("/sim/refuse", data=body) as answer:
        assert answer.status == 400
        assert message in (await answer.json())["error"]["message"]
    async with client.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200


async def test_completions_are_refused_until_the_plan_ends_and_nothing_else_is(client: Any) -> None:
    await client.post("/sim/refuse", json={"status": 429, "seconds": 0.3})
    async with client.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 429
        assert (await answer.json())["error"]["code"] == 429
    for path in ("/health", "/metrics"):
        async with client.get(path) as answer:
            assert answer.status == 200
    await asyncio.sleep(0.35)
    async with client.post("/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200
