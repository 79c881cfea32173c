"""Which block keys left a stream lately, and when: an eviction between a decision and its prefill is nobody's mistake.

Busy engines evict a thousand blocks a second, and every stream remembers its own, so they are kept in two plain arrays
(16 bytes a key) that are looked through when somebody asks: reports that contradict a prediction are rare.
"""

from array import array
from collections.abc import Iterable

import numpy as np

REMEMBERED = 1 << 16
"""Keys; more than an engine evicts between a decision and the report about it."""


class Departed:
    """Times are the caller's monotonic seconds."""

    def __init__(self) -> None:
        self._keys, self._times = array("Q"), array("d")
        self._oldest = 0  # where the next one goes, once as many are remembered as may be
        self._cleared_at = float("-inf")

    def left(self, keys: Iterable[int], now: float) -> None:
        for key in keys:
            if len(self._keys) < REMEMBERED:
                self._keys.append(key)
                self._times.append(now)
            else:
                self._keys[self._oldest], self._times[self._oldest] = key, now
                self._oldest = (self._oldest + 1) % REMEMBERED

    def cleared(self, now: float) -> None:
        """Everything left at once."""
        self._keys, self._times, self._oldest = array("Q"), array("d"), 0
        self._cleared_at = now

    def since(self, key: int, moment: float) -> bool:
        """Whether the key left at or after `moment`."""
        if self._cleared_at >= moment:
            return True
        if not self._keys:
            return False
        keys, times = np.frombuffer(self._keys, np.uint64), np.frombuffer(self._times, np.float64)
        return bool((times[keys == np.uint64(key)] >= moment).any())
