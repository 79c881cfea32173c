"""How many streamed replies the gateway reads as they go by, and how many only begin and end for it.

Every piece of a streamed reply (a token or a few) is a message from Envoy, and all replies together come in as many pieces as
the fleet makes tokens: a few busy H100s make more than one Python process can read. What a reply says is worth reading all
the same: when its first token came, what its usage reports, whether it ended well. So replies are read while the pieces per
second stay within a budget; of the others Envoy shows the headers and the end. Their prefill is then over when the engine's
events say so (`prefill_progress`), and everything else that is learnt comes from those that are read.

    wanted: (replies being read + 1) * pieces per second and reply <= budget

The pieces per second and reply are measured; a reply counts from the moment of its decision, so that a burst is not read whole
because its pieces are still to come. Where one reply alone seems to be more than the budget, one is read now and then all the
same: only a reply that is read can show that they have become slower.
"""

USUAL_RATE = 50.0
"""Pieces per second of one reply, before anything was measured: tokens of one sequence on a busy engine."""
WINDOW_S = 1.0
KEPT = 0.7
"""Share of the old estimate that a new window leaves."""
AGAIN_S = 10.0
"""After so long without any, one reply is read whatever the estimate is."""


class ReplyBudget:
    """Sans-IO; the event loop's thread owns it. `per_second`: pieces; None has no limit."""

    def __init__(self, per_second: float | None, now: float) -> None:
        self.per_second = per_second
        self.reading = 0
        """Streamed replies that are being read."""
        self.rate = USUAL_RATE
        """Pieces per second of one of them."""
        self._pieces = 0
        self._reply_s = 0.0  # replies read times seconds, in this window
        self._since = self._changed = now
        self._read_at = now - AGAIN_S  # when the last reply that was read began or ended

    def has_room(self, now: float) -> bool:
        """Whether one more reply can be read."""
        self._pass(now)
        if self.per_second is None or (self.reading + 1) * self.rate <= self.per_second:
            return True
        return self.per_second > 0 and not self.reading and now - self._read_at >= AGAIN_S

    def begin(self, now: float) -> None:
        """A reply is going to be read; it counts from here on until `end`."""
        self._pass(now)
        self._read_at = now
        self.reading += 1

    def piece(self) -> None:
        """A piece of a reply was read."""
        self._pieces += 1

    def end(self, now: float) -> None:
        """It is over."""
        self._pass(now)
        self._read_at = now
        self.reading -= 1

    def _pass(self, now: float) -> None:
        self._reply_s += self.reading * (now - self._changed)
        self._changed = now
        if now - self._since >= WINDOW_S:
            if self._reply_s > 0:
                self.rate = KEPT * self.rate + (1 - KEPT) * self._pieces / self._reply_s
            self._since, self._pieces, self._reply_s = now, 0, 0.0
