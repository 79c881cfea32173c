"""GET /state/decisions on the admin port: the last decisions and why.

?request=ID      the one of this request (404 where it is not kept, any more or at all)
?last=N          how many, the newest first (20)
?candidates=N    how many candidates per profile (16; all of them for a single request)
"""

from collections.abc import Callable

import msgspec
from aiohttp import web

from gateway.decision_log import DecisionLog


def decisions_page(current: Callable[[], DecisionLog | None]) -> web.RouteDef:
    """The route. None: explaining is switched off, and the page says how to switch it on."""

    async def answer(request: web.Request) -> web.Response:
        log = current()
        if log is None:
            return web.json_response({"error": "set warmroute.explain: true to keep decisions"}, status=404)
        wanted = request.query.get("request")
        try:
            last = int(request.query.get("last", "20"))
            given = request.query.get("candidates", "" if wanted else "16")
            most = int(given) if given else None
        except ValueError:
            return web.json_response({"error": "last and candidates are whole numbers"}, status=400)
        if wanted is None:
            return _json([kept.told(most) for kept in log.last(last)])
        kept = log.find(wanted)
        if kept is None:
            return web.json_response(
                {"error": f"no decision for request {wanted!r} among the last {len(log)}"}, status=404
            )
        return _json(kept.told(most))

    return web.get("/state/decisions", answer)


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
