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
# Three parts, which know nothing of each other; what follows from what they say is decided here:
#   incarnation   the batches of one process: which is next, which wait, and whether one of another process has come
#   questions     what the replay socket is asked, when, from where, and how often in vain
#   doubts        what speaks against the picture although everything is in order, and until when
#
# Rules
# 1. Sequence numbers are known here and in the parts only. This file takes batches as they come and returns effects. Someone
#    else owns the sockets, the clock and the index. `item` is whatever the caller wants back in `Apply`.
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
from typing import Any

import msgspec

from event_ingest.doubts import Claim, Doubts
from event_ingest.effects import Apply, AskReplay, DropAll, Effect, Lost, SetTrust
from event_ingest.incarnation import Incarnation
from event_ingest.limits import Limits
from event_ingest.questions import Question, Questions
from indexer.trust import Reason, Trust

END_MARKER = b"\xff" * 8
"""Stands where the sequence number would, in the message that ends an answer of the replay socket."""


class State(enum.Enum):
    SYNCING = "syncing"
    LIVE = "live"
    CATCHING_UP = "catching_up"


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


class Stream:
    """See the head of this file. All methods take the caller's monotonic `now` in seconds and return effects in order."""

    def __init__(self, *, can_replay: bool, limits: Limits | None = None) -> None:
        self.state = State.SYNCING
        self.counters = Counters()
        self.trust = Trust("blind", Reason.NO_EVENTS, 0.0, "connecting")
        self._limits = limits or Limits()
        self._can_replay = can_replay
        self._incarnation = Incarnation(self._limits, can_replay=can_replay)
        self._questions = Questions(self._limits, can_replay=can_replay)
        self._doubts = Doubts()
        self._connected = False
        self._broken = False  # the link was up, and is not known to be up again
        self._out: list[Effect] = []

    @property
    def next_seq(self) -> int | None:
        """The sequence number that would be applied next; None before anything is known."""
        return self._incarnation.next

    @property
    def waiting(self) -> int:
        """Batches that wait for earlier ones."""
        return len(self._incarnation.waiting)

    # ------------------------------------------------------------------------------------------------------- the link

    def connected(self, now: float) -> list[Effect]:
        """The subscription is up (again). Only now may a question be asked, or batches between would be missed."""
        self._link_is_up(now)
        known = self._incarnation.next is not None
        if self._can_replay:
            self.state = State.CATCHING_UP if known else State.SYNCING
            self._questions.failures = 0
            self._doubts.doubted = False
            self._incarnation.verified = not known
            # What waits may be another incarnation's; the answer has it if it is not.
            self.counters.waiting_dropped += len(self._incarnation.waiting)
            self._incarnation.waiting.clear()
            self._ask(now)
        elif known:  # what passed while we were away cannot be known
            self._lose("reconnected, and no replay address to ask what was missed", 0)
        else:
            self.state = State.LIVE
            self._doubts.cannot_ask("no replay address to ask for the batches before")
        return self._done(now)

    def disconnected(self, now: float) -> list[Effect]:
        """The subscription is down: the picture ages from here on."""
        self._connected = False
        self._broken = True
        self._questions.open = None
        return self._done(now)

    def resumed(self, now: float) -> list[Effect]:
        """The link is up again, and its wire has repeated what passed meanwhile: nothing was missed."""
        self._link_is_up(now)
        return self._done(now)

    def _link_is_up(self, now: float) -> None:
        self._connected = True
        self._broken = False
        self._questions.heard_at = now

    # ----------------------------------------------------------------------------------------------- the subscription

    def live(self, seq: int, ts: float | None, item: Any, now: float) -> list[Effect]:
        """A batch from the subscription. `ts` is its engine time, None where the payload could not be read."""
        if self._broken and self._can_replay:
            # Still from the old link, or already from another incarnation of the engine, whose numbers may join: nobody
            # can say. The question that follows `connected` is answered with it if it counts.
            self.counters.waiting_dropped += 1
            return self._done(now)
        self._connected = not self._broken
        self._questions.heard_at = now
        if self._incarnation.is_another(seq, ts):
            self._restart(now, begins=seq == 0)
        incarnation = self._incarnation
        incarnation.heard(seq, ts)

        if incarnation.next is None and not (self._can_replay and self.state is State.SYNCING):
            # Nothing to ask, or nobody answers: begin with what there is.
            incarnation.next = seq
            if seq == 0:
                self._doubts.forgive()
            else:
                self._doubts.cannot_ask(f"joined at batch {seq}")
        if incarnation.next is not None and seq < incarnation.next:
            self.counters.duplicates += 1
        elif seq == incarnation.next and incarnation.verified:
            self._apply(seq, ts, item)
        else:
            self._wait(seq, ts, item)
            if self.state is State.LIVE and incarnation.waiting:
                self._gap(now)
        if self.state is not State.LIVE and self._questions.open is None:
            self._settle(now)
        return self._done(now)

    def _gap(self, now: float) -> None:
        self.counters.gaps += 1
        if not self._can_replay:
            self._give_up("a gap, and no replay address")
            return
        self.state = State.CATCHING_UP
        self._questions.failures = 0
        if self._questions.open is None:
            self._ask(now)

    # ---------------------------------------------------------------------------------------------- the replay socket

    def replayed(self, seq: int, ts: float | None, item: Any, now: float) -> list[Effect]:
        """A batch from the replay socket."""
        question = self._questions.open
        if question is None:
            self.counters.duplicates += 1
            return self._done(now)
        self.counters.replayed += 1
        self._questions.answered(question, seq, now)
        if self._incarnation.differs(seq, ts):
            self._restart(now)
            return self._done(now)
        if question.answers == 1:
            self._answer_begins(question, seq, ts)
        incarnation = self._incarnation
        assert incarnation.next is not None
        if seq < incarnation.next:
            self.counters.duplicates += seq > question.last  # what was asked for although it is known is none
            self._drain()
        elif seq == incarnation.next:
            question.progress = True
            self._apply(seq, ts, item)
        else:
            self._wait(seq, ts, item)
        return self._done(now)

    def _answer_begins(self, question: Question, seq: int, ts: float | None) -> None:
        """Where the first batch of an answer stands decides what the rest of it can be joined to."""
        if question.repair and seq == 0:
            self._forget("rebuilding")
            self.state = State.SYNCING
            self._questions.open = question
        incarnation = self._incarnation
        if incarnation.next is None:
            # The beginning of what the engine still has. Nothing is held yet, so an older beginning can only cost matches:
            # live batches from before it, whose successors are gone, are of no use.
            self.counters.waiting_dropped += incarnation.begin_at(seq)
            if seq > 0:
                self._doubts.begins_late(Reason.LOST_BATCHES, f"the engine's buffer begins at batch {seq}")
        elif seq > question.last and incarnation.next > 0 and not incarnation.was_applied(seq, ts):
            # The buffer no longer reaches back to the last batch applied. Even where the numbers join, nobody can say
            # that they belong to the same incarnation.
            self._lose("older than the engine's buffer", max(seq - incarnation.next, 0))
            self.counters.waiting_dropped += incarnation.begin_at(max(seq, incarnation.next))
        incarnation.verified = True  # it was the last batch applied, or what follows a loss

    def replay_ended(self, now: float) -> list[Effect]:
        """The end marker. It says that the engine sent everything, not that everything arrived."""
        question = self._questions.close()
        if question is None:
            return self._done(now)
        if question.has_less_than_we():
            self._restart(now)
            return self._done(now)
        if self._incarnation.next is None and not self._incarnation.waiting:
            self._incarnation.next = 0  # an engine that has not published anything
        if self._questions.worth_confirming(question):
            self._ask(now)
        else:
            self._settle(now, failed=not question.progress)
        return self._done(now)

    # ------------------------------------------------------------------------------------------------ time and others

    def tick(self, now: float) -> list[Effect]:
        """Let time pass: questions that nobody answers, streams that have gone quiet. Call about once a second."""
        question = self._questions.open
        if question is None:
            if self._connected:
                self._put(self._questions.due(self._incarnation.next, now))
        elif now >= question.deadline:
            self._unanswered(question, now)
        elif now >= question.doubt_at and not question.answers:
            self._doubts.doubted = True
        return self._done(now)

    def _unanswered(self, question: Question, now: float) -> None:
        self._questions.close()
        nothing_worse = not self._incarnation.waiting and self._incarnation.next is not None
        if question.repair and not question.answers and nothing_worse:
            self._questions.repair_still_later(now)
        else:
            self._settle(now, silent=True)

    def probe(self, now: float, *, stale: bool) -> list[Effect]:
        """A response does not fit what was announced: ask at once for batches that did not arrive (rule 7).

        `stale`: the engine had less than we held for it; otherwise it computed something that it has not announced.
        """
        if self.state is State.LIVE and self._connected and self._can_replay:
            self._questions.wanted = True
            self._doubts.doubted |= stale
            self._put(self._questions.probe(self._incarnation.next, now))
        return self._done(now)

    def cleared(self, seq: int, now: float) -> list[Effect]:
        """Batch `seq` emptied the engine's cache: what was lost before it matters no more."""
        self._doubts.cleared(seq)
        return self._done(now)

    def doubt(self, reason: Reason, detail: str, seq: int, now: float) -> list[Effect]:
        """Something in batch `seq` could not be used: the trust says so until the cache is cleared after it."""
        self._doubts.unused(reason, detail, seq)
        return self._done(now)

    def heal(self, now: float) -> list[Effect]:
        """The engine's own reports have agreed with the picture for long enough: forgive the fault."""
        self._doubts.forgive()
        return self._done(now)

    # ------------------------------------------------------------------------------------------ another incarnation

    def _restart(self, now: float, *, begins: bool = False) -> None:
        """Another incarnation. Where its first batch is at hand (`begins`) there is nothing to ask."""
        self.counters.restarts += 1
        self._forget("engine_restarted")
        self.state = State.LIVE
        if begins:
            self._incarnation.next = 0
        elif self._can_replay:
            self.state = State.SYNCING
            self._ask(now)

    def _forget(self, reason: str) -> None:
        self._out.append(DropAll(reason))
        self._incarnation = Incarnation(self._limits, can_replay=self._can_replay)
        self._questions.forget()
        self._doubts = Doubts()

    # ------------------------------------------------------------------------------- complete, asked again or given up

    def _settle(self, now: float, *, failed: bool = False, silent: bool = False) -> None:
        """After an answer, one without progress (`failed`), one without an end (`silent`), or none: what now?"""
        incarnation, questions = self._incarnation, self._questions
        if incarnation.next is None and 0 in incarnation.waiting:
            incarnation.next = 0
            self._drain()
        if incarnation.next is not None and not incarnation.waiting and not silent:
            questions.failures = 0
            self._doubts.doubted = self._doubts.doubted and questions.wanted
            self.state = State.LIVE
            return
        questions.failures += failed or silent
        never_synced = incarnation.next is None
        if questions.worth_another() and self._connected:
            if silent and self.state is State.LIVE:
                self.state = State.CATCHING_UP  # a probe without an answer: nobody knows
            self._ask(now)
        else:
            self._give_up("no answer to replay questions" if silent else "missing in the engine's answers")
            if (silent or never_synced) and self._doubts.has_fault:
                questions.repair_later(now)

    def _give_up(self, reason: str) -> None:
        """What is missing cannot be had: go on from the first batch that waits."""
        incarnation = self._incarnation
        incarnation.verified = True
        self._questions.failures = 0
        self._doubts.doubted = False
        self.state = State.LIVE
        ahead = iter(sorted(incarnation.waiting))
        while True:
            first = next((seq for seq in ahead if seq in incarnation.waiting), None)
            if incarnation.next is None:
                incarnation.next = first
                if first != 0:
                    self._doubts.begins_late(Reason.NO_REPLAY, reason)
            else:
                self._lose(reason, 0 if first is None else first - incarnation.next)
                if first is not None:
                    incarnation.next = first
            self._drain()
            if not incarnation.waiting:
                return
            self.counters.gaps += 1  # another one behind it

    def _lose(self, reason: str, batches: int) -> None:
        self.counters.lost_batches += batches
        detail = f"{batches} batches: {reason}" if batches else reason
        self._doubts.lost(detail, (self._incarnation.next or 0) + batches)
        self._out.append(Lost(reason, batches))

    # ------------------------------------------------------------------------------------------------------- going out

    def _apply(self, seq: int, ts: float | None, item: Any) -> None:
        """The next batch has come, and takes along what has waited for it."""
        incarnation = self._incarnation
        incarnation.apply(seq, ts)
        self._out.append(Apply(seq, item))
        self.counters.applied += 1
        if incarnation.waiting or self.state is State.CATCHING_UP:
            self._drain()

    def _drain(self) -> None:
        incarnation = self._incarnation
        while (ready := incarnation.take_ready()) is not None:
            self._out.append(Apply(*ready))
            self.counters.applied += 1
        if self.state is State.CATCHING_UP and not incarnation.waiting and self._questions.open is None:
            self.state = State.LIVE  # the question went with a link that `resumed`, and nothing is missing

    def _wait(self, seq: int, ts: float | None, item: Any) -> None:
        match self._incarnation.wait(seq, ts, item):
            case "duplicate":
                self.counters.duplicates += 1
            case "dropped":
                self.counters.waiting_dropped += 1

    def _ask(self, now: float) -> None:
        self._put(self._questions.ask(self._incarnation.next, now))

    def _put(self, question: AskReplay | None) -> None:
        if question is not None:
            self.counters.questions += 1
            self._out.append(question)

    def _done(self, now: float) -> list[Effect]:
        state, reason, detail = self._claim()
        trust = self.trust
        if reason is not trust.reason or detail != trust.detail or state != trust.state:
            self.trust = Trust(state, reason, now, detail)
            self._out.append(SetTrust(self.trust))
        effects, self._out = self._out, []
        return effects

    def _claim(self) -> Claim:
        if not self._connected:
            if self._incarnation.next is None:
                return "blind", Reason.NO_EVENTS, "connecting"
            return "degraded", Reason.DISCONNECTED, ""
        if self.state is State.SYNCING:
            return "blind", Reason.SYNCING, ""
        if self.state is State.CATCHING_UP:
            return "degraded", Reason.CATCHING_UP, ""
        return self._doubts.claim()
