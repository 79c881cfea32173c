"""GET /state/dump on the admin port: the fleet as `warmroute explain --state` reads it. `?keys=N` bounds the block keys."""

import asyncio
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from fleet.fleet import Fleet
from gateway.fleet_dump import KEYS, fleet_rows, with_keys
from gateway.hybrid_matching import Layout
from gateway.matching import Streams
from indexer.index import Index

MOST_KEYS = 10_000_000


def dump_page(
    fleet: Fleet,
    index: Index,
    streams: Streams,
    layout_of: Callable[[int], Layout],
    engine_block_of: Callable[[int], int],
) -> web.RouteDef:
    async def answer(request: web.Request) -> web.Response:
        given = request.query.get("keys", str(KEYS))
        if not given.isdecimal() or int(given) > MOST_KEYS:
            return web.json_response({"error": f"keys: expected 0 to {MOST_KEYS}, got {given!r}"}, status=400)
        rows, at = fleet_rows(fleet, streams, layout_of, engine_block_of), time.time()
        body = await asyncio.to_thread(lambda: msgspec.json.encode(with_keys(rows, index, at, int(given))))
        return web.Response(body=body, content_type="application/json")

    return web.get("/state/dump", answer)
