"""Prefill legs against real sockets: every way an engine can fail has one name, and giving up closes the connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from gateway.prefill_leg import MOST_BYTES, LegFailed, PrefillLegs

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[str]]


@pytest.fixture
async def serve(free_port: Callable[[], int]) -> AsyncIterator[Serve]:
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/", handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{port}/"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def legs() -> AsyncIterator[PrefillLegs]:
    made = PrefillLegs()
    yield made
    await made.close()


async def failure(legs: PrefillLegs, url: str, limit_s: float = 5.0) -> LegFailed:
    with pytest.raises(LegFailed) as caught:
        await legs.send(url, {}, b"{}", limit_s)
    return caught.value


async def test_nobody_there(legs: PrefillLegs, free_port: Callable[[], int]) -> None:
    assert (await failure(legs, f"http://127.0.0.1:{free_port()}/")).reason == "connect"


@pytest.mark.parametrize(("status", "reason"), [(400, "client_error"), (429, "client_error"), (503, "server_error")])
async def test_a_status_that_is_not_200(legs: PrefillLegs, serve: Serve, status: int, reason: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text="no")

    failed = await failure(legs, await serve(answer))
    assert (failed.reason, failed.status) == (reason, status)


async def test_a_connection_that_ends_without_an_answer(legs: PrefillLegs, serve: Serve) -> None:
    async def hang_up(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(1)
        return web.Response()

    assert (await failure(legs, await serve(hang_up))).reason == "broken"


async def test_an_answer_that_never_ends_is_cut_off(legs: PrefillLegs, serve: Serve) -> None:
    async def flood(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(MOST_BYTES // 2**20 + 8):
            await response.write(bytes(2**20))
        return response

    assert (await failure(legs, await serve(flood), 20.0)).reason == "too_large"


async def test_too_slow_ends_the_request_at_the_engine_too(legs: PrefillLegs, serve: Serve) -> None:
    gone = asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            gone.set()
            raise
        return web.Response()

    assert (await failure(legs, await serve(slow), 0.2)).reason == "timeout"
    await asyncio.wait_for(gone.wait(), 5)


async def test_the_answer_comes_back_over_one_connection(legs: PrefillLegs, serve: Serve) -> None:
    peers = set()

    async def answer(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        assert request.headers["x-request-id"] == "r"
        return web.Response(body=await request.read())

    url = await serve(answer)
    sent = asyncio.Event()
    for number in range(3):
        body = b'{"n": %d}' % number
        assert await legs.send(url, {"x-request-id": "r"}, body, 5.0, sent) == body
    assert sent.is_set()
    assert len(peers) == 1
