"""The scheduling cycle with a span per plugin. Where tracing is off the plain `Scheduler` runs, which knows nothing of spans."""

from collections.abc import Mapping

import numpy as np

from fleet.fleet import Mask, Slots
from fleet.plugin import Decider, Filter, Picker, Plugin, Scorer, Verdict
from fleet.request import Request, Vector
from gateway.cycle import Scheduler
from gateway.tracing import NoTracing, Span, Tracing


class TracedScheduler(Scheduler):
    """Spans `filter`, `score`, `pick` and `decide` beneath `schedule`; set `tracing` before the first request."""

    tracing: Tracing = NoTracing()

    def _keep(self, filter_: Filter, request: Request, candidates: Slots) -> Mask:
        with self.tracing.step("filter") as span:
            mask = super()._keep(filter_, request, candidates)
            _name(span, filter_)
            span.set("warmroute.candidates", len(candidates))
            span.set("warmroute.kept", int(np.count_nonzero(mask)))
            return mask

    def _score(self, scorer: Scorer, request: Request, candidates: Slots) -> Vector:
        with self.tracing.step("score") as span:
            scores = super()._score(scorer, request, candidates)
            _name(span, scorer)
            span.set("warmroute.candidates", len(candidates))
            if len(scores):
                span.set("warmroute.score.min", float(scores.min()))
                span.set("warmroute.score.max", float(scores.max()))
            return scores

    def _pick(self, picker: Picker, request: Request, candidates: Slots, totals: Vector) -> Slots:
        with self.tracing.step("pick") as span:
            picked = super()._pick(picker, request, candidates, totals)
            _name(span, picker)
            span.set("warmroute.picked", self._fleet.endpoint(int(picked[0])).address)
            return picked

    def _ask(self, gate: Decider, request: Request, picks: Mapping[str, Slots]) -> Verdict:
        with self.tracing.step("decide") as span:
            verdict = super()._ask(gate, request, picks)
            _name(span, gate)
            span.set("warmroute.disaggregate", verdict.disaggregate)
            span.set("warmroute.reason", verdict.reason)
            return verdict


def _name(span: Span, plugin: Plugin) -> None:
    span.set("warmroute.plugin.name", plugin.name)
    span.set("warmroute.plugin.type", plugin.type)
