"""The truth path: what a routed request's response says, into the books, the breaker, accuracy and metrics.

response headers -> breaker, books (another endpoint of the fallback list may have served it)
first content    -> books (prefill is over), time to first token
end              -> books (released), accuracy: predicted against reported cached tokens
abort            -> books (released), nothing else is learned; a breaker's probe makes room for the next one
unread           -> of a reply that the budget did not admit only headers and end are seen: books (released), nothing learned
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.fleet import Fleet
from gateway.extproc.usage import ResponseReader, Usage
from gateway.metrics import Metrics
from gateway.reply_budget import ReplyBudget
from gateway.request_events import Customer, EndedResponse

log = logging.getLogger(__name__)


class Accuracy(Protocol):
    """Who wants to know how good a prediction was."""

    def confirmed(
        self, slot: int, keys: Sequence[int], prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """An engine reported `cached` tokens of a prompt with these block keys, where `predicted` were expected."""
        ...


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """A decided request, as far as its response is concerned."""

    request_id: str
    slot: int
    destination: str
    """`ip:port` that Envoy was given for it; a profile handler may name another port than the endpoint's own."""
    sent_at: float
    """Monotonic seconds."""
    prompt_tokens: int
    """0 where the prompt was not tokenized."""
    predicted: int | None
    """Cached tokens the engine should report; None where nothing was predicted."""
    keys: Sequence[int] = ()
    """The prompt's block keys at the slot's block size."""
    customer: Customer = Customer()
    handed_over: bool = False
    """Another endpoint computes the prompt, so that all of it counts as cached here."""
    read: bool = True
    """False: Envoy was asked to show the headers and the end alone."""


class RouteObserver:
    """Follows one response. All methods run on the event loop."""

    def __init__(
        self,
        sent: Sent,
        fleet: Fleet,
        books: Books,
        breaker: Breaker,
        metrics: Metrics,
        accuracy: Accuracy,
        clock: Callable[[], float],
        done: Callable[[bool], None] = lambda _: None,
        budget: ReplyBudget | None = None,
    ) -> None:
        """`done` is told once whether the request was answered. `budget`: where this reply counts while it is read."""
        self._sent = sent
        self._slot = sent.slot
        self._address = fleet.endpoint(sent.slot).address  # kept, because a slot may be given up while its answer runs
        self._fleet, self._books, self._breaker, self._metrics = fleet, books, breaker, metrics
        self._accuracy = accuracy
        self._clock = clock
        self._done, self._budget = done, budget
        self._reader: ResponseReader | None = None
        self._status = 0
        self._first = False
        self._first_at: float | None = None
        self._bytes = 0
        for tell in metrics.when_sent:
            tell(sent.customer)
        if budget is not None:
            budget.begin(clock())

    def response_headers(self, status: int, headers: Mapping[str, str], served: str | None) -> None:
        now = self._clock()
        self._status = status
        if served and served not in (self._sent.destination, self._address):
            self._moved(served, now)
        if self._still_there():
            self._breaker.report(self._slot, status, now)
        if status < 400:
            self._reader = ResponseReader(headers.get("content-type", ""), headers.get("content-encoding", ""))

    def response_chunk(self, data: bytes) -> None:
        now = self._clock()
        self._bytes += len(data)
        if self._budget is not None:
            self._budget.piece()
        if self._reader is None:
            return
        self._reader.feed(data, now)
        if self._first:
            self._books.alive(self._sent.request_id, now)
        elif self._reader.usage.first_token_at is not None or not self._reader.streaming:
            self._first_token(now)

    def finished(self) -> None:
        now = self._clock()
        unread = not self._sent.read and not self._bytes
        usage = self._reader.end(now) if self._reader and not unread else None
        if usage and not self._first:
            self._first_token(now)
        self._release("error" if self._status >= 500 else "unread" if unread else "finished", now, usage)
        if usage:
            self._learn(usage)
        self._over(now, answered=self._reader is not None)

    def aborted(self, reason: str) -> None:
        now = self._clock()
        if not self._status and self._still_there():
            self._breaker.abandoned(self._slot, self._sent.sent_at)
        self._release("aborted", now)
        log.debug("response_aborted request_id=%s reason=%s", self._sent.request_id, reason)
        self._over(now, answered=False)

    def _over(self, now: float, *, answered: bool) -> None:
        if self._budget is not None:
            self._budget.end(now)
        self._done(answered)

    def _moved(self, served: str, now: float) -> None:
        slot = self._fleet.slot_of(served)
        if slot is None:
            log.warning("served_by_stranger request_id=%s served=%s", self._sent.request_id, served)
            return
        if self._still_there():
            self._breaker.report(self._slot, None, now)  # the gateway went on to a fallback: the first did not answer
        self._books.moved(self._sent.request_id, self._slot, slot, now)
        self._slot, self._address = slot, served

    def _first_token(self, now: float) -> None:
        self._first, self._first_at = True, now
        self._books.first_token(self._sent.request_id, now)
        self._metrics.ttft.labels(self._name()).observe(now - self._sent.sent_at)

    def _release(self, end: str, now: float, usage: Usage | None = None) -> None:
        if self._sent.request_id in self._books:
            self._books.finish(self._sent.request_id, now)
        self._metrics.responses.labels(self._name(), end).inc()
        if self._metrics.when_ended:
            ended = EndedResponse(
                customer=self._sent.customer,
                end=end,
                status=self._status,
                streaming=self._reader is not None and self._reader.streaming,
                sent_at=self._sent.sent_at,
                first_token_at=self._first_at,
                ended_at=now,
                body_bytes=self._bytes,
                usage=usage,
            )
            for tell in self._metrics.when_ended:
                tell(ended)

    def _learn(self, usage: Usage) -> None:
        if self._status >= 400:
            return
        name, predicted, actual = self._name(), self._sent.predicted, usage.cached_tokens
        if actual is None:
            if usage.prompt_tokens or usage.content_events:  # and not a list of models, an embedding, a health check
                self._metrics.cached_unknown.labels(name).inc()
            return
        prompt = usage.prompt_tokens or self._sent.prompt_tokens
        if prompt and not self._sent.handed_over:
            self._metrics.match_fraction.labels(name, "reused").observe(actual / prompt)
        if predicted is None or self._slot != self._sent.slot or not self._still_there():
            return
        direction = "over" if predicted > actual else "under"
        self._metrics.cached_error.labels(name, direction).observe(abs(predicted - actual))
        sent = self._sent
        self._accuracy.confirmed(self._slot, sent.keys, sent.prompt_tokens, predicted, actual, sent.sent_at)

    def _name(self) -> str:
        return self._address

    def _still_there(self) -> bool:
        """False where the endpoint has left the fleet, and its slot may mean another one."""
        return self._slot in self._fleet and self._fleet.endpoint(self._slot).address == self._address
