# The life of one event stream: one engine, one data-parallel rank.
#
#   (new) --connected--> SYNCING --whole buffer replayed--> LIVE --gap--> CATCHING_UP --gap replayed--> LIVE
#   LIVE --disconnected, connected again--> CATCHING_UP (is it still the same engine?)
#   any --another incarnation of the engine--> SYNCING, everything known is dropped
#   SYNCING, CATCHING_UP --what is missing cannot be had--> LIVE, a fault stays on the trust until the cache is cleared
#
# What an engine gives us: batches numbered from 0 per process, a wall-clock time in each, and (perhaps) a replay socket that
# repeats the last N batches from a number on. It never says goodbye, has no epoch, answers a request for batches that it no
# longer holds with what it has and no error, and may lose messages in the middle or at the end of a long answer.
#
# Rules
# 1. Only this file knows sequence numbers. It takes batches as they come and returns effects. Someone else owns the sockets,
#    the clock and the index. `item` is whatever the caller wants back in `Apply`.
# 2. Batches leave in sequence order. What comes early waits (bounded; beyond the bound the newest are dropped and counted, and
#    asked for again). What comes twice is dropped and counted.
# 3. Every question starts at the last batch that was applied, not after it: its time is compared with the one remembered. A
#    different time for a known number is another incarnation of the engine; an answer that does not reach that number means
#    that the engine has published less than we have seen: another incarnation too.
#    A probe reaches further back: where the first batches of a new incarnation were lost on a link that never broke, and the
#    next one joined by its number, the last batches are the new one's, and only those before tell.
# 4. A number that falls back is a duplicate if that number is remembered with that time, otherwise another incarnation.
# 5. The end marker is not believed. An answer with holes, one that stops early, and none at all are followed by another question
#    from the last contiguous batch; a long answer is followed by a short confirming one. Questions without progress are bounded.
# 6. An unrecoverable gap never passes silently: `Lost` tells the owner that entries from before it may be stale, and the trust
#    names the fault. A gap at the very beginning loses nothing that we hold, so it only marks the trust.
# 7. A quiet stream is probed: a lost last batch or a restarted idle engine shows without waiting for traffic. So is one
#    whose engine reports something else than its batches say (`probe`). Where it reports less cached than we held, the trust
#    is `degraded(catching_up)` until the answer is complete; where it only failed to announce, from `doubt_after_s` without a
#    word on: announcements are often a moment late, and answers are not.
# 8. What was given up because nobody answered is asked for again later, from the very beginning: where the engine still has its
#    first batch, everything is rebuilt.
# 9. After `cleared()` (the engine emptied its cache) the picture is complete again, whatever was lost before.

import enum
import math
from collections import OrderedDict
from typing import Any, TypeAlias

import msgspec

from indexer.trust import Reason, Trust
from indexer.trust import State as TrustState

END_MARKER = b"\xff" * 8
_LONGEST_REPAIR_DELAY_S = 600.0

Fault: TypeAlias = tuple[Reason, str]
NO_REPLAY: Fault = (Reason.NO_REPLAY, "no replay address to ask for the batches before")


class State(enum.Enum):
    SYNCING = "syncing"
    LIVE = "live"
    CATCHING_UP = "catching_up"


class Apply(msgspec.Struct, frozen=True):
    """Apply this batch now; batches come in sequence order."""

    seq: int
    item: Any


class AskReplay(msgspec.Struct, frozen=True):
    """Ask the engine for batches from `start` on, on a fresh socket (late answers to older questions would confuse this one)."""

    start: int


class DropAll(msgspec.Struct, frozen=True):
    """Whatever is known about this engine's cache is void: drop every entry and every hash."""

    reason: str


class Lost(msgspec.Struct, frozen=True):
    """Batches are gone for good: entries held now may be stale and must not count in full until confirmed."""

    reason: str
    batches: int


class SetTrust(msgspec.Struct, frozen=True):
    trust: Trust


