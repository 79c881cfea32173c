"""What the ext-proc core asks for and what it takes back: the seam between the protocol and the scheduler.

Nothing here knows protobuf, gRPC or Envoy. The scheduler implements `Decider`; tests inject small ones.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it arrived, without its body.

    `headers` has lower-case names; values of a repeated header are joined with ", "; pseudo headers are fields of
    their own; headers that only a router may write (the destination, the hand-off headers) are left out, because the
    client could have sent them. Control headers (objective, fairness id, traceparent, ...) are there to be read.
    """

    method: str
    path: str  # with the query string
    headers: Mapping[str, str]
    request_id: str  # the client's, Envoy's, or generated here; always forwarded as x-request-id
    authority: str = ""
    subset: tuple[str, ...] | None = None  # endpoints the gateway allows, "ip:port"; None = no restriction; never empty
    body_complete: bool = True  # False where Envoy's mode shows only a part of the body, or none, before it must leave


class ResponseObserver(Protocol):
    """Follows the response of one decided request. Exactly one of `finished` and `aborted` is called, and it is last.

    All methods are called on the event loop and must not block. An exception is counted and logged; the response
    goes on.
    """

    def response_headers(self, status: int, headers: Mapping[str, str], served: str | None) -> None:
        """The response has begun. `served` is the endpoint ("ip:port") that Envoy used, None where it does not say."""

    def response_chunk(self, data: bytes) -> None:
        """The next bytes of the body, cut anywhere. With `Decided.observe_response` False only where Envoy shows them anyway."""

    def finished(self) -> None:
        """The end of the response was seen, or (where the body is not observed) the response is over, however it ended."""

    def aborted(self, reason: str) -> None:
        """The stream ended before that. `reason` is one of the ABORTED_ words below."""


# Why a decided request did not finish. Envoy does not say which side gave up: a client that disconnects, an engine
# that dies and a request timeout all look like the end of the stream.
ABORTED_BEFORE_RESPONSE = "ended-before-response"
ABORTED_DURING_RESPONSE = "ended-during-response"
ABORTED_UNSENT = "ended-before-forwarding"  # the stream had ended when the decision was made
ABORTED_PROTOCOL = "protocol-error"
ABORTED_INTERNAL = "internal-error"


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes and how it must look when it gets there.

    An empty `destination` routes by the gateway's own fallback policy; the client's destination header is removed
    all the same. `set_headers` overwrites. `body=None` leaves the body's bytes untouched.
    """

    destination: Sequence[str]  # "ip:port", best first; the others are the gateway's fallbacks
    set_headers: Mapping[str, str] = {}
    remove_headers: Sequence[str] = ()
    body: bytes | None = None
    response_headers: Mapping[str, str] = {}  # added to the response, for the client to see; SERVED_BY with them
    scores: Mapping[str, float] | None = None  # endpoint -> score, published as dynamic metadata
    observe_response: bool = True  # False: the body need not come by here (Envoy is asked to skip it)
    observer: ResponseObserver | None = None


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """An answer given instead of routing: an OpenAI error body with this status."""

    status: int
    message: str
    reason: str | None = None  # x-llm-d-request-dropped-reason; None for client errors that are nobody's overload
    type: str | None = None  # follows from the status unless given
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = {}  # e.g. retry-after


SERVED_BY = "x-warmroute-served-by"
"""Response header: the endpoint that answered, where it is not the first one of the decision."""

# The words of x-llm-d-request-dropped-reason.
SATURATED = "rejected-saturated"
NO_ENDPOINTS = "rejected-no-endpoints"
TTL_EXPIRED = "rejected-ttl-expired"
CONTEXT_CANCELLED = "rejected-context-cancelled"
SHUTTING_DOWN = "rejected-shutting-down"


class Decider(Protocol):
    async def decide(self, head: Head, body: bytes) -> Decided | Rejected:
        """Choose an endpoint for one request.

        Cancelled when the client goes away or the deadline passes: what was reserved before must be released by the
        decider itself then. Once a `Decided` with an observer is returned, the observer is always told the end.
        Failing open is the decider's own business; an exception is answered with a 500.
        """
