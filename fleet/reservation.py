"""What one request costs on one slot, frozen when it is sent there."""

from collections.abc import Sequence


def square(uncached: float, cached: float) -> float:
    """n * (h + n/2): token pairs that attention works on for n new tokens after h cached ones."""
    return uncached * (cached + uncached / 2.0)


class Leg:
    """One reservation on one slot."""

    __slots__ = (
        "cached",
        "expected",
        "fetched",
        "keys",
        "model",
        "prefill_only",
        "request_id",
        "reserved_at",
        "seen_at",
        "slot",
        "square",
        "stored",
        "uncached",
        "unseen",
        "waiting",
    )

    def __init__(self, request_id: str, slot: int, uncached: float, cached: float, expected: float, now: float) -> None:
        self.request_id, self.slot = request_id, slot
        self.uncached, self.cached, self.expected = uncached, cached, expected
        self.fetched = 0.0  # of the cached tokens, those that another endpoint computes and this one fetches
        self.square = square(uncached, cached)
        self.stored = cached  # leading tokens that are there now, as far as events tell
        self.keys: Sequence[int] = ()
        self.reserved_at = self.seen_at = now
        self.waiting = True
        self.prefill_only = False
        self.model = ""
        self.unseen = False  # nothing of the reply is seen before its end

    @property
    def computes(self) -> bool:
        """Whether the slot computes the prompt: another one does what is fetched, and an encoder does none of it."""
        return not self.fetched and (self.uncached > 0 or not self.prefill_only)

    @property
    def room(self) -> float:
        """Tokens for which the slot needs cache that it does not use yet."""
        return self.uncached + self.fetched + self.expected
