"""Which block keys left a stream lately, and when: an eviction between a decision and its prefill is nobody's mistake."""

from collections import OrderedDict
from collections.abc import Iterable

REMEMBERED = 1 << 16
"""Keys; more than an engine evicts between a decision and the report about it."""


class Departed:
    """Times are the caller's monotonic seconds."""

    def __init__(self) -> None:
        self._at: OrderedDict[int, float] = OrderedDict()
        self._cleared_at = float("-inf")

    def left(self, keys: Iterable[int], now: float) -> None:
        for key in keys:
            self._at.pop(key, None)
            self._at[key] = now
        while len(self._at) > REMEMBERED:
            self._at.popitem(last=False)

    def cleared(self, now: float) -> None:
        """Everything left at once."""
        self._at.clear()
        self._cleared_at = now

    def since(self, key: int, moment: float) -> bool:
        """Whether the key left at or after `moment`."""
        return max(self._at.get(key, float("-inf")), self._cleared_at) >= moment
