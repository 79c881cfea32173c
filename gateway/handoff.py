"""Hand-offs without a sidecar: the gateway sends the prefill leg, then the request leaves for its decode endpoint.

    NIXL     prefill leg --answer--> its transfer parameters go into the decode leg's body
    SGLang   prefill leg --sent--> the decode leg leaves at once, both know a room where they meet

Rules
1. A prefill leg that fails, is late or answers nothing usable costs time, never the request: the decode endpoint gets the
   client's own body and computes the prompt itself. `handoffs{outcome="local"}` says why.
2. SGLang's decode engines cannot compute a prompt, so there another prefill endpoint is tried first, in the order of the
   prefill profile's scores.
3. The books follow: the prefill leg ends with its answer; when it comes to nothing its work moves to the decode endpoint.
4. A client that goes away while a leg runs ends the leg: the connection is closed.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence

import msgspec

from deciders.handoff import NotAnObject, bootstrap_body, decode_body, prefill_body, transfer_params
from fleet.books import Books
from fleet.breaker import Breaker
from fleet.fleet import Fleet
from fleet.request import Request
from gateway.config_document import Handoff
from gateway.cycle import Decision
from gateway.extproc.decision import Decided, Head, ResponseObserver
from gateway.extproc.headers import STRIPPED
from gateway.logs import RateLimit
from gateway.metrics import Metrics
from gateway.prefill_leg import LegFailed, PrefillLegs
from gateway.prefill_usage import reused_share
from gateway.profile_handlers import PREFILLER
from scorers.p2p_source_producer import CACHE_SOURCE

log = logging.getLogger(__name__)

GENERATES = ("/chat/completions", "/completions", "/responses", "/v1/messages", "/inference/v1/generate")
BOOTSTRAP_PORT_LABEL = "bootstrap-port"
HANDOFF_HEADER = "x-warmroute-handoff"
FURTHER_PREFILLS = 2
"""SGLang: how many other prefill endpoints are tried."""
_NOT_FOR_ENGINES = frozenset(
    (
        *STRIPPED,
        *(
            "host",
            "content-length",
            "transfer-encoding",
            "connection",
            "keep-alive",
            "te",
            "trailer",
            "upgrade",
            "expect",
        ),
        *("accept-encoding", "proxy-authorization", "proxy-connection"),
    )
)


class Handoffs:
    """Carries out what a decider asked for. The event loop's thread owns it."""

    def __init__(
        self,
        settings: Handoff,
        legs: PrefillLegs,
        fleet: Fleet,
        books: Books,
        breaker: Breaker,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        tell_clients: bool = False,
    ) -> None:
        """`tell_clients`: say in a response header what became of the prefill leg."""
        self.settings = settings
        self._legs = legs
        self._fleet, self._books, self._breaker, self._metrics = fleet, books, breaker, metrics
        self._clock = clock
        self._tell_clients = tell_clients
        self._quiet = RateLimit()
        self._running: set[asyncio.Task[None]] = set()

    async def carry_out(
        self, head: Head, body: bytes | None, request: Request, decision: Decision, decided: Decided
    ) -> Decided:
        """The decode leg. `body` None: it was not seen, or there is more than one prompt in it."""
        assert decision.prefill is not None
        source = decided.set_headers.get(CACHE_SOURCE)  # for whoever computes the prompt
        told = _without(_without(decided.set_headers, PREFILLER), CACHE_SOURCE)
        decided = msgspec.structs.replace(decided, set_headers=told)
        route = head.path.partition("?")[0].rstrip("/")
        if body is None or not route.endswith(GENERATES):
            return self._local(
                request, decision, decided, body, "no_single_prompt" if body is None else "no_generation"
            )
        headers = {
            **{name: value for name, value in head.headers.items() if name not in _NOT_FOR_ENGINES},
            **{name: value for name, value in decided.set_headers.items() if name not in STRIPPED},
            "content-type": "application/json",
            "x-request-id": head.request_id,
            **({CACHE_SOURCE: source} if source else {}),
        }
        send = self._meet if self.settings.connector == "sglang" else self._fetch
        try:
            return await send(head, headers, body, request, decision, decided)
        except Exception:
            log.exception("handoff_failed request_id=%s", request.id)
            return self._local(request, decision, decided, body, "internal")

    # NIXL: one after the other.

    async def _fetch(
        self,
        head: Head,
        headers: Mapping[str, str],
        body: bytes,
        request: Request,
        decision: Decision,
        decided: Decided,
    ) -> Decided:
        slot = decision.prefill
        assert slot is not None
        started, name = self._clock(), self._name(slot)
        try:
            leg = prefill_body(head.path, body)
            self._breaker.dispatched(slot, started)
            answer = await self._legs.send(self._url(slot, head), self._for(slot, headers), leg, self.settings.timeout)
            self._ended(slot, name, started, 200)
            if (share := reused_share(answer)) is not None and self._name(slot) == name:
                self._metrics.match_fraction.labels(name, "reused").observe(share)
            params = transfer_params(answer)
            if params is None:
                return self._local(request, decision, decided, body, "no_transfer_params")
            changed = decode_body(body, params)
        except NotAnObject:
            return self._local(request, decision, decided, body, "body")
        except LegFailed as failure:
            self._ended(slot, name, started, failure.status, failure)
            return self._local(request, decision, decided, body, failure.reason)
        except asyncio.CancelledError:
            self._given_up(slot, name, started)
            raise
        self._books.prefilled(request.id, self._clock())
        return self._transferred(name, decided, changed)

    # SGLang: both at once.

    async def _meet(
        self,
        head: Head,
        headers: Mapping[str, str],
        body: bytes,
        request: Request,
        decision: Decision,
        decided: Decided,
    ) -> Decided:
        reason, here = "", decision.prefill
        for slot in self._prefills(decision):
            if slot != here and here is not None:
                self._books.moved(request.id, here, slot, self._clock())
                here = slot
            try:
                both = bootstrap_body(body, self._host(slot), secrets.randbelow(2**63), self._port(slot))
            except NotAnObject:
                return self._local(request, decision, decided, body, "body")
            sent, started, name = asyncio.Event(), self._clock(), self._name(slot)
            self._breaker.dispatched(slot, started)
            leg = asyncio.create_task(
                self._legs.send(self._url(slot, head), self._for(slot, headers), both, None, sent)
            )
            try:
                await self._until_sent(leg, sent)
            except LegFailed as failure:
                self._ended(slot, name, started, failure.status, failure)
                reason = failure.reason
                continue
            except asyncio.CancelledError:
                self._given_up(slot, name, started)
                raise
            watch = asyncio.create_task(self._watch(leg, slot, name, request.id, started))
            self._running.add(watch)
            watch.add_done_callback(self._running.discard)
            observer = _Watched(decided.observer, leg, self.settings.timeout) if decided.observer else None
            return msgspec.structs.replace(self._transferred(name, decided, both), observer=observer)
        return self._local(request, decision, decided, body, reason)

    async def _until_sent(self, leg: "asyncio.Task[bytes]", sent: asyncio.Event) -> None:
        """Raises LegFailed where the leg failed, or could not be sent in time. Never leaves it running then."""
        sending = asyncio.create_task(sent.wait())
        try:
            await asyncio.wait((leg, sending), timeout=self.settings.timeout, return_when=asyncio.FIRST_COMPLETED)
            if leg.done():
                leg.result()
            elif not sent.is_set():
                leg.cancel()
                raise LegFailed("timeout", "the request could not be sent in time")
        except asyncio.CancelledError:
            leg.cancel()
            raise
        finally:
            sending.cancel()

    async def _watch(self, leg: "asyncio.Task[bytes]", slot: int, name: str, request_id: str, started: float) -> None:
        """Follow a leg whose decode leg is under way; the leg is cancelled when that one is aborted."""
        try:
            await leg
        except LegFailed as failure:
            self._ended(slot, name, started, failure.status, failure)
            self._metrics.handoffs.labels("broken", failure.reason).inc()
        except Exception:
            log.exception("handoff_failed request_id=%s", request_id)
            self._metrics.handoffs.labels("broken", "internal").inc()
        except asyncio.CancelledError:
            self._given_up(slot, name, started)
            raise
        else:
            self._ended(slot, name, started, 200)
        self._books.prefilled(request_id, self._clock())

    def _prefills(self, decision: Decision) -> Sequence[int]:
        """The picked prefill endpoint, then others of its profile by score."""
        assert decision.prefill is not None
        for run in decision.runs.values():
            if len(run.picked) and int(run.picked[0]) == decision.prefill and run.profile != decision.primary:
                by_score = run.candidates[(-run.totals).argsort(kind="stable")].tolist()
                others = [slot for slot in by_score if slot not in (decision.prefill, decision.slots[0])]
                return (decision.prefill, *others[:FURTHER_PREFILLS])
        return (decision.prefill,)

    # What both share.

    def _ended(
        self, slot: int, name: str, started: float, status: int | None, failure: LegFailed | None = None
    ) -> None:
        now = self._clock()
        if self._name(slot) == name:  # and not somebody else by now
            self._breaker.report(slot, status, now)
        self._metrics.prefill_leg.labels(failure.reason if failure else "ok").observe(now - started)
        if failure is not None and self._quiet.allows(failure.reason, now):
            log.warning(
                "prefill_leg_failed endpoint=%s reason=%s seconds=%.3f error=%r",
                name,
                failure.reason,
                now - started,
                str(failure),
            )

    def _given_up(self, slot: int, name: str, started: float) -> None:
        """The client went away, so the leg ended without a result."""
        if self._name(slot) == name:
            self._breaker.abandoned(slot, started)

    def _transferred(self, name: str, decided: Decided, body: bytes) -> Decided:
        self._metrics.handoffs.labels("transferred", "ok").inc()
        return self._told(msgspec.structs.replace(decided, body=body), f"transferred from {name}")

    def _local(
        self, request: Request, decision: Decision, decided: Decided, body: bytes | None, reason: str
    ) -> Decided:
        """The decode endpoint computes the prompt itself, with no transfer parameters, not even the client's."""
        self._metrics.handoffs.labels("local", reason).inc()
        self._books.taken_back(request.id, decision.slots[0], self._clock())
        try:
            own = None if body is None else decode_body(body, None)
        except NotAnObject:
            own = body
        # What the decision already made of the body (another model's name, say) stays.
        changed = decided if own is None or own is body else msgspec.structs.replace(decided, body=own)
        return self._told(changed, f"local: {reason}")

    def _told(self, decided: Decided, what: str) -> Decided:
        if not self._tell_clients:
            return decided
        return msgspec.structs.replace(decided, response_headers={**decided.response_headers, HANDOFF_HEADER: what})

    def _for(self, slot: int, headers: Mapping[str, str]) -> dict[str, str]:
        """The leg's headers; a data-parallel rank is named the way the decode leg names its own."""
        endpoint = self._fleet.endpoint(slot)
        named = _without(headers, "x-data-parallel-rank")
        if named.get(CACHE_SOURCE) == endpoint.address:  # another one than was picked
            del named[CACHE_SOURCE]
        if endpoint.rank or self._fleet.slot_of(endpoint.address, 1) is not None:
            named["x-data-parallel-rank"] = str(endpoint.rank)
        return named

    def _url(self, slot: int, head: Head) -> str:
        return self._fleet.endpoint(slot).url + head.path

    def _host(self, slot: int) -> str:
        return self._fleet.endpoint(slot).address.rpartition(":")[0]

    def _port(self, slot: int) -> int:
        label = self._fleet.endpoint(slot).labels.get(BOOTSTRAP_PORT_LABEL, "")
        return int(label) if label.isdecimal() else self.settings.bootstrap_port

    def _name(self, slot: int) -> str:
        # The endpoint may leave the fleet while its leg runs.
        return self._fleet.endpoint(slot).address if slot in self._fleet else f"slot {slot}"


class _Watched:
    """An observer that ends the prefill leg where the decode leg is aborted, and some time after that has ended."""

    def __init__(self, inner: ResponseObserver, leg: "asyncio.Task[bytes]", patience_s: float) -> None:
        self._inner, self._leg, self._patience_s = inner, leg, patience_s
        self.response_headers = inner.response_headers
        self.response_chunk = inner.response_chunk

    def finished(self) -> None:
        self._inner.finished()
        if not self._leg.done():  # nobody needs it any more; an engine that hangs must not keep the connection for ever
            asyncio.get_running_loop().call_later(self._patience_s, self._leg.cancel)

    def aborted(self, reason: str) -> None:
        self._leg.cancel()
        self._inner.aborted(reason)


def _without(headers: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key != name}
