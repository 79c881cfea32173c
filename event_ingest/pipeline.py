"""Everything for one stream in one object, without sockets: frames in, index entries and questions out.

    frames --decode--> batch --Stream--> Apply in order --Reblocker--> operations --> Index
                                    \\--> AskReplay, SetTrust: returned to whoever owns the sockets

Live ingest and the replaying of recordings use this same path.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from event_ingest.departed import Departed
from event_ingest.effects import Apply, AskReplay, DropAll, Effect, Lost, SetTrust
from event_ingest.events import AllBlocksCleared, BlockRemoved, BlockStored, Decoded, Skipped, event_kind
from event_ingest.events import Reason as SkipReason
from event_ingest.limits import Limits
from event_ingest.operations import Add, Clear, Dense, Operation, Remove
from event_ingest.reblock import Reblocker
from event_ingest.stream import END_MARKER, Stream
from event_ingest.verify import Verifier
from event_ingest.vllm_wire import decode
from indexer.hybrid import Group
from indexer.index import Index
from indexer.predicted import Predicted
from indexer.trust import Reason, Trust

log = logging.getLogger(__name__)

Outcome: TypeAlias = AskReplay | SetTrust

_JUDGED = 32  # observations that decide about over-prediction
_OVER_LIMIT = 8
_HEAL_AFTER = 16


class EventPath:
    """One stream's way into the index.

    name       for log lines and metrics: the endpoint's name or address, with its rank
    slot       the endpoint's number in the index; this object is its only feeder
    model      base model of the engine: part of every key
    can_replay whether questions (`AskReplay`) can be asked at all
    counted    whether the wire announces every copy of a block (engines do, Dynamo does not)
    sequence_key  how keys follow from ready-made content hashes, for wires without token ids
    predicted  what was expected of this engine before it said so: its events confirm it, its end ends it

    `feed*`, `connected`, `disconnected` and `tick` take the caller's monotonic time in seconds and return what its owner must
    do (`AskReplay`) or publish (`SetTrust`). Not thread-safe: one thread feeds it; the numbers may be read from others.
    """

    def __init__(
        self,
        index: Index,
        slot: int,
        *,
        name: str,
        model: str,
        can_replay: bool,
        block_tokens: int | None = None,
        limits: Limits | None = None,
        verifier: Verifier | None = None,
        counted: bool = True,
        sequence_key: Callable[[int | None, int], int] | None = None,
        predicted: Predicted | None = None,
    ) -> None:
        self.name = name
        self.slot = slot
        self.stream = Stream(can_replay=can_replay, limits=limits)
        self.ledger = Reblocker(model=model, block_tokens=block_tokens, counted=counted, sequence_key=sequence_key)
        self.verifier = verifier
        self.events: Counter[str] = Counter()
        """Events applied, by kind."""
        self.skipped: Counter[str] = Counter()
        """What could not be used, by reason."""
        self.lag_s = 0.0
        """Engine time of the last batch to the moment it was applied; needs `wall` in `feed`."""
        self.heard_at: float | None = None
        """When the subscription last said something, on the caller's clock; None before the first message."""
        self.on_stored: Callable[[BlockStored, float], None] | None = None
        """Hears every stored event after it was applied, with the caller's time; on the feeding thread."""
        self._index = index
        self._departed = Departed()
        self._predicted = predicted
        self._trust = self.stream.trust
        self._unmodelled = ""
        self._judgements: deque[int] = deque(maxlen=_JUDGED)
        self._agreed = 0
        index.set_dense(slot, True)

    @property
    def trust(self) -> Trust:
        """What can be claimed about this stream's entries now."""
        return self._trust

    @property
    def block_tokens(self) -> int | None:
        """The router's block size on this stream, None until it is learned from the first stored block."""
        return self.ledger.block_tokens

    @property
    def engine_block_tokens(self) -> int | None:
        """The engine's block size: matches are to be rounded down to it."""
        return self.ledger.engine_block_tokens

    @property
    def groups(self) -> tuple[Group, ...]:
        """The engine's cache groups, as far as announced. More than full attention: match with `indexer.hybrid`."""
        return tuple(self.ledger.groups.values())

    @property
    def is_hybrid(self) -> bool:
        """Whether a hit needs more than a prefix in the full-attention groups."""
        return self.ledger.hybrid

    # ------------------------------------------------------------------------------------------------------- in, out

    def connected(self, now: float) -> list[Outcome]:
        """The subscription is up: ask for what was published before."""
        return self._carry_out(self.stream.connected(now), now)

    def disconnected(self, now: float) -> list[Outcome]:
        return self._carry_out(self.stream.disconnected(now), now)

    def resumed(self, now: float) -> list[Outcome]:
        """The subscription is up again, on a wire that repeats what passed meanwhile."""
        return self._carry_out(self.stream.resumed(now), now)

    def tick(self, now: float) -> list[Outcome]:
        """Let time pass (about once a second): unanswered questions, quiet streams."""
        return self._carry_out(self.stream.tick(now), now)

    def feed(self, frames: Sequence[bytes], now: float, wall: float | None = None) -> list[Outcome]:
        """One message of the subscription: topic, sequence number, payload."""
        self.heard_at = now
        seq = _sequence(frames)
        if seq is None:
            return self._bad_frames(frames, now)
        decoded = decode(frames[-1])
        ts = time_of(decoded)
        if wall is not None and ts is not None:
            self.lag_s = wall - ts
        return self._carry_out(self.stream.live(seq, ts, decoded, now), now)

    def feed_replay(self, frames: Sequence[bytes], now: float) -> list[Outcome]:
        """One message of the replay socket: a batch (with or without delimiter and topic in front) or the end marker."""
        if len(frames) >= 2 and frames[-2] == END_MARKER:
            return self._carry_out(self.stream.replay_ended(now), now)
        seq = _sequence(frames)
        if seq is None:
            return self._bad_frames(frames, now)
        decoded = decode(frames[-1])
        return self._carry_out(self.stream.replayed(seq, time_of(decoded), decoded, now), now)

    def feed_batch(self, seq: int, ts: float | None, decoded: Decoded, now: float) -> list[Outcome]:
        """One batch that another wire brought, already decoded."""
        return self._carry_out(self.stream.live(seq, ts, decoded, now), now)

    def observe(
        self,
        keys: Sequence[int],
        prompt_tokens: int,
        predicted_tokens: int,
        cached_tokens: int,
        now: float,
        decided_at: float = math.inf,
    ) -> list[Outcome]:
        """An engine reported how much of a prompt it had cached: confirm or drop suspects, judge the trust.

        `keys` are the prompt's block keys at this stream's block size, `predicted_tokens` what was predicted for it here at
        `decided_at`. Fewer cached tokens are no fault of the stream where it has announced since then that the first missing
        block is gone: the engine made room before it came to this prompt.
        """
        block, engine_block = self.block_tokens or 1, self.engine_block_tokens or 1
        usable = max(prompt_tokens - 1, 0) // engine_block * engine_block
        self._operate(self.ledger.confirm(keys[: usable // block], cached_tokens))
        missing = cached_tokens // block
        if predicted_tokens > cached_tokens and missing < len(keys) and self._departed.since(keys[missing], decided_at):
            return self._settle(now)
        self._judgements.append(predicted_tokens - cached_tokens)
        expressible = cached_tokens // block * block // engine_block * engine_block
        self._agreed = self._agreed + 1 if predicted_tokens in (cached_tokens, expressible) else 0
        over = sum(1 for difference in self._judgements if difference > 0)
        if over >= _OVER_LIMIT:
            if self.stream.trust.state == "exact":
                self._operate(self.ledger.distrust())  # something is held here and not there: find out what
            detail = f"{over} of the last {len(self._judgements)} requests had less cached than predicted"
            self.stream.doubt(Reason.OVERPREDICTED, detail, self.stream.next_seq or 0, now)
        elif self._agreed >= _HEAL_AFTER and not self.ledger.suspects:
            self.stream.heal(now)
        stale = predicted_tokens > cached_tokens
        if stale or self._unannounced(keys, prompt_tokens):
            return self._carry_out(self.stream.probe(now, stale=stale), now)
        return self._settle(now)

    def _unannounced(self, keys: Sequence[int], prompt_tokens: int) -> bool:
        """Whether a prompt was computed whose last whole block no batch has told of: the wire may have gone silent."""
        engine_block, block = self.engine_block_tokens or 1, self.block_tokens or 1
        whole = min(prompt_tokens // engine_block * engine_block // block, len(keys))
        return whole > 0 and self._index.tier_of(self.slot, keys[whole - 1]) is None

    def counters(self) -> dict[str, int]:
        """Everything countable about this stream, by metric label; the last six are gauges."""
        ledger = self.ledger
        return {
            **msgspec.structs.asdict(self.stream.counters),
            **msgspec.structs.asdict(ledger.counters),
            "orphans_resolved": ledger.resolved,
            "orphans_dropped": ledger.dropped,
            "batches_waiting": self.stream.waiting,
            "orphans_waiting": ledger.waiting,
            "suspects": ledger.suspects,
            "engine_blocks": ledger.blocks,
            "keys": ledger.held_keys,
            "holes": ledger.holes,
        }

    def close(self) -> None:
        """The endpoint is going: take its entries out of the index. Its slot may be given away afterwards."""
        self._operate(self.ledger.clear(forget_groups=True))

    # --------------------------------------------------------------------------------------------------- how it works

    def _carry_out(self, effects: Sequence[Effect], now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for effect in effects:
            match effect:
                case Apply(seq, decoded):
                    self._apply(seq, decoded, now)
                case AskReplay():
                    outcomes.append(effect)
                case DropAll(reason):
                    self._departed.cleared(now)
                    log.warning("cache_replaced stream=%s reason=%s keys=%d", self.name, reason, self.ledger.held_keys)
                    self._operate(self.ledger.clear(forget_groups=True))
                    self._unmodelled = ""
                    self._judgements.clear()
                    if self.verifier is not None:
                        self.verifier.restart()
                case Lost(reason, batches):
                    log.warning("batches_lost stream=%s batches=%d reason=%r", self.name, batches, reason)
                    self._operate(self.ledger.distrust())
                case SetTrust():
                    pass  # what was applied since may have changed it: see _settle
        return outcomes + self._settle(now)

    def _settle(self, now: float) -> list[Outcome]:
        trust = self.stream.trust
        if trust.state != "blind" and self._unmodelled:
            trust = Trust("blind", Reason.UNKNOWN_KIND, trust.since, self._unmodelled)
        elif trust.state == "exact" and self._index.lost(self.slot):
            trust = Trust("degraded", Reason.INDEX_EVICTED, now, "the index reached a limit")
        if (trust.state, trust.reason, trust.detail) == (self._trust.state, self._trust.reason, self._trust.detail):
            return []
        log.info("trust_changed stream=%s trust=%s was=%s detail=%r", self.name, trust, self._trust, trust.detail)
        self._trust = trust
        return [SetTrust(trust)]

    def _apply(self, seq: int, decoded: Decoded, now: float) -> None:
        for skipped in decoded.skipped:
            self._skip(skipped, seq, now)
        if decoded.batch is None:
            return
        if self.ledger.engine_block_tokens is None:
            self.ledger.learn(decoded.batch.events)
        for event in decoded.batch.events:
            self.events[event_kind(event)] += 1
            operations = self.ledger.apply(event)
            self._operate(operations)
            if isinstance(event, BlockRemoved):
                for operation in operations:
                    if isinstance(operation, Remove):
                        self._departed.left(operation.keys, now)
            if self.on_stored is not None and isinstance(event, BlockStored):
                self.on_stored(event, now)
            if isinstance(event, AllBlocksCleared):
                self._departed.cleared(now)
                self.stream.cleared(seq, now)
            elif isinstance(event, BlockStored) and self.verifier is not None and not self.verifier.done:
                known = self.verifier.mismatch
                self.verifier.check(event)
                if self.verifier.mismatch and not known:
                    log.warning("hash_mismatch stream=%s detail=%r", self.name, self.verifier.mismatch)
            if self.ledger.skipped:
                skipped_now, self.ledger.skipped = self.ledger.skipped, []
                for skipped in skipped_now:
                    self._skip(skipped, seq, now)

    def _skip(self, skipped: Skipped, seq: int, now: float) -> None:
        self.skipped[skipped.reason] += 1
        log.debug("event_skipped stream=%s seq=%d reason=%s detail=%r", self.name, seq, skipped.reason, skipped.detail)
        if skipped.reason is SkipReason.UNSUPPORTED_CACHE_KIND:
            self._unmodelled = skipped.detail
        elif skipped.loses != "nothing":
            reason = Reason.ORPHANS if skipped.reason is SkipReason.ORPHANS_FULL else Reason.SKIPPED_EVENTS
            self.stream.doubt(reason, f"{skipped.reason}: {skipped.detail}", seq, now)
            if skipped.loses == "removals" and skipped.reason is not SkipReason.UNKNOWN_KIND:
                # Something may be gone that we still hold. An unknown kind only marks the trust: an engine may send
                # such events all the time, and every one would make all entries suspects again.
                self._operate(self.ledger.distrust())

    def _bad_frames(self, frames: Sequence[bytes], now: float) -> list[Outcome]:
        self.skipped[SkipReason.BAD_FRAMES] += 1
        log.debug("frames_skipped stream=%s frames=%d sizes=%s", self.name, len(frames), [len(f) for f in frames[:8]])
        return self._settle(now)

    def _operate(self, operations: Sequence[Operation]) -> None:
        index, slot = self._index, self.slot
        for operation in operations:
            match operation:
                case Add(tier, keys):
                    index.add(slot, tier, keys)
                    if self._predicted:
                        self._predicted.confirm(slot, keys)
                case Remove(tier, keys):
                    index.remove(slot, tier, keys)
                case Clear(keys):
                    index.clear(slot, keys)
                    if self._predicted:
                        self._predicted.clear(slot)
                case Dense(dense):
                    index.set_dense(slot, dense)


def _sequence(frames: Sequence[bytes]) -> int | None:
    """The sequence number of a message; counted from the end, because replays come with and without a topic."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big")


def time_of(decoded: Decoded) -> float | None:
    """A batch's engine time; None where it could not be read: then it tells no incarnation from another."""
    return (decoded.batch.ts or None) if decoded.batch is not None else None