Effect = Apply | AskReplay | DropAll | Lost | SetTrust


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the state machine. Times in seconds, on the caller's clock."""

    answer_timeout_s: float = 3.0
    """A question without progress for so long has failed. An idle engine needs about 0.1 s to notice one."""
    questions: int = 3
    """Questions without progress before what is missing is given up."""
    waiting: int = 20_000
    """Batches that may wait for earlier ones."""
    remembered: int = 4096
    """Batch times kept for telling duplicates from restarts."""
    confirm_above: int = 256
    """An answer longer than this is followed by a confirming question: its tail may have been dropped."""
    probe_idle_s: float = 30.0
    """A stream that says nothing for so long is asked whether it is still the same; 0 never asks."""
    probe_again_s: float = 1.0
    """Probes that a response gives reason for (`probe`) are at least so far apart."""
    probe_back: int = 64
    """Batches before the last one that a probe asks for as well."""
    doubt_after_s: float = 0.5
    """An engine that does not answer such a probe for so long is in doubt, well before the question has failed."""


class Counters(msgspec.Struct):
    """What happened on this stream since it began; names are metric labels."""

    applied: int = 0
    duplicates: int = 0
    gaps: int = 0
    lost_batches: int = 0
    restarts: int = 0
    questions: int = 0
    replayed: int = 0
    waiting_dropped: int = 0


class _Question(msgspec.Struct):
    last: int  # the batch that an answer must reach back to
    deadline: float
    known: bool  # whether that is a batch that was applied, so that an answer must contain it
    repair: bool = False
    doubt_at: float = math.inf  # when no answer begins to mean something
    progress: bool = False
    answers: int = 0
    newest: int = -1


