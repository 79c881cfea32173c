"""What discovery says, carried into the fleet and its event streams.

Another discovery is looked at before the old one is given up: one that cannot be read changes nothing.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec

from fleet.discovery import difference
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import Discovery, Found
from gateway.event_streams import EventStreams

log = logging.getLogger(__name__)


class FirstLook(msgspec.Struct, frozen=True):
    """A discovery that has answered once."""

    found: Found
    changes: AsyncIterator[Found]


async def look(discovery: Discovery) -> FirstLook:
    """The fleet as the discovery sees it now. Raises OSError or ValueError where it cannot say."""
    changes = discovery.changes()
    return FirstLook(await anext(changes), changes)


class FleetFollower:
    """Adds, changes and removes endpoints. The event loop's thread owns it."""

    def __init__(self, fleet: Fleet, streams: EventStreams) -> None:
        self._fleet, self._streams = fleet, streams
        self._changes: AsyncIterator[Found] | None = None
        self._turn = asyncio.Event()

    def use(self, first: FirstLook | None) -> None:
        """Take over what was found, and follow that discovery from now on; None: the fleet stays as it is."""
        self._changes = first.changes if first else None
        if first:
            self._apply(first.found)
        self._turn.set()

    async def run(self) -> None:
        """Follow the discovery in use until cancelled. It raises nothing for a discovery's sake."""
        while True:
            self._turn.clear()
            following = asyncio.create_task(self._follow(self._changes)) if self._changes else None
            try:
                await self._turn.wait()
            finally:
                if following:
                    following.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await following

    async def _follow(self, changes: AsyncIterator[Found]) -> None:
        try:
            async for found in changes:
                self._apply(found)
        except Exception:
            log.exception("discovery_failed kept=%d", len(self._fleet.slots()))

    def _apply(self, found: Found) -> None:
        fleet = self._fleet
        changes = difference([fleet.endpoint(int(slot)) for slot in fleet.slots()], found.endpoints)
        for endpoint in changes.removed:
            self._remove(endpoint)
        for old, new in changes.changed:
            slot = self._slot(old)
            fleet.replace(slot, new)
            self._streams.changed(slot, old, new)
        for endpoint in changes.added:
            slot = fleet.add(endpoint)
            self._streams.added(slot)
            log.info("endpoint_added name=%s address=%s slot=%d", endpoint.name, endpoint.address, slot)

    def _remove(self, endpoint: Endpoint) -> None:
        slot = self._slot(endpoint)
        self._fleet.remove(slot)
        log.info("endpoint_removed name=%s address=%s slot=%d", endpoint.name, endpoint.address, slot)
        # The slot's number is free only when the index has forgotten it.
        loop = asyncio.get_running_loop()

        def forgotten() -> None:
            loop.call_soon_threadsafe(self._fleet.release, slot)

        self._streams.removed(slot, forgotten)

    def _slot(self, endpoint: Endpoint) -> int:
        slot = self._fleet.slot_of(endpoint.address, endpoint.rank)
        assert slot is not None  # it was just listed
        return slot
