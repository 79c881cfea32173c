"""Prefill/decode hand-off with the parameters of vLLM's NIXL connector; the transfer itself is one HTTP exchange.

    prefill leg   do_remote_decode: true   -> blocks stay held under a lease, the answer carries `kv_transfer_params`
    decode leg    those parameters unchanged (do_remote_prefill: true) -> blocks are pulled, then freed on the prefill side

The decode engine asks the prefill engine at `remote_host:remote_port` whether it still holds the request's blocks
(`POST /sim/kv/read`), waits as long as the transfer takes, and tells it to let go (`POST /sim/kv/free`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec

log = logging.getLogger(__name__)

_REMOTE_FIELDS = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "remote_block_ids": list,
    "remote_num_tokens": int,
}


class Source(msgspec.Struct, frozen=True):
    """Where a decode leg pulls its prompt from."""

    engine_id: str
    request_id: str
    host: str
    port: int
    blocks: int
    tokens: int


def wants_remote_decode(params: dict[str, Any]) -> bool:
    """Is this request the prefill leg of a hand-off?"""
    return params.get("do_remote_decode") is True


def source(params: dict[str, Any]) -> Source | None:
    """The other engine, None when nothing is to be pulled. Raises ValueError for parameters no prefill leg returned."""
    if params.get("do_remote_prefill") is not True:
        return None
    for name, kind in _REMOTE_FIELDS.items():
        if not isinstance(params.get(name), kind):
            raise ValueError(f"kv_transfer_params.{name}: expected {kind.__name__}, got {params.get(name)!r}")
    blocks = params["remote_block_ids"]
    if len(blocks) != 1 or not isinstance(blocks[0], list):
        raise ValueError("kv_transfer_params.remote_block_ids: expected one list of block ids (one cache group)")
    return Source(
        engine_id=params["remote_engine_id"],
        request_id=params["remote_request_id"],
        host=params["remote_host"],
        port=params["remote_port"],
        blocks=len(blocks[0]),
        tokens=params["remote_num_tokens"],
    )


def offer(
    engine_id: str, request_id: str, host: str, port: int, block_ids: list[int], tokens: int, cached: int
) -> dict[str, Any]:
    """What a prefill leg returns; the decode leg gets it unchanged. `cached`: the prefill engine's own hit, in tokens."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": cached,
    }


class Leases:
    """Which finished prefill legs still hold blocks, and until when. Time is passed in, in seconds."""

    def __init__(self, duration_s: float, release: Callable[[str], bool]) -> None:
        self._duration_s = duration_s
        self._release = release
        self._until: dict[str, tuple[float, int]] = {}
        self.expired = 0

    def grant(self, request_id: str, blocks: int, now: float) -> None:
        self._until[request_id] = (now + self._duration_s, blocks)

    def renew(self, request_id: str, now: float) -> int | None:
        """The number of blocks held for a request, None if they are gone; asking for them renews the lease."""
        self.expire(now)
        held = self._until.get(request_id)
        if held is None:
            return None
        self.grant(request_id, held[1], now)
        return held[1]

    def free(self, request_id: str) -> bool:
        """Let go of a request's blocks; False if they were gone already."""
        return self._until.pop(request_id, None) is not None and self._release(request_id)

    def expire(self, now: float) -> None:
        """Free what nobody fetched in time."""
        for request_id in [name for name, (until, _) in self._until.items() if until <= now]:
            self.expired += 1
            self.free(request_id)
            log.warning("kv_lease_expired request=%s", request_id)

    def clear(self) -> None:
        """Forget all leases without releasing: the pool they held is gone."""
        self._until.clear()


async def pull(session: aiohttp.ClientSession, origin: Source, transfer_s: float) -> bool:
    """Fetch the blocks of a prefill leg; False, with a log line, when the other engine does not have them (any more)."""
    base = f"http://{origin.host}:{origin.port}/sim/kv"
    key = {"engine_id": origin.engine_id, "request_id": origin.request_id, "blocks": origin.blocks}
    started = time.monotonic()
    try:
        async with session.post(f"{base}/read", json=key, timeout=aiohttp.ClientTimeout(5)) as answer:
            if answer.status != 200:
                log.warning("kv_pull_refused request=%s status=%d", origin.request_id, answer.status)
                return False
        await asyncio.sleep(max(0.0, transfer_s - (time.monotonic() - started)))
        await free(session, origin)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.warning("kv_pull_failed request=%s peer=%s:%d error=%r", origin.request_id, origin.host, origin.port, error)
        return False
    return True


async def free(session: aiohttp.ClientSession, origin: Source) -> None:
    """Tell the prefill engine to let go; also for a decode leg that was aborted before it pulled anything."""
    key = {"engine_id": origin.engine_id, "request_id": origin.request_id}
    url = f"http://{origin.host}:{origin.port}/sim/kv/free"
    async with session.post(url, json=key, timeout=aiohttp.ClientTimeout(5)) as answer:
        await answer.read()
