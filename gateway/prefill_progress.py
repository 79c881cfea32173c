"""How far prefills have got before their first token is seen: from the engines' events, and from the clock.

A first token tells the books that a prefill is over. Two things are not told by it:

1. Of a reply that is not streamed nothing is seen before its end, long after its prefill. Its endpoint would look busy for
   as long as it decodes. Its prefill counts as over when the engine has announced the prompt's last full block, or when it
   has been at it for half as long again as it should take.
2. Where `progress: events` is configured, the books want to know how much of the running prompt is there already.

Only the oldest prompt of an endpoint is looked at: the engine works on that one.
"""

from collections.abc import Callable, Sequence

from fleet.books import Books
from fleet.fleet import Fleet
from fleet.reservation import Leg
from scorers.expected_work_scorer import ExpectedWorkScorer

OVERDUE = 1.5
"""Times its expected duration after which an unseen prefill is over."""


class PrefillProgress:
    """Call `tick` a few times a second. `holds(slot, key)`: whether the index has the block there."""

    def __init__(
        self, fleet: Fleet, books: Books, holds: Callable[[int, int], bool], block_tokens: Callable[[int], int]
    ) -> None:
        self.scorer: ExpectedWorkScorer | None = None
        """Whose constants say how long a prefill takes; without one nothing is guessed from the clock."""
        self._fleet, self._books, self._holds, self._block_tokens = fleet, books, holds, block_tokens

    def tick(self, now: float) -> None:
        """Bring the books up to date."""
        by_events = self.scorer is not None and self.scorer.parameters.progress == "events"
        for slot in self._books.computing():
            while (leg := self._books.oldest(slot)) is not None and leg.unseen and self._over(leg, now):
                self._books.computed(leg.request_id, slot, now)
            if leg is not None and by_events and leg.keys:
                cached = self._leading(slot, leg.keys) * self._block_tokens(slot)
                self._books.stored(leg.request_id, slot, cached)

    def _over(self, leg: Leg, now: float) -> bool:
        if leg.keys and self._holds(leg.slot, leg.keys[-1]):
            return True
        if self.scorer is None:
            return False
        took = self.scorer.prefill_s(leg, self._fleet)
        return bool(now - self._fleet.oldest_since[leg.slot] > OVERDUE * took)

    def _leading(self, slot: int, keys: Sequence[int]) -> int:
        """Leading blocks that the slot holds, taking it that there are no holes."""
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if self._holds(slot, keys[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low
