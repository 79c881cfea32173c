"""Does the engine compute on the token ids that the router made of the same request? Sampled, and loud when not.

    decided (nothing cached)  --sent-->  waiting  --finished-->  due a moment later, when its events are in
    due:  the index holds the prompt's blocks on that slot          -> equal
          a block chain that began there since differs from ours    -> differs: warn with the first differing token
          one agrees with it (and was evicted, say), or nothing that began there since resembles it, or the stream
          was not exact all the time                                -> unseen

Rules
1. Only requests that nobody held anything of are sampled: their blocks are announced from the first token on. A router that
   tokenizes differently finds nothing cached, ever, so this is where it shows.
2. Engines announce a chain's beginning with parent nil; those announcements are kept while a sample of their slot waits, the
   last few, cut short.
3. Time is passed in. `stored` is called from the subscriber's thread, everything else from the event loop's.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from event_ingest.events import BlockStored
from gateway.logs import RateLimit
from gateway.metrics import Metrics
from gateway.tokenizers import Decode
from indexer.index import Index
from indexer.trust import Trust, exact
from tokenization.encoders import Ids
from tokenization.parity import Mismatch, compare

log = logging.getLogger(__name__)

KEPT_BEGINNINGS = 32
KEPT_TOKENS = 2048
WAITING = 64
"""Samples in flight at most."""
EVERY_S = 1.0
"""A slot is sampled at most so often."""
SETTLE_S = 1.0
"""From the end of a response until its events must be in."""
RESEMBLES = 4
"""Tokens that two prompts must share from the start to be taken for the same one tokenized differently."""


class _Sample(msgspec.Struct):
    slot: int
    endpoint: str
    token_ids: Ids
    keys: Sequence[int]
    decode: Decode
    sent_at: float
    due_at: float | None = None


class ParityWatch:
    """One for the gateway."""

    def __init__(
        self, index: Index, metrics: Metrics, trust: Callable[[int], Trust] = lambda _: exact(float("-inf"))
    ) -> None:
        """`trust`: of a slot's event stream; the announcement of a sample may be among what was lost."""
        self._index, self._metrics, self._trust = index, metrics, trust
        self._samples: dict[str, _Sample] = {}
        self._last: dict[int, float] = {}
        self._beginnings: dict[int, deque[tuple[float, Ids]]] = {}
        self._lock = threading.Lock()
        self._quiet = RateLimit(60.0)
        self.last_mismatch: dict[int, Mismatch] = {}
        """Slot -> the latest difference, for people."""

    def sent(
        self, request_id: str, slot: int, endpoint: str, token_ids: Ids, keys: Sequence[int], decode: Decode, now: float
    ) -> None:
        """A request of which nothing was cached goes to `slot`."""
        if not keys or len(self._samples) >= WAITING or now - self._last.get(slot, -EVERY_S) < EVERY_S:
            return
        self._last[slot] = now
        self._forget(request_id)
        with self._lock:
            self._beginnings.setdefault(slot, deque(maxlen=KEPT_BEGINNINGS))
        self._samples[request_id] = _Sample(slot, endpoint, token_ids, keys, decode, now)

    def finished(self, request_id: str, now: float) -> None:
        """Its response ended well; its blocks have been stored."""
        if sample := self._samples.get(request_id):
            sample.due_at = now + SETTLE_S

    def dropped(self, request_id: str) -> None:
        """It was aborted or failed: what the engine computed of it is unknown."""
        self._forget(request_id)

    def released(self, slot: int) -> None:
        """The endpoint is gone; the next one with its slot has nothing to do with what is known of it."""
        for request_id in [name for name, sample in self._samples.items() if sample.slot == slot]:
            self._forget(request_id)
        self._last.pop(slot, None)
        self.last_mismatch.pop(slot, None)

    def stored(self, slot: int, event: BlockStored, now: float) -> None:
        """An engine announced blocks."""
        if event.parent is not None or not event.tokens or slot not in self._beginnings:
            return
        beginning = np.frombuffer(event.tokens[: 4 * KEPT_TOKENS], dtype="<u4").astype(np.uint32)
        with self._lock:
            if (beginnings := self._beginnings.get(slot)) is not None:
                beginnings.append((now, beginning))

    def tick(self, now: float) -> None:
        """Judge the samples that are due (about once a second)."""
        for request_id, sample in [
            (r, s) for r, s in self._samples.items() if s.due_at is not None and s.due_at <= now
        ]:
            try:
                self._judge(request_id, sample)
            finally:
                self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        sample = self._samples.pop(request_id, None)
        if sample is not None and all(other.slot != sample.slot for other in self._samples.values()):
            with self._lock:
                self._beginnings.pop(sample.slot, None)

    def _judge(self, request_id: str, sample: _Sample) -> None:
        held = self._index.match(sample.keys).by_slot().get(sample.slot, 0)
        result = "equal" if held == len(sample.keys) else "unseen"
        if result == "unseen" and (mismatch := self._difference(sample)):
            result = "differs"
            self.last_mismatch[sample.slot] = mismatch
            if self._quiet.allows(sample.endpoint, sample.sent_at):
                log.warning("tokens_differ endpoint=%s request_id=%s %s", sample.endpoint, request_id, mismatch.message)
        self._metrics.token_parity.labels(sample.endpoint, result).inc()

    def _difference(self, sample: _Sample) -> Mismatch | None:
        """The difference from the announcement that resembles the sample most; None where none does, or where the sample's
        own may have been missed."""
        trust = self._trust(sample.slot)
        if trust.state != "exact" or trust.since >= sample.sent_at:
            return None
        with self._lock:
            announced = [ids for at, ids in self._beginnings.get(sample.slot, ()) if at >= sample.sent_at]
        found = [compare(ids, sample.token_ids, sample.decode) for ids in announced]
        differing = [mismatch for mismatch in found if mismatch is not None]
        if not found or len(differing) < len(found):  # what agrees is the sample's own
            return None
        closest = max(differing, key=lambda mismatch: mismatch.position)
        # A single announcement since can only be this request's, however early the two part.
        return closest if closest.position >= RESEMBLES or len(announced) == 1 else None
