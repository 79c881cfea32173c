"""Who may read the admin port: everybody on loopback, elsewhere only whoever has the token.

Clients send `Authorization: Bearer TOKEN`. A token file is read for every request, so that a rotated secret works at once.
"""

import hmac
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from gateway.config_document import Settings

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BEARER = "Bearer "


def token_of(settings: Settings) -> str | None:
    """The configured token; None where there is none. OSError, ValueError where its file cannot be used."""
    if settings.admin_token_file is None:
        return settings.admin_token
    token = Path(settings.admin_token_file).read_text().strip()
    if not token:
        raise ValueError(f"{settings.admin_token_file}: empty; expected the token")
    return token


def token_required(settings: Callable[[], Settings]) -> Any:
    """A middleware. Where the token's file cannot be read nobody gets in."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            token = token_of(settings())
        except (OSError, ValueError) as error:
            log.error("admin_token_unreadable error=%r", str(error))
            return web.json_response(
                {"error": "the admin token cannot be read; the gateway's log says why"}, status=503
            )
        if token is not None:
            given = request.headers.get("Authorization", "")
            if not given.startswith(BEARER) or not hmac.compare_digest(given[len(BEARER) :].encode(), token.encode()):
                headers = {"WWW-Authenticate": "Bearer"}
                return web.json_response({"error": "expected Authorization: Bearer TOKEN"}, status=401, headers=headers)
        return await handler(request)

    return check
