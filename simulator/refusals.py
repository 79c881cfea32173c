"""Planted refusals: for a while every completion is answered with one status, as by an engine whose queue is full."""

import time

import msgspec
from aiohttp import web

from simulator.openai_request import ApiError


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /sim/refuse`. 0 seconds: no longer."""

    status: int
    seconds: float


class Refusals:
    """What is refused now; `/health` and `/metrics` go on as if nothing were."""

    def __init__(self) -> None:
        self._status = 0
        self._until = 0.0

    async def plan(self, request: web.Request) -> web.Response:
        """The route: refuse from now on, for as long as the body says. A later plan replaces an earlier one."""
        try:
            refusal = msgspec.json.decode(await request.read(), type=Refusal)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ApiError(400, f'expected {{"status": 503, "seconds": 2}}: {error}') from error
        if not 400 <= refusal.status <= 599:
            raise ApiError(400, f"status {refusal.status}: not an error; expected 400 to 599", param="status")
        self._status = refusal.status
        self._until = time.monotonic() + refusal.seconds
        return web.json_response(msgspec.to_builtins(refusal))

    def check(self) -> None:
        """Raises ApiError while completions are refused."""
        if time.monotonic() < self._until:
            raise ApiError(self._status, f"planted: this engine answers {self._status} for a while")
