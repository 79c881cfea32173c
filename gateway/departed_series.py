"""Takes the series of endpoints that are gone out of the metrics, so that pods that come and go do not add up for ever.

Not at once: Prometheus should see the last counts, and an endpoint that restarts at its address should go on counting.
"""

from fleet.fleet import Fleet
from gateway.metrics import Metrics

KEPT_S = 900.0


class DepartedSeries:
    """`tick` every now and then; the event loop's thread owns it."""

    def __init__(self, fleet: Fleet, metrics: Metrics, kept_s: float = KEPT_S) -> None:
        self._fleet, self._metrics, self._kept_s = fleet, metrics, kept_s
        self._departed: dict[str, float] = {}
        self._ranks: dict[str, set[int]] = {}
        fleet.when_released.append(self._released)

    def tick(self, now: float) -> None:
        """`now`: monotonic seconds, on the fleet's clock."""
        for address, since in list(self._departed.items()):
            if now - since < self._kept_s:
                continue
            del self._departed[address]
            ranks = self._ranks.pop(address)
            if not any(self._fleet.endpoint(int(slot)).address == address for slot in self._fleet.slots()):
                self._metrics.forget_endpoint(address, ranks)

    def _released(self, slot: int) -> None:
        endpoint = self._fleet.endpoint(slot)
        self._departed[endpoint.address] = self._fleet.clock()
        self._ranks.setdefault(endpoint.address, set()).add(endpoint.rank)
