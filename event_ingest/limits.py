"""The bounds of a stream: how long it waits for an answer, how often it asks, and how much it remembers."""

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, on the caller's clock."""

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
