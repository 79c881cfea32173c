"""What a decision does to the books, and what it looks like to Envoy.

From here on the request is on its way: everything that is reserved here is released by the observer that goes out with
the answer, exactly once.
"""

from collections.abc import Callable, Sequence

import numpy as np

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.fleet import Fleet, Vector
from fleet.request import Request
from fleet.work import cached_tokens
from gateway.cycle import Decision
from gateway.departure import Placed
from gateway.matching import Keys, Matcher
from gateway.metrics import Metrics
from gateway.parity_watch import ParityWatch
from gateway.producers import Producers
from gateway.reply_budget import ReplyBudget
from gateway.request_events import Customer
from gateway.response_path import Accuracy, RouteObserver, Sent
from gateway.served_models import Served
from gateway.tokenizers import Decode
from gateway.tracing import Tracing
from gateway.understanding import Ask
from scorers.p2p_source_producer import CACHE_SOURCE

RANK_HEADER = "x-data-parallel-rank"
# Response headers, where the configuration asks for them.
REQUEST_ID = "x-request-id"
ENDPOINT, PREDICTED, TRUST = "x-warmroute-endpoint", "x-warmroute-predicted-cached-tokens", "x-warmroute-trust"


class Sending:
    """Charges the books and everything else that must know of a request on its way."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        books: Books,
        breaker: Breaker,
        matcher: Matcher,
        accuracy: Accuracy,
        trust: Callable[[int], object],
        metrics: Metrics,
        tracing: Tracing,
        parity: ParityWatch | None = None,
        decoder: Callable[[Served], Decode | None] = lambda _: None,
        clock: Callable[[], float],
    ) -> None:
        self._decoder = decoder
        self.budget = ReplyBudget(None, clock())
        self._fleet, self._books, self._breaker, self._matcher = fleet, books, breaker, matcher
        self._accuracy, self._trust, self._metrics, self._tracing = accuracy, trust, metrics, tracing
        self._parity, self._clock = parity, clock

    def send(
        self,
        ask: Ask,
        request: Request,
        decision: Decision,
        keys: Keys | None,
        predicted: int | None,
        producers: Producers,
        response_headers: bool,
        usual_output: float,
    ) -> Placed:
        """The answer for Envoy. `predicted`: cached tokens the engine should report; None where nothing was matched.
        `usual_output`: tokens of a reply of which nothing is known."""
        now = self._clock()
        slot = decision.slots[0]
        elsewhere = [] if decision.prefill is None else [decision.prefill]
        encoding = [
            int(picked[0])
            for name, picked in decision.picks.items()
            if name != decision.primary and len(picked) and picked[0] not in (slot, *elsewhere)
        ]
        chain = keys.for_slot(slot) if keys and slot in keys.block_of else ()
        # Only a stream that is read shows when its prefill is over; of others progress is told by events.
        streamed = ask.parsed is not None and ask.parsed.get("stream") is True
        read = not streamed or self.budget.has_room(now)
        unseen = ask.parsed is not None and not (streamed and read)
        if streamed:
            self._metrics.streamed_replies.labels("yes" if read else "no").inc()
        # What is being computed there for others counts as cached: this prompt will not be computed again.
        held = cached_tokens(request, np.array([slot, *elsewhere]), self._fleet, producers.booked or None)
        self._reserve(request, slot, elsewhere, held, chain, unseen, usual_output, now)
        for stage in encoding:  # a request in flight until the first token, and nothing of the prompt
            self._books.reserve(request.id, stage, 0, 0, now, prefill_only=True, model=request.target_model)
        self._breaker.dispatched(slot, now)
        legs = (slot, *elsewhere)
        if keys is not None:
            for cache in producers.approximate.values():
                for leg in legs:
                    cache.sent(leg, keys.by_block.get(cache.block_tokens, ()))  # a reload may want other keys
        if chain:
            self._matcher.touch(chain)
        pulls = CACHE_SOURCE in decision.headers  # what the engine reports as cached is then not what it held itself
        expected = [self._matcher.expect(leg, keys, now) for leg in legs] if keys and predicted is not None else []
        if predicted == 0 and not elsewhere and not pulls and chain:
            self._sample(ask, request, slot, chain, now)

        def done(answered: bool) -> None:
            self._matcher.answered(expected, answered)
            if self._parity is not None:
                if answered:
                    self._parity.finished(request.id, self._clock())
                else:
                    self._parity.dropped(request.id)

        told = self._told(request.id, slot, predicted) if response_headers else {}
        sent = Sent(
            request_id=request.id,
            slot=slot,
            destination=decision.destinations[0],
            sent_at=now,
            prompt_tokens=request.prompt_tokens,
            predicted=None if elsewhere or pulls else predicted,
            keys=chain,
            customer=Customer(model=request.model, fairness_id=request.fairness_id, priority=request.priority),
            handed_over=bool(elsewhere),
            read=read,
        )
        return Placed(
            request=request,
            decision=decision,
            destination=decision.destinations,
            set_headers=self._headers(decision, slot),
            response_headers={**decision.response_headers, **told},
            observer=RouteObserver(
                sent,
                self._fleet,
                self._books,
                self._breaker,
                self._metrics,
                self._accuracy,
                self._clock,
                done,
                self.budget if streamed and read else None,
            ),
            observe_response=read,
        )

    def _reserve(
        self,
        request: Request,
        slot: int,
        elsewhere: list[int],
        held: Vector,
        chain: Sequence[int],
        unseen: bool,
        usual_output: float,
        now: float,
    ) -> None:
        prompt_tokens = float(request.prompt_tokens)
        self._books.reserve(
            request.id,
            slot,
            0.0 if elsewhere else max(0.0, prompt_tokens - float(held[0])),
            request.reply_tokens(usual_output),
            now,
            cached_tokens=prompt_tokens if elsewhere else float(held[0]),
            fetched_tokens=max(0.0, prompt_tokens - float(held[0])) if elsewhere else 0.0,
            keys=chain,
            model=request.target_model,
            unseen=unseen,
        )
        for leg, cached in zip(elsewhere, held[1:], strict=True):
            self._books.reserve(
                request.id,
                leg,
                max(0.0, prompt_tokens - float(cached)),
                1,
                now,
                cached_tokens=float(cached),
                keys=chain,
                prefill_only=True,
                model=request.target_model,
                unseen=unseen,
            )

    def _headers(self, decision: Decision, slot: int) -> dict[str, str]:
        endpoint = self._fleet.endpoint(slot)
        headers = {**decision.headers, **self._tracing.outgoing()}
        if endpoint.rank or self._fleet.slot_of(endpoint.address, 1) is not None:
            headers[RANK_HEADER] = str(endpoint.rank)
        return headers

    def _told(self, request_id: str, slot: int, predicted: int | None) -> dict[str, str]:
        told = {REQUEST_ID: request_id, ENDPOINT: self._fleet.endpoint(slot).address}
        if predicted is not None:  # where nothing was matched, there is nothing to trust either
            told |= {PREDICTED: str(predicted), TRUST: str(self._trust(slot))}
        return told

    def _sample(self, ask: Ask, request: Request, slot: int, chain: Sequence[int], now: float) -> None:
        """Nothing of this prompt is cached anywhere it goes: its blocks will be announced from the first token on."""
        if self._parity is None or ask.prompt is None or ask.served is None:
            return
        if decode := self._decoder(ask.served):
            address = self._fleet.endpoint(slot).address
            self._parity.sent(request.id, slot, address, ask.prompt.token_ids, chain, decode, now)
