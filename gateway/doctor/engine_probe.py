"""Ask engines what they say about themselves: event sources, cache configuration, models. Reads only."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from event_ingest.sockets import port_of
from fleet.endpoint import Endpoint
from fleet.listing import Listing, parse
from gateway.doctor.facts import Engine, Source
from gateway.http_errors import reason

ANSWER_S = 3.0
CONNECT_S = 1.0
"""For a connection to a port on a host that has just answered."""
CACHE_INFO = "vllm:cache_config_info"


class _Source(msgspec.Struct):
    """One entry of GET /kv_event_sources (vLLM 0.32)."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int | None = None


async def ask_engines(session: aiohttp.ClientSession, endpoints: Sequence[Endpoint]) -> dict[str, Engine]:
    """Every address once; by address."""
    ordered = sorted(endpoints, key=lambda endpoint: endpoint.address)
    grouped = [(address, list(ranks)) for address, ranks in groupby(ordered, key=lambda endpoint: endpoint.address)]
    engines = await asyncio.gather(*(_ask(session, address, ranks) for address, ranks in grouped))
    return {engine.address: engine for engine in engines}


async def _ask(session: aiohttp.ClientSession, address: str, endpoints: Sequence[Endpoint]) -> Engine:
    pages: dict[str, tuple[int, bytes]] = {}

    async def get(path: str) -> str:
        try:
            async with session.get(f"http://{address}{path}", timeout=aiohttp.ClientTimeout(ANSWER_S)) as response:
                pages[path] = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            return reason(error) or f"no answer within {ANSWER_S:g} s"
        return ""

    errors = await asyncio.gather(*(get(path) for path in ("/kv_event_sources", "/metrics", "/v1/models")))
    if not pages:
        return Engine(address=address, endpoints=endpoints, error=errors[0])
    models = _models(pages.get("/v1/models"))
    sources = _sources(pages.get("/kv_event_sources"))
    return Engine(
        address=address,
        endpoints=endpoints,
        sources=await _listening(address, endpoints, sources) if sources else sources,
        cache=_cache(pages.get("/metrics")),
        models=models,
        unnamed_adapters=[name for name, path in models.adapters.items() if not path] if models else (),
    )


def _sources(page: tuple[int, bytes] | None) -> Mapping[int, Source] | None:
    if page is None or page[0] != 200:
        return None
    try:
        ranks = msgspec.json.decode(page[1], type=dict[str, _Source])
    except msgspec.DecodeError:
        return None
    return {
        int(rank): Source(
            enabled=it.enable_kv_cache_events and it.publisher != "null",
            endpoint=it.endpoint,
            replay=it.replay_endpoint,
            topic=it.topic,
            buffer_steps=it.buffer_steps,
        )
        for rank, it in ranks.items()
        if rank.isdecimal()
    }


async def _listening(
    address: str, endpoints: Sequence[Endpoint], sources: Mapping[int, Source]
) -> Mapping[int, Source]:
    """The sources, each with whether its port can be connected to where the configuration has another one.

    vLLM connects to an address that names a host; other publishers bind it. Only a look tells which of both is wrong then: the
    port in the configuration, or that nobody binds.
    """
    configured = {port_of(it.events) for it in endpoints if it.events}
    host = address.rpartition(":")[0].strip("[]")

    async def look(source: Source) -> Source:
        text = source.endpoint or ""
        port = port_of(text) if text.startswith("tcp://") and not source.binds else 0
        if not port or port in configured:
            return source
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
        except (OSError, TimeoutError):
            return source
        writer.close()
        return msgspec.structs.replace(source, listening=True)

    found = await asyncio.gather(*map(look, sources.values()))
    return dict(zip(sources, found, strict=True))


def _cache(page: tuple[int, bytes] | None) -> dict[int, Mapping[str, str]]:
    """The labels of vllm:cache_config_info, by rank."""
    if page is None or page[0] != 200:
        return {}
    lines = [line for line in page[1].decode("utf-8", "replace").splitlines() if line.startswith(CACHE_INFO + "{")]
    try:
        samples = [
            sample for family in text_string_to_metric_families("\n".join(lines) + "\n") for sample in family.samples
        ]
    except ValueError:
        return {}
    return {int(it.labels.get("engine", "0")): it.labels for it in samples if it.labels.get("engine", "0").isdecimal()}


def _models(page: tuple[int, bytes] | None) -> Listing | None:
    if page is None or page[0] != 200:
        return None
    try:
        return parse(page[1])
    except msgspec.DecodeError:
        return None
