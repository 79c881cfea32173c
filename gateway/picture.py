"""The gateway's picture as it is now, for metrics and the admin port."""

from collections.abc import Callable
from typing import Any

import msgspec

from fleet.fleet import Fleet
from gateway.event_streams import EventStreams
from gateway.picture_metrics import EndpointState, IndexState, StreamState
from gateway.routing_record import Routed
from gateway.watching import Watching
from indexer.index import Index


class GatewayPicture:
    """Reads; owns nothing."""

    def __init__(self, fleet: Fleet, index: Index, streams: EventStreams) -> None:
        self._fleet, self._index, self._streams = fleet, index, streams
        self.routed: Callable[[], list[Routed]] = list
        """The last decisions."""
        self.watch: Watching | None = None

    def streams(self) -> list[StreamState]:
        """With the rates that the self-watch knows."""
        watch, states = self.watch, self._streams.states()
        if watch is None:
            return states
        return [
            msgspec.structs.replace(it, events_per_s=watch.rules.events_per_s(f"{it.endpoint}/{it.rank}"))
            for it in states
        ]

    def index(self) -> IndexState:
        stats = self._index.stats()
        return IndexState(
            keys=stats.keys,
            entries=stats.entries,
            evicted_keys=stats.evicted_keys,
            evicted_holders=stats.evicted_holders,
        )

    def endpoints(self) -> list[EndpointState]:
        fleet, now = self._fleet, self._fleet.clock()
        states = []
        for slot in map(int, fleet.slots()):
            endpoint = fleet.endpoint(slot)
            scraped = float(fleet.scraped_at[slot])
            states.append(
                EndpointState(
                    name=endpoint.name,
                    namespace=endpoint.namespace,
                    endpoint=endpoint.address,
                    rank=endpoint.rank,
                    role=endpoint.role.value if endpoint.role else "",
                    up=bool(fleet.healthy[slot] and not fleet.tripped[slot] and not fleet.draining[slot]),
                    in_flight=int(fleet.in_flight[slot]),
                    in_flight_tokens=float(fleet.in_flight_tokens[slot]),
                    waiting=float(fleet.waiting[slot]),
                    running=float(fleet.running[slot]),
                    kv_usage=float(fleet.kv_usage[slot]),
                    scrape_age_s=now - scraped if scraped > 0 else -1.0,
                )
            )
        return states

    def sections(self) -> dict[str, Any]:
        """What the admin port shows, by section."""
        return {
            "endpoints": lambda: msgspec.to_builtins(self.endpoints()),
            "streams": lambda: msgspec.to_builtins(self.streams()),
            "index": lambda: msgspec.to_builtins(self.index()),
            "routed": lambda: msgspec.to_builtins(self.routed()),
            "alarms": lambda: self.watch.alarms() if self.watch else [],
            **({"dynamo": lambda: msgspec.to_builtins(dynamo.state())} if (dynamo := self._streams.dynamo) else {}),
        }
