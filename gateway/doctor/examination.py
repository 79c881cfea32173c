"""One examination: gather facts within its time, from engines, their event streams, the gateway and Envoy.

    ask engines, load tokenizers, read the gateway, listen   (together)
    provoke: one tiny prompt per engine, twice               (what is announced, counted, tokenized)
    ask replay sockets, send one request through Envoy, read the gateway again

Every stage has its own limit, so that a dead host costs seconds and not the examination.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from fleet.endpoint import Endpoint
from gateway.config import LoadedConfig
from gateway.doctor import (  # noqa: F401 - importing a module registers its checks
    dynamo_checks,
    engine_checks,
    envoy_checks,
    event_checks,
    event_order_checks,
    gateway_checks,
    prompt_checks,
)
from gateway.doctor.dynamo_probe import DynamoProbe
from gateway.doctor.engine_probe import ask_engines
from gateway.doctor.envoy_probe import from_admin, from_file, front, send
from gateway.doctor.event_checks import heard_own
from gateway.doctor.facts import Envoy, Facts, Gateway, Probe
from gateway.doctor.findings import Report, judge
from gateway.doctor.gateway_probe import metrics_url, read_metrics
from gateway.doctor.prompt_probe import Prober
from gateway.doctor.stream_probe import Listener

EVENTS_S = 1.5
"""From an engine's answer to its events having arrived."""
GATEWAY_S = 0.5
"""Until the gateway has applied what was provoked."""
DYNAMO_S = 1.0
"""From an engine's answer to its events on NATS, which nobody can tell from others' by their tokens."""
DISCOVERY_S = 3.0


async def examine(config: LoadedConfig, envoy_file: Path | None = None, *, requests: bool = True) -> Report:
    """Gather and judge. `requests`: whether engines may be sent prompts. Raises EnvoyFileError, OSError, ValueError."""
    return judge(await gather(config, envoy_file, requests=requests))


async def gather(config: LoadedConfig, envoy_file: Path | None = None, *, requests: bool = True) -> Facts:
    envoy = from_file(envoy_file) if envoy_file else None
    endpoints = await known(config)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256)) as session:
        prober = Prober(config, session, send=requests)
        listener = Listener(endpoints if config.precise else ())
        dynamo = DynamoProbe(config.settings.dynamo) if config.settings.dynamo else None
        try:
            url = metrics_url(config.settings)
            engines, _, (before, absent), _ = await asyncio.gather(
                ask_engines(session, endpoints),
                prober.load(),
                read_metrics(session, url),
                asyncio.gather(listener.start(), *([dynamo.start()] if dynamo else [])),
            )
            models = dict.fromkeys(endpoint.model for endpoint in endpoints if endpoint.model)
            models |= dict.fromkeys(name for it in engines.values() if it.models for name in it.models.base)
            probes, templates = await asyncio.gather(prober.probes(endpoints, engines), prober.templates(list(models)))
            if requests:
                if dynamo:
                    await asyncio.sleep(DYNAMO_S)
                await listener.until(lambda: _all_heard(listener, probes), EVENTS_S)
            await listener.ask_replays(everything=not before)
            envoy = await _through_envoy(config, session, envoy, probes if requests else (), url)
            if before:
                await asyncio.sleep(GATEWAY_S)
            after, gone = await read_metrics(session, url)
            streams = listener.streams()
        finally:
            await listener.close()
            if dynamo:
                await dynamo.close()
            await prober.close()
    gateway = Gateway(where=url, running=bool(before and after), error=absent or gone, before=before, after=after)
    return Facts(
        config=config,
        endpoints=endpoints,
        engines=engines,
        streams=streams,
        probes=probes,
        templates=templates,
        gateway=gateway,
        envoy=envoy,
        dynamo=dynamo.facts() if dynamo else None,
    )


async def known(config: LoadedConfig) -> list[Endpoint]:
    """The fleet as discovery sees it now, each endpoint with the event address that the configuration implies."""
    if config.discovery is None:
        return []
    async with asyncio.timeout(DISCOVERY_S):
        found = await anext(aiter(config.discovery.changes()))
    workers = set(config.settings.dynamo.endpoints.values()) if config.settings.dynamo else set()
    return [it if it.address in workers else _with_addresses(config, it) for it in found.endpoints]


def _with_addresses(config: LoadedConfig, endpoint: Endpoint) -> Endpoint:
    implied = config.precise.stream_of(endpoint) if config.precise and endpoint.events is None else None
    return msgspec.structs.replace(endpoint, events=implied[0], replay=implied[1]) if implied else endpoint


def _all_heard(listener: Listener, probes: Sequence[Probe]) -> bool:
    streams = {(it.endpoint.address, it.endpoint.rank): it for it in listener.streams()}
    answered = [probe for probe in probes if not probe.error]
    mine = [(streams.get((probe.endpoint.address, probe.endpoint.rank)), probe) for probe in answered]
    return all(heard_own(stream, probe, answered) for stream, probe in mine if stream is not None)


async def _through_envoy(
    config: LoadedConfig,
    session: aiohttp.ClientSession,
    envoy: Envoy | None,
    probes: Sequence[Probe],
    gateway_url: str,
) -> Envoy | None:
    """The Envoy of the file, or the one at the configured admin port, with what a request through it showed."""
    admin = config.settings.envoy.admin_port
    running = await from_admin(session, f"127.0.0.1:{admin}") if admin else None
    envoy = envoy or running
    address = front(envoy) if envoy else None
    model = next((probe.model for probe in probes if not probe.error and probe.chat), None)
    if envoy is None or address is None or model is None:
        return envoy
    body = {"model": model, "messages": [{"role": "user", "content": "ping"}], "max_tokens": 1}
    first, _ = await read_metrics(session, gateway_url)
    status = await send(session, address, body)
    if status is None and running is None:
        return envoy  # the file is there, and nobody listens where it says
    second, _ = await read_metrics(session, gateway_url)
    counted = None
    if first and second:
        name = "warmroute_requests_total"
        counted = Gateway(where="", before=first, after=second).value(name) != (
            Gateway(where="", after=first).value(name)
        )
    return msgspec.structs.replace(envoy, through=address, status=status, counted=counted)
