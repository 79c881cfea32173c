"""The two moments of a request that others may want to hear of: it was decided, and its response ended."""

import msgspec

from gateway.extproc.usage import Usage


class Customer(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request it is."""

    model: str = ""
    fairness_id: str = ""
    priority: int = 0


class DecidedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request got its answer from the scheduler."""

    customer: Customer
    rejected: int | None
    """The status it was answered with; None where it goes to an endpoint."""
    seconds: float
    """From its last byte to the decision."""
    body_bytes: int
    stages: str | None = None
    """decode-only, prefill-decode, encode-decode or encode-prefill-decode where stages were decided about."""


class EndedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A routed request is over. Times are monotonic seconds."""

    customer: Customer
    end: str
    """finished, error or aborted."""
    status: int
    streaming: bool
    sent_at: float
    first_token_at: float | None
    ended_at: float
    body_bytes: int
    usage: Usage | None
