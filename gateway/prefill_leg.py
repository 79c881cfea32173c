"""One prefill leg over HTTP: a request to an engine whose answer is small, wanted soon, and given up without regret.

Connections are pooled. An abandoned leg (a timeout, or a client that went away) closes its connection, which is how an
engine learns that it may stop.
"""

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Literal

import aiohttp

CONNECT_S = 1.0
IDLE_S = 4.0
"""Below uvicorn's 5 s: a connection that the engine is about to close must not be chosen."""
MOST_BYTES = 16 * 2**20
"""Of an answer: one token and transfer parameters, even with logprobs and token ids, are far below."""

Reason = Literal["connect", "broken", "timeout", "client_error", "server_error", "too_large"]


class LegFailed(Exception):
    """No usable answer. `status`: the engine's, None where it gave none."""

    def __init__(self, reason: Reason, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.status = status


class PrefillLegs:
    """Sends legs from the event loop. Opens with the first leg."""

    def __init__(self, connect_s: float = CONNECT_S) -> None:
        self._connect_s = connect_s
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        limit_s: float | None,
        sent: asyncio.Event | None = None,
    ) -> bytes:
        """The body of a 200 answer. Raises LegFailed. `sent` is set when the request has left this machine."""
        for attempt in (1, 2):
            try:
                return await self._once(url, headers, body, limit_s, sent)
            except aiohttp.ServerDisconnectedError as error:
                # A pooled connection may end just when it is used; a second time in a row it is the engine's doing.
                if attempt == 2:
                    raise LegFailed("broken", f"the engine closed the connection: {error!r}") from error
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _once(
        self, url: str, headers: Mapping[str, str], body: bytes, limit_s: float | None, sent: asyncio.Event | None
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=self._connect_s)
        with _named_failures():
            async with self._open().post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False, trace_request_ctx=sent
            ) as answer:
                data = bytearray()
                async for piece in answer.content.iter_any():
                    data += piece
                    if len(data) > MOST_BYTES:
                        raise LegFailed("too_large", f"more than {MOST_BYTES} bytes", answer.status)
                if answer.status != 200:
                    reason: Reason = "server_error" if answer.status >= 500 else "client_error"
                    raise LegFailed(reason, f"status {answer.status}: {bytes(data[:200])!r}", answer.status)
                return bytes(data)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_chunk_sent.append(_left)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
                trace_configs=[trace],
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("Accept-Encoding", "User-Agent"),
            )
        return self._session


async def _left(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceRequestChunkSentParams
) -> None:
    if isinstance(sent := context.trace_request_ctx, asyncio.Event):
        sent.set()


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """aiohttp's many ways of failing as one of ours."""
    try:
        yield
    except aiohttp.ServerDisconnectedError:
        raise
    except aiohttp.ClientConnectorError as error:
        raise LegFailed("connect", str(error)) from error
    except aiohttp.ConnectionTimeoutError as error:
        raise LegFailed("connect", f"no connection: {error!r}") from error
    except TimeoutError as error:
        raise LegFailed("timeout", "no answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise LegFailed("broken", repr(error)) from error
