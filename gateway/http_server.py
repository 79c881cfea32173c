"""The metrics port: /metrics for Prometheus, /healthz for people and probes. The admin port: what the gateway knows, as JSON.

Admin endpoints read; only the log level can be changed. They listen on loopback unless configured otherwise, and then a token
is needed (`admin_access`).
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gateway.logs import LEVELS

log = logging.getLogger(__name__)

State = Callable[[], dict[str, Any]]


def metrics_app(registry: CollectorRegistry, ready: Callable[[], bool]) -> web.Application:
    """GET /metrics and GET /healthz (200 while the gateway takes requests, 503 while it drains).

    The page is written in a thread of its own, one at a time: what is registered must bear being collected there.
    """
    writer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="metrics-page")

    async def metrics(_: web.Request) -> web.Response:
        body = await asyncio.get_running_loop().run_in_executor(writer, generate_latest, registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def close(_: web.Application) -> None:
        writer.shutdown(wait=False, cancel_futures=True)

    async def healthz(_: web.Request) -> web.Response:
        up = ready()
        return web.Response(text="ok\n" if up else "draining\n", status=200 if up else 503)

    app = web.Application()
    app.on_cleanup.append(close)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthz)
    return app


def admin_app(
    sections: dict[str, State], pages: Iterable[web.RouteDef] = (), access: Iterable[Any] = ()
) -> web.Application:
    """GET /state has every section, GET /state/NAME one of them; PUT /log-level sets the level in its body.

    `pages` are further routes; what is too large for /state is one of them. `access` are middlewares that let requests in.
    """

    def answer(value: object) -> web.Response:
        return web.Response(body=msgspec.json.encode(value), content_type="application/json")

    async def everything(_: web.Request) -> web.Response:
        return answer({name: section() for name, section in sections.items()})

    async def one(request: web.Request) -> web.Response:
        section = sections.get(request.match_info["name"])
        if section is None:
            return web.json_response({"error": f"no section; there are {', '.join(sections)}"}, status=404)
        return answer(section())

    async def log_level(request: web.Request) -> web.Response:
        level = (await request.text()).strip().lower()
        if level not in LEVELS:
            return web.json_response({"error": f"expected one of {', '.join(LEVELS)}, got {level!r}"}, status=400)
        logging.getLogger().setLevel(level.upper())
        log.info("log_level_changed level=%s", level)
        return web.json_response({"level": level})

    async def current_level(_: web.Request) -> web.Response:
        return web.json_response({"level": logging.getLevelName(logging.getLogger().level).lower()})

    app = web.Application(middlewares=tuple(access))
    app.add_routes(pages)
    app.router.add_get("/state", everything)
    app.router.add_get("/state/{name}", one)
    app.router.add_get("/log-level", current_level)
    app.router.add_put("/log-level", log_level)
    return app


class BoundApp:
    """An application listening on one address. `start` raises OSError where the port is taken."""

    def __init__(self, app: web.Application, host: str, port: int) -> None:
        self._runner = web.AppRunner(app, access_log=None)
        self._host, self._port = host, port

    async def start(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()
