"""Session affinity, as a scorer (a preference) and as a filter (a rule): requests of one session go where the last one went.

Two ways to remember: the client carries a token that names its endpoint (`encoded_endpoint_header`: nothing is kept here,
any router replica understands it), or this router keeps a table of session ids (`session_id`).
"""

import base64
import binascii
from collections import OrderedDict
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from fleet import plugin
from fleet.fleet import Fleet, Mask, Slots, Vector
from fleet.plugin import Filter, HeaderReader, Lookup, Plugin, Producer, Scorer
from fleet.request import Request


class EncodedEndpointHeader(plugin.Parameters, frozen=True, kw_only=True):
    header: Annotated[str, Meta(min_length=1, description="Header of request and response with the token.")] = (
        "x-session-token"
    )


SESSION_ID = "SessionID"
"""The attribute that session-id-producers find."""


class SessionSource(plugin.Parameters, frozen=True, kw_only=True):
    header: Annotated[str | None, Meta(description="Header with the session's id.")] = None
    attribute: Annotated[
        str | None,
        Meta(description="SessionID: what a session-id-producer found; agent-identity: what that plugin found."),
    ] = None
    producer: Annotated[
        str | None, Meta(description="The plugin that finds the attribute; without it the one of its name.")
    ] = None

    def __post_init__(self) -> None:
        if bool(self.header) == bool(self.attribute):
            raise ValueError("a source is either a header or an attribute")

    def value(self, request: Request) -> str | None:
        """What the request has of this source; None or "" where it has nothing."""
        if self.header:
            return request.headers.get(self.header.lower())
        return request.session_id if self.attribute == SESSION_ID else request.attributes.get(self.attribute or "")


class SessionIds(plugin.Parameters, frozen=True, kw_only=True):
    sources: Annotated[tuple[SessionSource, ...], Meta(description="The first that the request has is used.")] = (
        SessionSource(header="x-session-id"),
    )
    eviction_ttl_seconds: Annotated[
        float, Meta(description="A session is forgotten after so long without a request.")
    ] = 300
    eviction_sweep_seconds: Annotated[float, Meta(description="Accepted: sessions are swept with every request.")] = 10


class SessionParameters(plugin.Parameters, frozen=True, kw_only=True):
    strategy: Annotated[
        Literal["encoded_endpoint_header", "session_id"], Meta(description="Who remembers: the client or this router.")
    ] = "encoded_endpoint_header"
    encoded_endpoint_header_config: Annotated[EncodedEndpointHeader, Meta(description="Of that strategy.")] = (
        EncodedEndpointHeader()
    )
    session_id_config: Annotated[SessionIds, Meta(description="Of that strategy.")] = SessionIds()
    profile_name: Annotated[str, Meta(description="Whose pick is remembered; empty: the destination's.")] = ""


class _Affinity(Plugin):
    parameters: SessionParameters

    def __init__(self, name: str, parameters: plugin.Parameters) -> None:
        super().__init__(name, parameters)
        self._sessions: OrderedDict[str, tuple[str, int, float]] = OrderedDict()  # id -> address, rank, last request

    def bind(self, lookup: "Lookup[Any]") -> None:
        for source in self.parameters.session_id_config.sources:
            if source.attribute == SESSION_ID:
                if source.producer:
                    lookup(source.producer, Producer)
            elif source.attribute:
                reader: HeaderReader = lookup(source.producer or source.attribute, HeaderReader)
                if reader.attribute != source.attribute:
                    raise LookupError(f"{reader.name!r} finds {reader.attribute!r}, not {source.attribute!r}")

    def bound(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        """Per candidate whether the session is bound to it; all False for a request without a session or a stranger."""
        if self.parameters.strategy == "session_id":
            found = self._sessions.get(self._session(request) or "")
            if found is None or self._is_over(found[2], fleet.clock()):
                return np.zeros(len(candidates), np.bool_)
            slot = fleet.slot_of(found[0], found[1])
            return candidates == slot if slot is not None else np.zeros(len(candidates), np.bool_)
        wanted = _decoded(request.headers.get(self.parameters.encoded_endpoint_header_config.header.lower()))
        if wanted is None:
            return np.zeros(len(candidates), np.bool_)
        endpoints = (fleet.endpoint(slot) for slot in candidates.tolist())
        names = (f"{endpoint.namespace}/{endpoint.name}" == wanted for endpoint in endpoints)
        return np.fromiter(names, np.bool_, len(candidates))

    def picked(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> None:
        if self.parameters.strategy != "session_id":
            return
        session, slot = self._session(request), self._remembered(picks)
        now = fleet.clock()
        while self._sessions and self._is_over(next(iter(self._sessions.values()))[2], now):
            self._sessions.popitem(last=False)
        if session and slot is not None:
            endpoint = fleet.endpoint(slot)
            self._sessions[session] = (endpoint.address, endpoint.rank, now)
            self._sessions.move_to_end(session)

    def take_over(self, old: Plugin) -> None:
        if isinstance(old, _Affinity) and old.parameters.session_id_config == self.parameters.session_id_config:
            self._sessions = old._sessions

    def response_headers(self, request: Request, picks: Mapping[str, Slots], fleet: Fleet) -> dict[str, str]:
        slot = self._remembered(picks)
        if self.parameters.strategy == "session_id" or slot is None:
            return {}
        endpoint = fleet.endpoint(slot)
        token = base64.b64encode(f"{endpoint.namespace}/{endpoint.name}".encode()).decode()
        return {self.parameters.encoded_endpoint_header_config.header: token}

    def _remembered(self, picks: Mapping[str, Slots]) -> int | None:
        """The slot to bind to; None where its profile picked nobody."""
        name = self.parameters.profile_name
        slots = picks.get(name) if name else next(iter(picks.values()), None)
        return int(slots[0]) if slots is not None and len(slots) else None

    def _is_over(self, last: float, now: float) -> bool:
        return last + self.parameters.session_id_config.eviction_ttl_seconds < now

    def _session(self, request: Request) -> str | None:
        for source in self.parameters.session_id_config.sources:
            if found := source.value(request):
                return found
        return None


class SessionAffinityScorer(_Affinity, Scorer, type="session-affinity-scorer"):
    """Prefer the endpoint that served the session's last request.

    Use it where the KV cache is not visible (no events), or to keep a conversation on one endpoint at equal cost.
    Reads: the session token of the request, or its session id and this router's table.
    Score: 1 for the bound endpoint, 0 for all others and for a request without a session.
    Source: llm-d-router session-affinity-scorer.
    """

    parameters: SessionParameters
    Parameters = SessionParameters

    def score(self, request: Request, candidates: Slots, fleet: Fleet) -> Vector:
        return self.bound(request, candidates, fleet).astype(float)


class SessionAffinityFilter(_Affinity, Filter, type="session-affinity-filter"):
    """Keep only the endpoint that served the session's last request, where it is among the candidates.

    Stricter than the scorer: load does not overrule it. Never empties the list: a session whose endpoint is gone is bound
    anew by whatever is picked.
    Source: llm-d-router session-affinity-filter.
    """

    parameters: SessionParameters
    Parameters = SessionParameters

    def keep(self, request: Request, candidates: Slots, fleet: Fleet) -> Mask:
        mask = self.bound(request, candidates, fleet)
        return mask if mask.any() else np.ones(len(candidates), np.bool_)


def _decoded(token: str | None) -> str | None:
    if not token:
        return None
    try:
        return base64.b64decode(token, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None  # a client may send anything; it is then a request without a session
