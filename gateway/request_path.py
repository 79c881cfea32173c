"""The request path: from a request's head and body to where it goes.

    parse --> tokenize --> keys [--> burst window] --> match --> schedule --> reserve
    (client's errors end here)                       `-- one synchronous stretch: nobody decides in between --'

Rules
1. What the client did wrong is answered (400, 404); what went wrong here costs knowledge, never the request: it is routed
   by load, and `routed_blind{reason}` and the log say why.
2. Waiting happens in understanding only (and for the keys of a very long prompt, and in the window of a burst producer, where
   one is configured). From the match on nothing waits.
3. What is reserved is released by the observer that goes out with the decision, exactly once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from fleet.books import EXPECTED_OUTPUT, Books
from fleet.breaker import Breaker
from fleet.endpoint import DECODES
from fleet.fleet import Fleet, Slots
from fleet.plugin import HeaderReader
from fleet.request import Match, Request
from gateway import control_headers as control
from gateway.burst_room import Assigned, hold
from gateway.cycle import Decision, Rejection, Scheduler
from gateway.decision_log import DecisionLog, with_explanation
from gateway.departure import Departures, Placed
from gateway.extproc.decision import Decided, Head, Rejected
from gateway.logs import RateLimit
from gateway.matching import Found, Keys, Matcher
from gateway.metrics import OTHER, Metrics
from gateway.parity_watch import ParityWatch
from gateway.producers import Producers
from gateway.profile_handlers import ENCODERS
from gateway.request_events import Customer, DecidedRequest
from gateway.request_identity import Identity, identify
from gateway.response_path import Accuracy
from gateway.routing_record import RoutingRecord
from gateway.sending import Sending
from gateway.served_models import Served, ServedModels
from gateway.tokenizers import Decode
from gateway.tracing import NO_SPAN, Span, Tracing, describe_destination, describe_request
from gateway.understanding import Ask, Understanding
from gateway.waiting_room import Look, WaitingRoom, prompt_run
from tokenization.tokenized import Tokenized

log = logging.getLogger(__name__)

LARGE_PROMPT = 32 * 1024
"""Tokens from which keys are computed in a worker thread."""
NOT_HELD: Mapping[str, Assigned] = {}
OUTPUT_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    response_headers: bool = False
    objectives: Mapping[str, int] = {}
    """Objective -> priority."""


class RequestPath:
    """Decides requests. The event loop's thread owns it; replace `scheduler`, `producers` and `settings` to reconfigure."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        books: Books,
        breaker: Breaker,
        models: ServedModels,
        matcher: Matcher,
        scheduler: Scheduler,
        producers: Producers,
        understanding: Understanding,
        accuracy: Accuracy,
        trust: Callable[[int], object],
        metrics: Metrics,
        tracing: Tracing,
        settings: Settings,
        departures: Departures | None = None,
        rewrites_history: Callable[[Served], bool | None] = lambda _: None,
        room: WaitingRoom | None = None,
        decisions: DecisionLog | None = None,
        parity: ParityWatch | None = None,
        decoder: Callable[[Served], Decode | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler = scheduler
        self.producers = producers
        self.settings = settings
        self._understanding = understanding
        self._fleet, self._books, self._models, self._matcher = fleet, books, models, matcher
        self._metrics, self._tracing, self._clock = metrics, tracing, clock
        self.sending = Sending(
            fleet=fleet,
            books=books,
            breaker=breaker,
            matcher=matcher,
            accuracy=accuracy,
            trust=trust,
            metrics=metrics,
            tracing=tracing,
            parity=parity,
            decoder=decoder,
            clock=clock,
        )
        self._departures = departures or Departures(metrics)
        self._rewrites_history = rewrites_history
        self.room = room or WaitingRoom(fleet, metrics, clock)
        self.decisions = decisions
        """None: nothing is kept to be explained."""
        self.record = RoutingRecord(fleet, metrics)
        self._quiet = RateLimit()
        self._twins = 0

    async def decide(self, head: Head, body: bytes) -> Decided | Rejected:
        """See `gateway.extproc.decision.Decider`."""
        started = self._clock()
        with self._tracing.request(head.headers) as span:
            describe_request(span, head.method, head.path)
            renamed = control.with_model(body, model) if (model := control.rewritten_model(head.headers)) else None
            body = body if renamed is None else renamed
            ask = await self._understanding.understand(head, body)
            answer = ask if isinstance(ask, Rejected) else await self._place(head, ask, span)
            decided_at = self._clock()
            if isinstance(answer, Placed) and isinstance(ask, Ask):
                answer = answer if renamed is None else msgspec.structs.replace(answer, body=renamed)
                with self._tracing.step("handoff") if answer.decision.prefill is not None else NO_SPAN:
                    answer = await self._departures.leave(head, body, ask.parsed, ask.prompt, answer)
            if isinstance(answer, Rejected):
                span.set("http.response.status_code", answer.status)
        try:
            self._count(head, ask, answer, decided_at - started, len(body))
        except Exception:  # raised from here, nobody would release what the answer has reserved
            log.exception("count_failed request_id=%s", head.request_id)
        return answer

    def _count(
        self, head: Head, ask: Ask | Rejected, answer: Decided | Rejected, seconds: float, body_bytes: int
    ) -> None:
        model = ask.served.name if isinstance(ask, Ask) and ask.served else ""
        outcome = "routed" if isinstance(answer, Decided) else str(answer.status)
        label = self._metrics.model(model) if not model or self._models.is_known(model) else OTHER
        self._metrics.requests.labels(label, outcome).inc()
        self._metrics.step.labels("total").observe(seconds)
        if self._metrics.when_decided:
            self._tell_decided(head, model, answer, seconds, body_bytes)

    def _tell_decided(
        self, head: Head, model: str, answer: Decided | Rejected, seconds: float, body_bytes: int
    ) -> None:
        decided = DecidedRequest(
            customer=Customer(model=model, fairness_id=self._who(head).fairness_id, priority=self._priority(head)),
            rejected=answer.status if isinstance(answer, Rejected) else None,
            seconds=seconds,
            body_bytes=body_bytes,
            stages=_stages(answer.decision) if isinstance(answer, Placed) else None,
        )
        for tell in self._metrics.when_decided:
            tell(decided)

    # Placing: match, schedule, reserve. Only computing the keys of a very long prompt waits, and it reads nothing shared.

    async def _place(self, head: Head, ask: Ask, span: Span) -> Decided | Rejected:
        if ask.served is not None:
            span.set("gen_ai.request.model", ask.served.name)
        if ask.prompt is not None:
            span.set("gen_ai.usage.input_tokens", ask.prompt.prompt_tokens)
        keys = None
        if ask.prompt is not None and ask.served is not None and len(ask.prompt.token_ids):
            keys = await self._keys(ask.prompt, ask.served)
            if keys is None:
                ask = msgspec.structs.replace(ask, blind="keys_failed")
        exact = ask.prompt is not None and ask.prompt.exact
        if keys and not exact:
            ask = msgspec.structs.replace(ask, blind="estimated_tokens")
        if ask.blind:
            self._metrics.blind.labels(ask.blind).inc()
        assigned = await self._burst(head, ask, keys) if keys is not None and self.producers.bursts else NOT_HELD
        return await self.room.admit(
            look=lambda: self._look(head, ask, keys, assigned),
            answer=lambda look: self._explained(head, look, lambda: self._answer(head, ask, look, keys, span)),
            refuse=lambda rejected: self._refused(head, rejected, lambda: self._look(head, ask, keys, assigned)),
        )

    async def _burst(self, head: Head, ask: Ask, keys: Keys) -> Mapping[str, Assigned]:
        """Where the windows of burst producers want the request, when they have ended."""
        seen = self._look(head, ask, keys, NOT_HELD)
        if seen.refused is not None or isinstance(seen.outcome, Rejection):
            return NOT_HELD
        with self._tracing.step("burst"):
            return await hold(self.producers.bursts, keys, prompt_run(seen.outcome))

    def _look(self, head: Head, ask: Ask, keys: Keys | None, assigned: Mapping[str, Assigned]) -> Look:
        """Where the request would go now. Nothing is written but metrics, so that it can be looked at again."""
        candidates = self._candidates(head, ask.served)
        exact = ask.prompt is not None and ask.prompt.exact
        found = self._match(keys) if keys and exact and self.producers.precise else None
        request = self._request(head, ask, keys, found, assigned)
        started = self._clock()
        with self._tracing.step("schedule"):
            outcome = self.scheduler.schedule(request, candidates, tell=False)
        self._metrics.step.labels("schedule").observe(self._clock() - started)
        refused = None
        if isinstance(outcome, Rejection):
            refused = Rejected(status=outcome.status, message=outcome.message, reason=outcome.reason)
        elif control.wants_prefix(head.headers) and not self._holds_prefix(request, outcome, found, keys):
            message = "no endpoint holds a prefix of this prompt (Prefer: if-available)"
            refused = Rejected(status=412, message=message, code="prefix_not_available")
        return Look(request=request, outcome=outcome, refused=refused, found=found, assigned=assigned)

    def _answer(self, head: Head, ask: Ask, look: Look, keys: Keys | None, span: Span) -> Decided | Rejected:
        """Carry out what was just looked at."""
        outcome = look.outcome
        if look.refused is not None or isinstance(outcome, Rejection):
            return look.refused or Rejected(status=500, message="no decision")
        for stage in outcome.stages():
            self._metrics.decider.labels(*stage).inc()
        for plugin, hint in outcome.hints.items():
            self._metrics.hints.labels(plugin, hint.outcome).inc()
        self.scheduler.tell(look.request, outcome)
        predicted = look.found.predicted(outcome.slots[0], keys) if look.found and keys else None
        self.record.add(look.request, outcome, look.found, keys)
        for it in look.assigned.values():
            if it.slot is not None:
                followed = it.slot == prompt_run(outcome).picked[0]
                self._metrics.burst_assigned.labels("yes" if followed else "no").inc()
        describe_destination(span, outcome.destinations[0])
        if span.recording and predicted is not None:
            span.set("warmroute.predicted_cached_tokens", predicted)
        try:
            usual = self.room.queue.limits.expected_output if self.room.queue else EXPECTED_OUTPUT
            return self.sending.send(
                ask, look.request, outcome, keys, predicted, self.producers, self.settings.response_headers, usual
            )
        except Exception:
            self._books.finish(look.request.id, self._clock())  # it goes nowhere, and nobody will say that it ended
            raise

    def _explained(self, head: Head, look: Look, answer: Callable[[], Decided | Rejected]) -> Decided | Rejected:
        """Keep what the answer is made from, before the books are charged with it."""
        if self.decisions is None:
            return answer()
        outcome = look.outcome if look.refused is None else look.turned_away(look.refused)
        try:
            kept = self.decisions.keep(look.request, outcome, look.found, look.assigned)
        except Exception:  # an explanation is never worth a request
            log.exception("explain_failed request_id=%s", head.request_id)
            return answer()
        given = answer()  # what is reserved now is released by whoever gets this
        try:
            return with_explanation(head.headers, kept, given)
        except Exception:
            log.exception("explain_failed request_id=%s", head.request_id)
            return given

    def _refused(self, head: Head, rejected: Rejected, look: Callable[[], Look]) -> Decided | Rejected:
        """Keep where a request would have gone that the queue turns away, and what stood before it there."""
        if self.decisions is None:
            return rejected
        try:
            seen = look()
        except Exception:
            log.exception("explain_failed request_id=%s", head.request_id)
            return rejected
        return self._explained(head, msgspec.structs.replace(seen, refused=rejected), lambda: rejected)

    @staticmethod
    def _holds_prefix(request: Request, decision: Decision, found: Found | None, keys: Keys | None) -> bool:
        """Whether the destination holds anything of the prompt, by events or (without them) by what was sent there."""
        if found is not None and keys is not None:
            return found.predicted(decision.slots[0], keys) > 0
        match = request.match()
        return match is not None and bool(match.tokens_at(np.array(decision.slots[:1]))[0] > 0)

    async def _keys(self, prompt: Tokenized, served: Served) -> Keys | None:
        started = self._clock()
        try:
            with self._tracing.step("keys"):
                also = self.producers.block_sizes()
                if len(prompt.token_ids) > LARGE_PROMPT:
                    return await asyncio.to_thread(self._matcher.keys, prompt, served, also)
                return self._matcher.keys(prompt, served, also)
        except Exception as error:  # noqa: BLE001 - fail open
            self._warn("keys_failed", f"error={error!r}", error)
            return None
        finally:
            self._metrics.step.labels("keys").observe(self._clock() - started)

    def _match(self, keys: Keys) -> Found:
        started = self._clock()
        with self._tracing.step("match"):
            found = self._matcher.match(keys)
        self._metrics.step.labels("match").observe(self._clock() - started)
        return found

    def _candidates(self, head: Head, served: Served | None) -> Slots:
        """Endpoints that serve the model and that the gateway allows.

        The unhealthy ones are among them only if no other can answer: a prefill endpoint that is left cannot.
        """
        fleet = self._fleet
        live = fleet.slots()
        if served is not None:
            live = live[self._models.serving(served)[live]]
        if head.subset is not None:
            allowed = set(head.subset)
            live = live[np.array([fleet.endpoint(int(slot)).address in allowed for slot in live], np.bool_)]
        able = fleet.healthy[live] & ~fleet.tripped[live] & ~fleet.draining[live]
        answering = fleet.role_mask(DECODES)[live]
        if not answering.any():  # whatever their labels mean, there is nobody else
            answering[:] = True
        if (able & answering).any() or not len(live):
            return live[able]
        self._metrics.blind.labels("no_healthy_endpoint").inc()
        self._warn("no_healthy_endpoint", f"endpoints={len(live)} action=route_to_unhealthy")
        return live[able | answering]

    def _request(
        self, head: Head, ask: Ask, keys: Keys | None, found: Found | None, assigned: Mapping[str, Assigned]
    ) -> Request:
        prompt, who = ask.prompt, self._who(head)
        return Request(
            id=self._booking(head.request_id),
            model=ask.served.name if ask.served else "",
            target_model=ask.served.name if ask.served else "",
            path=ask.path,
            headers=head.headers,
            prompt_tokens=prompt.prompt_tokens if prompt else 0,
            multimodal=bool(prompt and prompt.media),
            rewrites_history=self._rewrites_history(ask.served) if ask.served else None,
            output_limit=_output_limit(ask),
            priority=self._priority(head),
            fairness_id=who.fairness_id,
            attributes=who.attributes,
            matches=self._matches(keys, found, assigned),
            default_match=self.producers.default,
        )

    def _who(self, head: Head) -> Identity:
        return identify(head.headers, self.producers.readers, self._reader_failed)

    def _reader_failed(self, reader: HeaderReader, error: Exception) -> None:
        self._metrics.plugin_errors.labels(reader.name).inc()
        if self._quiet.allows(f"reader {reader.name}", self._clock()):
            log.error("plugin-failed plugin=%s type=%s doing=read", reader.name, reader.type, exc_info=error)

    def _booking(self, request_id: str) -> str:
        """The request's name in the books: its id, unless a client uses one id for two requests at a time."""
        name = request_id
        while name in self._books:
            self._twins += 1
            name = f"{request_id}~{self._twins}"
        return name

    def _priority(self, head: Head) -> int:
        name = control.objective(head.headers)
        if name and name not in self.settings.objectives and self._quiet.allows("objective", self._clock()):
            log.warning("objective_unknown name=%r priority=0 known=%s", name, ",".join(self.settings.objectives))
        return self.settings.objectives.get(name, 0)

    def _matches(self, keys: Keys | None, found: Found | None, assigned: Mapping[str, Assigned]) -> dict[str, Match]:
        if keys is None:
            return {}
        matches = dict.fromkeys(self.producers.precise, found.match) if found else {}
        for name, cache in self.producers.approximate.items():
            matches[name] = cache.match(keys.by_block.get(cache.block_tokens, ()))  # a reload may want other keys
        for name, room in self.producers.bursts.items():
            matches[name] = room.match(keys.by_block.get(room.block_tokens, ()), assigned.get(name))
        return matches

    def _warn(self, reason: str, detail: str, error: Exception | None = None) -> None:
        if self._quiet.allows(reason, self._clock()):
            log.warning("routed_blind reason=%s %s", reason, detail, exc_info=error)


def _output_limit(ask: Ask) -> int:
    limits = [ask.parsed.get(name) for name in OUTPUT_LIMITS] if ask.parsed else []
    return min((limit for limit in limits if type(limit) is int and limit > 0), default=0)


def _stages(decision: Decision) -> str | None:
    """The stages a request goes through, in llm-d's words; None where nobody decides about stages."""
    if not decision.verdicts:
        return None
    encode = "encode-" if ENCODERS in decision.headers else ""
    return encode + ("prefill-decode" if decision.prefill is not None else "decode" if encode else "decode-only")
