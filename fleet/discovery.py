"""Where endpoints come from, and what changed since the last look."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from fleet import plugin
from fleet.endpoint import Endpoint
from fleet.endpoints_document import Entry, collect, parse
from fleet.plugin import Discovery, Found

log = logging.getLogger("fleet.discovery")

POLL_S = 1.0
"""How often a watched file is looked at. Reading its status costs microseconds and, unlike notifications, it sees
Kubernetes' symlink swaps, network file systems and editors that replace the file."""


class Difference(msgspec.Struct, frozen=True):
    """What has to happen to the fleet. An endpoint is identified by address and rank, so a new name is a change."""

    added: list[Endpoint]
    removed: list[Endpoint]
    changed: list[tuple[Endpoint, Endpoint]]
    """Old and new: labels, events, name or model differ."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


def difference(current: Iterable[Endpoint], wanted: Iterable[Endpoint]) -> Difference:
    """From the endpoints that are there to those that should be."""
    old = {(endpoint.address, endpoint.rank): endpoint for endpoint in current}
    new = {(endpoint.address, endpoint.rank): endpoint for endpoint in wanted}
    return Difference(
        added=[endpoint for key, endpoint in new.items() if key not in old],
        removed=[endpoint for key, endpoint in old.items() if key not in new],
        changed=[(old[key], endpoint) for key, endpoint in new.items() if key in old and old[key] != endpoint],
    )


class StaticDiscovery(Discovery, type="static-discovery"):
    """Endpoints written into the configuration itself.

    Use it for a fixed fleet or a first try; the entries have the same keys as a `file-discovery` file. A change needs a
    reload of the configuration. A bad entry is an error here, not skipped: somebody is looking at the configuration.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        endpoints: Annotated[list[Entry], Meta(min_length=1, description="Entries as in an endpoints document.")]

        def __post_init__(self) -> None:
            document = collect((f"endpoints[{index}]", entry) for index, entry in enumerate(self.endpoints))
            if document.problems:
                raise ValueError("\n".join(document.problems))

    parameters: Parameters

    def endpoints(self) -> list[Endpoint]:
        """All of them, ranks expanded."""
        return collect((f"endpoints[{at}]", entry) for at, entry in enumerate(self.parameters.endpoints)).endpoints

    async def changes(self) -> AsyncIterator[Found]:
        yield Found(self.endpoints())


class FileDiscovery(Discovery, type="file-discovery"):
    """Endpoints from a YAML or JSON file, without Kubernetes.

    Use it where something else (a deployment tool, a ConfigMap) writes the list. A bad entry is skipped and reported, and
    the rest is used. At the start an unreadable file is an error; later it leaves the endpoints as they are.
    Source: llm-d-router file-discovery; the file may say more per endpoint (docs/fleet.md).
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        path: Annotated[str, Meta(min_length=1, description="The endpoints document.")]
        watch_file: Annotated[bool, Meta(description="Follow changes of the file.")] = False

    parameters: Parameters

    def __init__(self, name: str, parameters: plugin.Parameters, poll_s: float = POLL_S) -> None:
        super().__init__(name, parameters)
        self._poll_s = poll_s

    def read(self) -> Found:
        """The file as it is now. OSError where it cannot be read, ValueError where it is no endpoints document."""
        path = Path(self.parameters.path)
        document = parse(path.read_bytes(), str(path))
        for problem in document.problems:
            log.warning("endpoint_skipped problem=%r", problem)
        return Found(document.endpoints, document.problems)

    async def changes(self) -> AsyncIterator[Found]:
        seen = _signature(self.parameters.path)
        found = await asyncio.to_thread(self.read)
        yield found
        while self.parameters.watch_file:
            await asyncio.sleep(self._poll_s)
            signature = _signature(self.parameters.path)
            if signature == seen:
                continue
            seen = signature
            try:
                latest = await asyncio.to_thread(self.read)
            except (OSError, ValueError) as error:
                log.error(
                    "endpoints_file_unusable path=%s error=%r kept=%d",
                    self.parameters.path,
                    error,
                    len(found.endpoints),
                )
                continue
            if latest != found:
                found = latest
                yield found


def _signature(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
