"""The least that could be called a router: `round_robin.py PORT URL ...` sends requests to the engines in turn."""

import itertools
import sys

import aiohttp
from aiohttp import web


def application(engines: list[str]) -> web.Application:
    turns = itertools.cycle(engines)

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        try:
            async with client.post(
                next(turns) + request.path, data=body, headers={"content-type": "application/json"}
            ) as it:
                answer = web.StreamResponse(status=it.status, headers={"x-sim-engine": it.headers["x-sim-engine"]})
                await answer.prepare(request)
                async for chunk in it.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
                return answer
        except aiohttp.ClientConnectorError as error:
            return web.Response(status=502, text=str(error))

    async def session(app: web.Application):  # type: ignore[no-untyped-def]
        nonlocal client
        async with aiohttp.ClientSession() as client:
            yield

    client: aiohttp.ClientSession
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{path:.*}", forward)
    app.cleanup_ctx.append(session)
    return app


if __name__ == "__main__":
    web.run_app(application(sys.argv[2:]), host="127.0.0.1", port=int(sys.argv[1]), print=None)
