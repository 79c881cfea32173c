"""Why an endpoint was chosen, in one word: what a dashboard counts and a list of decisions shows."""

import enum


class DecisionReason(enum.StrEnum):
    """The fixed set of label values."""

    ONLY_CHOICE = "only_choice"
    """The filters left one endpoint."""
    NO_KNOWLEDGE = "no_knowledge"
    """The prompt was not matched at all; `routed_blind` counts why."""
    NOTHING_CACHED = "nothing_cached"
    """No endpoint of the role holds the prompt's first block."""
    MOST_CACHED = "most_cached"
    """It holds as much of the prompt as any other of its role."""
    PART_CACHED = "part_cached"
    """It holds some of the prompt, another one more: load weighed more than the difference."""
    LOAD_OVER_CACHE = "load_over_cache"
    """It holds nothing although another one does."""


def reason_of(candidates: int, best: float | None, chosen: float) -> DecisionReason:
    """`candidates`: how many the filters left. `best`, `chosen`: tokens held by the best endpoint of the role and by the
    chosen one; `best` None where nothing was matched."""
    if candidates == 1:
        return DecisionReason.ONLY_CHOICE
    if best is None:
        return DecisionReason.NO_KNOWLEDGE
    if best <= 0:
        return DecisionReason.NOTHING_CACHED
    if chosen >= best:
        return DecisionReason.MOST_CACHED
    return DecisionReason.PART_CACHED if chosen > 0 else DecisionReason.LOAD_OVER_CACHE
