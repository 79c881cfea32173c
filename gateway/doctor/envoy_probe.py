"""Get Envoy's configuration, from a file or its admin page, and send one request through it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from gateway.doctor.envoy_checks import EXT_PROC, managers
from gateway.doctor.facts import Envoy

ANSWER_S = 3.0
REQUEST_S = 8.0


class EnvoyFileError(Exception):
    """The file given with --envoy cannot be used; the message says why."""


def from_file(path: Path) -> Envoy:
    """A bootstrap file, YAML or JSON. Raises EnvoyFileError."""
    try:
        value = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise EnvoyFileError(f"{path}: {error}") from error
    if isinstance(value, Mapping) and isinstance(value.get("configs"), list):  # a saved /config_dump
        return from_dump(value, str(path))
    resources = value.get("static_resources") if isinstance(value, Mapping) else None
    if not isinstance(resources, Mapping):
        raise EnvoyFileError(f"{path}: no static_resources; expected an Envoy bootstrap file or a saved /config_dump")
    return Envoy(where=str(path), listeners=resources.get("listeners") or [], clusters=resources.get("clusters") or [])


def from_dump(dump: Mapping[str, Any], where: str) -> Envoy:
    """The answer of GET /config_dump."""

    def of(kind: str, *lists: str) -> Iterator[Mapping[str, Any]]:
        for section in dump.get("configs", []):
            for name in lists:
                for item in section.get(name, []):
                    resource = item.get(kind) or item.get("active_state", {}).get(kind)
                    if resource:
                        yield resource

    return Envoy(
        where=where,
        listeners=list(of("listener", "static_listeners", "dynamic_listeners")),
        clusters=list(of("cluster", "static_clusters", "dynamic_active_clusters")),
    )


async def from_admin(session: aiohttp.ClientSession, address: str) -> Envoy | None:
    """The configuration in force; None where no Envoy answers at this admin address."""
    try:
        async with session.get(f"http://{address}/config_dump", timeout=aiohttp.ClientTimeout(ANSWER_S)) as response:
            dump = msgspec.json.decode(await response.read())
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return None
    if not isinstance(dump, Mapping) or "configs" not in dump:
        return None
    return from_dump(dump, f"Envoy at {address}")


def front(envoy: Envoy) -> str | None:
    """host:port of the first listener that asks a picker."""
    for listener in envoy.listeners:
        asks = any(
            item.get("typed_config", {}).get("@type", "").endswith(EXT_PROC)
            for _, manager in managers([listener])
            for item in manager.get("http_filters", [])
        )
        address = listener.get("address", {}).get("socket_address", {})
        if asks and address.get("port_value"):
            host = str(address.get("address", "127.0.0.1"))
            return f"{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{address['port_value']}"
    return None


async def send(session: aiohttp.ClientSession, address: str, body: Mapping[str, Any]) -> int | None:
    """The status of one chat request through Envoy; None without an answer."""
    url = f"http://{address}/v1/chat/completions"
    try:
        async with session.post(url, json=body, timeout=aiohttp.ClientTimeout(REQUEST_S)) as response:
            await response.read()
            return response.status
    except (aiohttp.ClientError, TimeoutError):
        return None