class Stream:
    """See the head of this file. All methods take the caller's monotonic `now` in seconds and return effects in order."""

    def __init__(self, *, can_replay: bool, limits: Limits | None = None) -> None:
        self.state = State.SYNCING
        self.counters = Counters()
        self.trust = Trust("blind", Reason.NO_EVENTS, 0.0, "connecting")
        self._limits = limits or Limits()
        self._can_replay = can_replay
        self._next: int | None = None  # None: nothing of this incarnation was applied or is known to be complete
        self._times: OrderedDict[int, float | None] = OrderedDict()
        self._waiting: dict[int, tuple[float | None, Any]] = {}
        self._last_live: tuple[int, float] | None = None
        self._question: _Question | None = None
        self._failures = 0  # questions without progress since the last progress
        self._fault: Fault | None = None
        self._unverified = False  # reconnected, and not yet seen that it is still the same incarnation
        self._fault_before = 0  # the first batch after which the fault matters no more, if that batch clears the cache
        self._connected = False
        self._broken = False  # the link was up, and is not known to be up again
        self._heard_at = 0.0
        self._repair_at: float | None = None
        self._repair_delay = 0.0
        self._probed_at = -math.inf
        self._probe_wanted = False
        self._doubted = False  # a response does not fit, and the engine has not yet answered what it published
        self._out: list[Effect] = []

    # ------------------------------------------------------------------------------------------------ what happens

    @property
    def next_seq(self) -> int | None:
        """The sequence number that would be applied next; None before anything is known."""
        return self._next

    @property
    def waiting(self) -> int:
        """Batches that wait for earlier ones."""
        return len(self._waiting)

    def connected(self, now: float) -> list[Effect]:
        """The subscription is up (again). Only now may a question be asked, or batches between would be missed."""
        self._connected = True
        self._broken = False
        self._heard_at = now
        if not self._can_replay:
            if self._next is None:
                self.state = State.LIVE
                self._fault = self._fault or NO_REPLAY
            else:  # what passed while we were away cannot be known
                self._lose("reconnected, and no replay address to ask what was missed", 0)
            return self._done(now)
        self.state = State.SYNCING if self._next is None else State.CATCHING_UP
        self._failures = 0
        self._doubted = False
        self._unverified = self._next is not None
        self.counters.waiting_dropped += len(self._waiting)
        self._waiting.clear()  # they may be another incarnation's; the answer has them if they are not
        self._ask(now)
        return self._done(now)

    def disconnected(self, now: float) -> list[Effect]:
        """The subscription is down: the picture ages from here on."""
        self._connected = False
        self._broken = True
        self._question = None
        return self._done(now)

    def resumed(self, now: float) -> list[Effect]:
        """The link is up again, and its wire has repeated what passed meanwhile: nothing was missed."""
        self._connected = True
        self._broken = False
        self._heard_at = now
        return self._done(now)

    def live(self, seq: int, ts: float | None, item: Any, now: float) -> list[Effect]:
        """A batch from the subscription. `ts` is its engine time, None where the payload could not be read."""
        if self._broken and self._can_replay:
            # Still from the old link, or already from another incarnation of the engine, whose numbers may join: nobody
            # can say. The question that follows `connected` is answered with it if it counts.
            self.counters.waiting_dropped += 1
            return self._done(now)
        self._connected = not self._broken
        self._heard_at = now
        if self._restarted_live(seq, ts):
            self._restart(now, begins=seq == 0)
        if ts is not None and (self._last_live is None or seq > self._last_live[0]):
            self._last_live = (seq, ts)

        if self._next is None and not (self._can_replay and self.state is State.SYNCING):
            # Nothing to ask, or nobody answers: begin with what there is.
            self._next = seq
            self._fault = None if seq == 0 else self._fault or (Reason.NO_REPLAY, f"joined at batch {seq}")
        if self._next is not None and seq < self._next:
            self.counters.duplicates += 1
        elif seq == self._next and not self._unverified:
            self._apply(seq, ts, item)
            self._drain()
        else:
            self._wait(seq, ts, item)
            if self.state is State.LIVE and self._waiting:
                self._gap(now)
        if self.state is not State.LIVE and self._question is None:
            self._settle(now)
        return self._done(now)

    def replayed(self, seq: int, ts: float | None, item: Any, now: float) -> list[Effect]:
        """A batch from the replay socket."""
        question = self._question
        if question is None:
            self.counters.duplicates += 1
            return self._done(now)
        self.counters.replayed += 1
        question.answers += 1
        question.newest = max(question.newest, seq)
        question.deadline = now + self._limits.answer_timeout_s
        if self._differs(seq, ts):
            self._restart(now)
            return self._done(now)
        if question.repair and question.answers == 1 and seq == 0:
            self._forget("rebuilding")
            self.state = State.SYNCING
            self._question = question
        if self._next is None:
            # The beginning of what the engine still has. Nothing is held yet, so an older beginning can only cost matches:
            # live batches from before it, whose successors are gone, are of no use.
            self._begin_at(seq)
            if seq > 0:
                self._fault = (Reason.LOST_BATCHES, f"the engine's buffer begins at batch {seq}")
        elif question.answers == 1 and seq > question.last and self._next > 0 and not self._same(seq, ts):
            # The buffer no longer reaches back to the last batch applied. Even where the numbers join, nobody can say
            # that they belong to the same incarnation.
            self._lose("older than the engine's buffer", max(seq - self._next, 0))
            self._begin_at(max(seq, self._next))
        self._unverified = False  # the first answer was the last batch applied, or what follows a loss
        assert self._next is not None
        if seq < self._next:
            self.counters.duplicates += seq > question.last  # what was asked for although it is known is none
            self._drain()
        elif seq == self._next:
            question.progress = True
            self._apply(seq, ts, item)
            self._drain()
        else:
            self._wait(seq, ts, item)
        return self._done(now)

    def replay_ended(self, now: float) -> list[Effect]:
        """The end marker. It says that the engine sent everything, not that everything arrived."""
        question = self._question
        if question is None:
            return self._done(now)
        self._question = None
        if question.known and question.newest < question.last:
            # The engine does not have the last batch that we had applied: it has published less than we have seen.
            self._restart(now)
            return self._done(now)
        if question.progress:
            self._failures = 0
        if self._next is None and not self._waiting:
            self._next = 0  # an engine that has not published anything
        if question.answers > self._limits.confirm_above and question.progress:
            self._ask(now)
        else:
            self._settle(now, asked=not question.progress)
        return self._done(now)

    def tick(self, now: float) -> list[Effect]:
        """Let time pass: questions that nobody answers, streams that have gone quiet. Call about once a second."""
        question = self._question
        if question is not None and now >= question.deadline:
            self._question = None
            if question.progress:
                self._failures = 0
            if question.repair and not question.answers and not self._waiting and self._next is not None:
                self._repair_delay = min(2 * self._repair_delay, _LONGEST_REPAIR_DELAY_S)
                self._repair_at = now + self._repair_delay  # still nobody there; nothing is worse than before
            else:
                self._settle(now, asked=not question.progress, silent=True)
        elif question is not None and now >= question.doubt_at and not question.answers:
            self._doubted = True
        elif question is None and self._connected and self._probe_wanted:
            self._probe(now)
        elif question is None and self._connected and self._repair_at is not None and now >= self._repair_at:
            self._repair_at = None
            self._ask(now, repair=True)
        elif (
            question is None
            and self._connected
            and self._can_replay
            and self._limits.probe_idle_s
            and now - self._heard_at >= self._limits.probe_idle_s
        ):
            self._heard_at = now
            self._ask(now, back=self._limits.probe_back)
        return self._done(now)

    def probe(self, now: float, *, stale: bool) -> list[Effect]:
        """A response does not fit what was announced: ask at once for batches that did not arrive (rule 7).

        `stale`: the engine had less than we held for it; otherwise it computed something that it has not announced.
        """
        if self.state is State.LIVE and self._connected and self._can_replay:
            self._probe_wanted = True
            self._doubted |= stale
            self._probe(now)
        return self._done(now)

    def cleared(self, seq: int, now: float) -> list[Effect]:
        """Batch `seq` emptied the engine's cache: what was lost before it matters no more."""
        if seq >= self._fault_before:
            self._fault = None
        return self._done(now)

    def doubt(self, reason: Reason, detail: str, seq: int, now: float) -> list[Effect]:
        """Something in batch `seq` could not be used: the trust says so until the cache is cleared after it."""
        if self._fault is None:
            self._fault = (reason, detail)
        self._fault_before = max(self._fault_before, seq)
        return self._done(now)

    def heal(self, now: float) -> list[Effect]:
        """The engine's own reports have agreed with the picture for long enough: forgive the fault."""
        self._fault = None
        return self._done(now)

    # ---------------------------------------------------------------------------------------------- how it is done

    def _restarted_live(self, seq: int, ts: float | None) -> bool:
        """Whether a live batch shows that another incarnation of the engine is speaking (rules 3 and 4)."""
        if ts is None:
            # Cannot be told; the next readable batch will. Where none ever had a time and nobody repeats any, it is the number.
            timeless = self._last_live is None and not self._can_replay
            return timeless and self._next is not None and seq < self._next
        if self._known_time(seq) is not None:
            return self._differs(seq, ts)
        if self._last_live is not None and seq <= self._last_live[0] and ts > self._last_live[1]:
            return True  # later in time, earlier in number
        if seq in self._times or seq in self._waiting:
            return False  # that one was unreadable
        return self._next is not None and seq < self._next

    def _known_time(self, seq: int) -> float | None:
        waiting = self._waiting.get(seq)
        return waiting[0] if waiting is not None else self._times.get(seq)

    def _differs(self, seq: int, ts: float | None) -> bool:
        """Whether a number is known with another time."""
        known = self._known_time(seq)
        return ts is not None and known is not None and ts != known

    def _same(self, seq: int, ts: float | None) -> bool:
        """Whether this very batch was applied, as happens where the subscription is faster than a long answer."""
        return self._next is not None and seq < self._next and ts is not None and self._times.get(seq) == ts

    def _restart(self, now: float, *, begins: bool = False) -> None:
        """Another incarnation. Where its first batch is at hand (`begins`) there is nothing to ask."""
        self.counters.restarts += 1
        self._forget("engine_restarted")
        self.state = State.LIVE
        if begins:
            self._next = 0
        elif self._can_replay:
            self.state = State.SYNCING
            self._ask(now)

    def _forget(self, reason: str) -> None:
        self._out.append(DropAll(reason))
        self._next = None
        self._unverified = False
        self._times.clear()
        self._waiting.clear()
        self._last_live = None
        self._question = None
        self._failures = 0
        self._fault = None
        self._fault_before = 0
        self._repair_at = None
        self._probe_wanted = self._doubted = False

    def _gap(self, now: float) -> None:
        self.counters.gaps += 1
        if self._can_replay:
            self.state = State.CATCHING_UP
            self._failures = 0
            if self._question is None:
                self._ask(now)
        else:
            self._give_up("a gap, and no replay address")

    def _probe(self, now: float) -> None:
        if self._question is None and now - self._probed_at >= self._limits.probe_again_s:
            self._probed_at, self._probe_wanted = now, False
            self._ask(now, back=self._limits.probe_back, doubt_at=now + self._limits.doubt_after_s)

    def _ask(self, now: float, *, repair: bool = False, back: int = 0, doubt_at: float = math.inf) -> None:
        last = 0 if repair or self._next is None else max(self._next - 1, 0)
        self._question = _Question(
            last=last,
            deadline=now + self._limits.answer_timeout_s,
            known=self._next is not None and self._next > 0,
            repair=repair,
            doubt_at=doubt_at,
        )
        self.counters.questions += 1
        self._out.append(AskReplay(max(last - back, 0)))

    def _settle(self, now: float, *, asked: bool = False, silent: bool = False) -> None:
        """After an answer, or without one: complete, worth another question, or given up."""
        if silent and not asked:
            asked = True  # it stopped in the middle: not a failure yet, but there must be another question
        complete = self._next is not None and not self._waiting and not silent
        if self._next is None and 0 in self._waiting:
            self._next = 0
            self._drain()
            complete = not self._waiting and not silent
        if complete:
            self._failures = 0
            self._doubted = self._doubted and self._probe_wanted
            self.state = State.LIVE
            return
        self._failures += asked
        never_synced = self._next is None
        if self._failures < self._limits.questions and self._connected:
            if silent and self.state is State.LIVE:
                self.state = State.CATCHING_UP  # a probe without an answer: nobody knows
            self._ask(now)
        else:
            self._give_up("no answer to replay questions" if silent else "missing in the engine's answers")
            if (silent or never_synced) and self._fault is not None and self._limits.probe_idle_s:
                self._repair_delay = self._limits.probe_idle_s
                self._repair_at = now + self._repair_delay

    def _give_up(self, reason: str) -> None:
        """What is missing cannot be had: go on from the first batch that waits."""
        self._failures = 0
        self._unverified = self._doubted = False
        self.state = State.LIVE
        ahead = iter(sorted(self._waiting))
        while True:
            first = next((seq for seq in ahead if seq in self._waiting), None)
            if self._next is None:
                self._next = first
                if first != 0:
                    self._fault = (Reason.NO_REPLAY, reason)
            else:
                self._lose(reason, 0 if first is None else first - self._next)
                if first is not None:
                    self._next = first
            self._drain()
            if not self._waiting:
                return
            self.counters.gaps += 1  # another one behind it

    def _begin_at(self, seq: int) -> None:
        """Nothing from before `seq` will be applied any more."""
        before = [number for number in self._waiting if number < seq]
        for number in before:
            del self._waiting[number]
        self.counters.waiting_dropped += len(before)
        self._next = seq

    def _lose(self, reason: str, batches: int) -> None:
        self.counters.lost_batches += batches
        self._fault = (Reason.LOST_BATCHES, f"{batches} batches: {reason}" if batches else reason)
        self._fault_before = (self._next or 0) + batches
        self._out.append(Lost(reason, batches))

    def _apply(self, seq: int, ts: float | None, item: Any) -> None:
        self._waiting.pop(seq, None)
        self._times[seq] = ts
        if len(self._times) > self._limits.remembered:
            self._times.popitem(last=False)
        self._next = seq + 1
        self.counters.applied += 1
        self._out.append(Apply(seq, item))

    def _drain(self) -> None:
        while self._next in self._waiting:
            seq = self._next
            ts, item = self._waiting[seq]
            self._apply(seq, ts, item)
        if self.state is State.CATCHING_UP and not self._waiting and self._question is None:
            self.state = State.LIVE

    def _wait(self, seq: int, ts: float | None, item: Any) -> None:
        if seq in self._waiting:
            self.counters.duplicates += 1
            return
        if len(self._waiting) >= self._limits.waiting:
            self.counters.waiting_dropped += 1
            newest = max(self._waiting)
            if seq > newest:
                return
            del self._waiting[newest]
        self._waiting[seq] = (ts, item)

    def _done(self, now: float) -> list[Effect]:
        state, reason, detail = self._judge()
        if (state, reason, detail) != (self.trust.state, self.trust.reason, self.trust.detail):
            self.trust = Trust(state, reason, now, detail)
            self._out.append(SetTrust(self.trust))
        effects, self._out = self._out, []
        return effects

    def _judge(self) -> tuple[TrustState, Reason, str]:
        if not self._connected:
            if self._next is None:
                return "blind", Reason.NO_EVENTS, "connecting"
            return "degraded", Reason.DISCONNECTED, ""
        if self.state is State.SYNCING:
            return "blind", Reason.SYNCING, ""
        if self.state is State.CATCHING_UP:
            return "degraded", Reason.CATCHING_UP, ""
        if self._fault is not None:
            return "degraded", *self._fault
        if self._doubted:
            return (
                "degraded",
                Reason.CATCHING_UP,
                "a response does not fit what was announced: the engine is being asked",
            )
        return "exact", Reason.NONE, ""
