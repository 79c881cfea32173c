"""One step of an engine: the work in flight, and what became true at its end."""

import msgspec

from simulator.kv_events import KvEvent
from simulator.sequence import FinishReason, Sequence


class Step(msgspec.Struct, frozen=True):
    """Work in flight: (sequence, tokens scheduled for it). Nothing of it is visible before `ends`."""

    started: float
    ends: float
    work: tuple[tuple[Sequence, int], ...]

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.work)


class Output(msgspec.Struct, frozen=True):
    """One sampled token of one request (None: it ended without one), and its finish reason with the last."""

    sequence: Sequence
    token: int | None
    finish: FinishReason | None


class Outcome(msgspec.Struct, frozen=True):
    """What became true at the end of a step."""

    outputs: tuple[Output, ...]
    events: tuple[KvEvent, ...]


class Counters(msgspec.Struct):
    """Totals since the start, in tokens where not said otherwise."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    computed_prompt: int = 0
    generated: int = 0
    preemptions: int = 0  # requests
    steps: int = 0  # steps
