"""What an engine's replay socket is asked, when, and whether its answers still get us anywhere.

One question is open at a time; a newer one replaces it. There are four reasons to ask:

    missing   batches are missing, or may be: at once, and again until the answers are complete or have failed too often
    probe     a response does not fit what was announced (`wanted`): at once, but not more often than once a second
    repair    what was given up because nobody answered: after a while, then ever more rarely, from batch 0 on
    idle      the stream has been quiet for long: a lost last batch or a restarted idle engine shows no other way

Every question reaches back to the last batch that was applied, so that its answer can be recognised; a probe further, since
the last batches may be another process's whose numbers happened to join (see `incarnation`).

This file knows when and from where. What an answer means, the stream decides.
"""

import math

import msgspec

from event_ingest.effects import AskReplay
from event_ingest.limits import Limits

_LONGEST_REPAIR_DELAY_S = 600.0


class Question(msgspec.Struct):
    """One question and what has come of it."""

    last: int
    """The batch that an answer must reach back to."""
    known: bool
    """Whether that batch was applied, so that an answer must contain it."""
    deadline: float
    repair: bool = False
    doubt_at: float = math.inf
    """When no answer begins to mean something."""
    progress: bool = False
    """Whether an answer was the batch that was needed next."""
    answers: int = 0
    newest: int = -1

    def answered(self, seq: int, deadline: float) -> None:
        """A batch came; the next one has until `deadline`."""
        self.answers += 1
        self.newest = max(self.newest, seq)
        self.deadline = deadline

    def has_less_than_we(self) -> bool:
        """Whether the engine, having said all, does not have the last batch that we applied: it is another process."""
        return self.known and self.newest < self.last


class Questions:
    """The open question of one stream, and when the next one is due. Times are the caller's monotonic seconds."""

    __slots__ = (
        "_can_replay",
        "_limits",
        "_probed_at",
        "_repair_at",
        "_repair_delay",
        "failures",
        "heard_at",
        "open",
        "wanted",
    )

    def __init__(self, limits: Limits, *, can_replay: bool) -> None:
        self.open: Question | None = None
        self.failures = 0
        """Questions without progress since the last progress."""
        self.heard_at = 0.0
        """When the subscription last said something."""
        self.wanted = False
        """Whether a response gave reason for a probe that has not been asked yet."""
        self._limits = limits
        self._can_replay = can_replay
        self._probed_at = -math.inf
        self._repair_at: float | None = None
        self._repair_delay = 0.0

    def forget(self) -> None:
        """Another process: what was asked of the one before, and why, is void."""
        self.open = None
        self.failures = 0
        self.wanted = False
        self._repair_at = None

    # --------------------------------------------------------------------------------------------------------- asking

    def ask(
        self, next_seq: int | None, now: float, *, repair: bool = False, back: int = 0, doubt_at: float = math.inf
    ) -> AskReplay:
        """Open a question; `next_seq` is the batch that would be applied next, `back` how much further it reaches."""
        last = 0 if repair or next_seq is None else max(next_seq - 1, 0)
        self.open = Question(
            last=last,
            known=next_seq is not None and next_seq > 0,
            deadline=now + self._limits.answer_timeout_s,
            repair=repair,
            doubt_at=doubt_at,
        )
        return AskReplay(max(last - back, 0))

    def probe(self, next_seq: int | None, now: float) -> AskReplay | None:
        """Ask because a response gave reason to, unless that was done a moment ago: then it is due later."""
        if self.open is not None or now - self._probed_at < self._limits.probe_again_s:
            return None
        self._probed_at, self.wanted = now, False
        return self.ask(next_seq, now, back=self._limits.probe_back, doubt_at=now + self._limits.doubt_after_s)

    def due(self, next_seq: int | None, now: float) -> AskReplay | None:
        """The question that time has made due, where none is open."""
        if self.wanted:
            return self.probe(next_seq, now)
        if self._repair_at is not None and now >= self._repair_at:
            self._repair_at = None
            return self.ask(next_seq, now, repair=True)
        idle = self._limits.probe_idle_s
        if self._can_replay and idle and now - self.heard_at >= idle:
            self.heard_at = now
            return self.ask(next_seq, now, back=self._limits.probe_back)
        return None

    # ------------------------------------------------------------------------------------------------------ answering

    def answered(self, question: Question, seq: int, now: float) -> None:
        question.answered(seq, now + self._limits.answer_timeout_s)

    def close(self) -> Question | None:
        """The open question, if any, is over: answered, or never to be."""
        question, self.open = self.open, None
        if question is not None and question.progress:
            self.failures = 0
        return question

    def worth_another(self) -> bool:
        """Whether what is missing may be asked for once more."""
        return self.failures < self._limits.questions

    def worth_confirming(self, question: Question) -> bool:
        """Whether an answer was so long that its tail may have been dropped on the way."""
        return question.progress and question.answers > self._limits.confirm_above

    # ------------------------------------------------------------------------------------------------------ repairing

    def repair_later(self, now: float) -> None:
        """Something was given up because nobody answered: ask for it again when the stream would be probed anyway."""
        if self._limits.probe_idle_s:
            self._repair_delay = self._limits.probe_idle_s
            self._repair_at = now + self._repair_delay

    def repair_still_later(self, now: float) -> None:
        """Nobody answered that either; nothing is worse than before."""
        self._repair_delay = min(2 * self._repair_delay, _LONGEST_REPAIR_DELAY_S)
        self._repair_at = now + self._repair_delay
