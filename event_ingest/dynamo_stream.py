"""Dynamo's events into the index: one path per (worker, rank), fed from one subscription.

Its wire carries no token ids, so keys cannot be computed at the router's block size. The index holds Dynamo's own chained
hashes at the engine's block size instead, and a request is matched by computing the same hashes from its tokens:
`request_keys`. What follows from that:

* the block size must be configured, it is not on the wire; re-blocking is impossible
* salts and media enter `tokens_hash` in ways that requests cannot repeat here: such blocks match nothing
* models are kept apart by mixing the model's root key into every key, on both sides

Event ids play the part of sequence numbers. Nobody can be asked for lost ones over NATS (workers answer on another
plane), so a gap means distrust, as on a ZMQ stream without a replay address. Publishers announce a removal when their last
copy goes, so copies are not counted again here.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from event_ingest.dynamo_wire import Subject, WorkerEvent, decode, parse_subject
from event_ingest.events import Batch, Decoded
from event_ingest.events import Reason as SkipReason
from event_ingest.pipeline import EventPath, Outcome
from indexer.block_key import Tokens, root_key
from indexer.dynamo_hash import local_hashes, seed_of, sequence_hashes

log = logging.getLogger(__name__)


class Worker(msgspec.Struct, frozen=True):
    """Who an event comes from. The id is Dynamo's instance id; discovery knows its address."""

    namespace: str
    component: str
    worker_id: int
    rank: int


PathFor: TypeAlias = Callable[[Worker, Subject], EventPath | None]


def request_keys(model: str, tokens: Tokens, block_tokens: int, *, lora: str | None = None) -> list[int]:
    """The keys under which a Dynamo stream holds a prompt's blocks."""
    mask = root_key(model)
    return [key ^ mask for key in sequence_hashes(local_hashes(tokens, block_tokens, seed_of(lora)))]


def sequence_key(model: str) -> Callable[[int | None, int], int]:
    """How a stream's key follows from its parent's key and a block's `tokens_hash`: for `EventPath(sequence_key=...)`."""
    mask = root_key(model)

    def follow(parent: int | None, content: int) -> int:
        return sequence_hashes([content], None if parent is None else parent ^ mask)[0] ^ mask

    return follow


class DynamoEvents:
    """Takes messages from NATS and feeds the paths of the workers they come from.

    `path_for` gives the path of a worker when its first event arrives (made with `can_replay=False`, `counted=False`,
    `sequence_key`), or None for workers that are none of ours, whose events are counted in `foreign`.
    """

    def __init__(self, path_for: PathFor, block_tokens: int) -> None:
        self.foreign = 0
        self.messages = 0
        """Messages heard. A subscription that stays at 0 while workers serve has the wrong subject."""
        self.skipped: Counter[str] = Counter()
        self._path_for = path_for
        self._block_tokens = block_tokens
        self._paths: dict[Worker, tuple[EventPath, int]] = {}

    def feed(self, subject: str, body: bytes, now: float, stamp: float | None = None) -> list[tuple[Worker, Outcome]]:
        """One message. `stamp` is its time where the body has none (JetStream's own, s): it tells a repeated message
        from a restarted worker."""
        parsed = parse_subject(subject)
        if parsed is None or parsed.topic != "kv-events":
            self.skipped[SkipReason.BAD_FRAMES] += 1
            log.debug("subject_unknown subject=%r", subject)
            return []
        self.messages += 1
        envelope = decode(body, self._block_tokens)
        for skipped in envelope.skipped:
            self.skipped[skipped.reason] += 1
            log.debug("event_skipped subject=%s reason=%s detail=%r", subject, skipped.reason, skipped.detail)
        ts = envelope.published_s if envelope.published_s is not None else stamp
        outcomes: list[tuple[Worker, Outcome]] = []
        for event in envelope.events:
            worker = Worker(parsed.namespace, parsed.component, event.worker_id, event.rank)
            outcomes += [(worker, outcome) for outcome in self._feed(worker, parsed, event, ts, now)]
        return outcomes

    def forget(self, worker: Worker) -> None:
        """A worker is gone: drop its entries."""
        known = self._paths.pop(worker, None)
        if known is not None:
            known[0].close()

    def _feed(
        self, worker: Worker, subject: Subject, event: WorkerEvent, ts: float | None, now: float
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        known = self._paths.get(worker)
        if known is None:
            path = self._path_for(worker, subject)  # asked for every event: a stranger may become one of ours
            if path is None:
                self.foreign += 1
                return []
            known = self._paths[worker] = (path, min(event.event_id, 1))
            outcomes = path.connected(now)
        path, first = known
        if event.event_id < first:  # a release that counts from 0 was joined late and has now restarted
            self._paths[worker] = (path, 0)
            first = 0
        decoded = Decoded(Batch(ts or 0.0, (event.event,), event.rank))
        return outcomes + path.feed_batch(event.event_id - first, ts, decoded, now)
