import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.demo_traffic import Conversation, Observation, Shape, ask, client_session, drive, plan

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[TestServer] = []

    async def begin(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("")).rstrip("/")

    yield begin
    for server in servers:
        await server.close()


def sse(*chunks: dict[str, Any], **headers: str) -> web.Response:
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return web.Response(text=body, content_type="text/event-stream", headers=headers)


def word(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 50, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}},
}


async def test_an_error_status_is_an_observation_with_the_answer(serve: Serve) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=503, text="no endpoint")

    async with client_session() as session:
        observation, reply = await ask(session, await serve(refuse), "m", [])
    assert (observation.error, reply) == ("HTTP 503: no endpoint", "")


async def test_a_server_that_is_not_there_is_an_observation(free_port: Callable[[], int]) -> None:
    async with client_session() as session:
        observation, _ = await ask(session, f"http://127.0.0.1:{free_port()}", "m", [])
    assert observation.error is not None
    assert "ClientConnectorError" in observation.error


async def test_a_stream_without_usage_and_an_error_within_a_stream_count_as_failures(serve: Serve) -> None:
    async def cut(_: web.Request) -> web.Response:
        return sse(word("Hel"))

    async def broken(_: web.Request) -> web.Response:
        return sse(word("Hel"), {"error": {"message": "engine failed"}})

    async with client_session() as session:
        first, _ = await ask(session, await serve(cut), "m", [])
        second, _ = await ask(session, await serve(broken), "m", [])
    assert (first.error, second.error) == ("the stream ended without usage", "engine failed")


async def test_tokens_engine_and_prediction_are_read_from_the_answer(serve: Serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        headers = {"x-sim-engine": "engine-3", "x-warmroute-predicted-cached-tokens": "16"}
        return sse(word("Hel"), word("lo"), USAGE, **headers)

    async with client_session() as session:
        seen, reply = await ask(session, await serve(answer), "m", [])
    assert reply == "Hello"
    assert (seen.engine, seen.prompt_tokens, seen.cached_tokens, seen.reply_tokens) == ("engine-3", 50, 32, 2)
    assert seen.predicted_tokens == 16
    assert 0 < seen.ttft_s <= seen.total_s


async def test_a_conversation_carries_its_replies_forward_and_ends_at_its_first_failure(serve: Serve) -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return sse(word(f"reply {len(bodies)}"), USAGE) if len(bodies) < 3 else web.Response(status=500)

    conversation = Conversation(starts_s=0, system="sys", turns=("a", "b", "c", "d"), pauses_s=(0, 0, 0, 0))
    seen: list[Observation] = []
    observations = await drive(await serve(answer), "m", [conversation], seen.append)
    roles = [message["role"][0] + ":" + message["content"] for message in bodies[2]["messages"]]
    assert roles == ["s:sys", "u:a", "a:reply 1", "u:b", "a:reply 2", "u:c"]
    assert [observation.error is None for observation in observations] == [True, True, False]
    assert seen == observations


@pytest.mark.parametrize("requests", [1, 7, 240])
def test_a_plan_has_the_asked_number_of_requests_and_depends_on_its_seed_only(requests: int) -> None:
    shape = Shape(requests=requests)
    conversations = plan(shape)
    assert sum(len(conversation.turns) for conversation in conversations) == requests
    assert conversations == plan(shape)
    assert conversations != plan(Shape(requests=requests, seed=8))
    assert [c.starts_s for c in conversations] == sorted(c.starts_s for c in conversations)


def test_conversations_of_a_group_share_their_system_prompt() -> None:
    conversations = plan(Shape(requests=120, turns=6, groups=5))
    assert len({conversation.system for conversation in conversations}) == 5
