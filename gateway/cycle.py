"""The scheduling cycle: the one place where a request is assigned to endpoints.

    candidates --handler: next profile--> [decider?] --> filters --> scorers --> picker --> picks --> handler again ...

Rules
1. Filters run in their order, each on what the one before left. Then every scorer adds clamp(score, 0, 1) * weight to the
   totals; weights are not normalised. Then one picker chooses. (llm-d's combination rule.)
2. A plugin that fails costs its own contribution: a scorer scores nothing, a filter keeps all, a decider says no, a picker
   is replaced by "highest total". Each failure is counted in `failures` and logged with its plugin.
3. No candidates is 503; filters that leave nothing for the primary profile are 429, and so is a request of negative
   priority while the fleet is saturated. A later stage that finds nothing is dropped: the primary endpoint does its work.
4. Nothing here waits or writes the fleet; of the request only `candidates`, `peer` and what the cheap producers know are
   written. Two decisions never interleave, so what the books reserve after one is seen by the next.
5. What explain shows is what the cycle computes anyway: arrays are kept by reference and turned into text only if asked.
"""

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from fleet.fleet import Fleet, Mask, Slots
from fleet.plugin import Decider, Filter, Hint, Picker, Plugin, Producer, ProfileHandler, Scorer, Verdict
from fleet.request import Request, Vector
from gateway.extproc.decision import NO_ENDPOINTS, SATURATED
from gateway.profile_handlers import StagedHandler, UnknownProfile, addresses
from gateway.saturation import SaturationDetector

log = logging.getLogger(__name__)

NOBODY: Slots = np.empty(0, np.intp)
_LEAST, _MOST = np.array(0.0), np.array(1.0)
"""The range of a score, as arrays: on a few endpoints turning a float into one costs more than comparing with it."""


class Profile(msgspec.Struct, frozen=True):
    """A bound scheduling profile."""

    name: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[Scorer, float], ...]
    """Scorer and weight."""
    picker: Picker


class Run(msgspec.Struct, frozen=True):
    """One profile's run over one request, as it happened."""

    profile: str
    filtered: list[tuple[str, Slots, Mask]]
    """Per filter: its name, what it was given, what of that it kept."""
    candidates: Slots
    """What the filters left."""
    scores: list[tuple[str, float, Vector]]
    """Per scorer: its name, its weight, its scores over `candidates`, clamped to 0..1."""
    totals: Vector
    """Weighted sums over `candidates`."""
    picked: Slots
    """The picker's choice, best first; empty where the filters left nothing."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, and why."""

    primary: str
    """The profile whose pick is the destination."""
    slots: tuple[int, ...]
    """The picked endpoints, then fallbacks by score. The first is where the request goes."""
    destinations: tuple[str, ...]
    """`ip:port` of `slots`, in their order, each once."""
    headers: Mapping[str, str]
    """What the engine or its sidecar is told, such as `x-prefiller-host-port`."""
    response_headers: Mapping[str, str]
    """What the client is told, such as a session token."""
    picks: Mapping[str, Slots]
    """Profile -> its pick; empty for a stage that was not wanted or found nothing."""
    runs: Mapping[str, Run]
    verdicts: Mapping[str, tuple[str, Verdict]]
    """Profile -> the decider that was asked before it, and its answer."""
    hints: Mapping[str, Hint] = {}
    """Plugin -> what it tells the engine in `headers`, and why, or why it tells nothing."""
    prefill: int | None = None
    """The slot that computes the prompt for another one; None where the destination does it itself."""

    def stages(self) -> Iterator[tuple[str, str, str]]:
        """(decider, `disaggregate` or `local`, reason) of every stage that a decider was asked about: what came of it. The
        decider's own reason stands unless it wanted a stage that found nobody, or nobody but the destination."""
        for profile, (decider, verdict) in self.verdicts.items():
            pick = self.picks[profile]
            if not verdict.disaggregate:
                yield decider, "local", verdict.reason
            elif not len(pick):
                yield decider, "local", "nobody-found"
            elif pick[0] == self.slots[0]:
                yield decider, "local", "same-endpoint"
            else:
                yield decider, "disaggregate", verdict.reason


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request goes nowhere."""

    status: int
    reason: str | None
    """The word for x-llm-d-request-dropped-reason; None where the client is at fault."""
    message: str
    runs: Mapping[str, Run] = {}
    verdicts: Mapping[str, tuple[str, Verdict]] = {}
    """As of a decision."""


class Scheduler:
    """Profiles and their handler, bound to a fleet. Make a new one when the configuration changes."""

    def __init__(
        self,
        fleet: Fleet,
        profiles: Iterable[Profile],
        handler: ProfileHandler,
        plugins: Iterable[Plugin] = (),
        fallbacks: int = 2,
        detector: SaturationDetector | None = None,
    ) -> None:
        self.failures: collections.Counter[tuple[str, str]] = collections.Counter()
        """(plugin name, what it was doing) -> how often it raised or answered nonsense."""
        self.on_failure: Callable[[str, str], None] | None = None
        """Also told of each failure, for metrics."""
        self._fleet = fleet
        self._profiles = {profile.name: profile for profile in profiles}
        self._handler = handler
        self._detector = detector
        self._gates: Mapping[str, Decider] = handler.gates if isinstance(handler, StagedHandler) else {}
        self._fallbacks = fallbacks if not isinstance(handler, StagedHandler) or handler.keeps_fallbacks else 0
        plugins = list(plugins)
        self._producers = [p for p in plugins if isinstance(p, Producer) and type(p).produce is not Producer.produce]
        self._hinting = [p for p in plugins if type(p).request_headers is not Plugin.request_headers]
        self._answering = [p for p in plugins if type(p).response_headers is not Plugin.response_headers]
        self._told = [plugin for plugin in plugins if type(plugin).picked is not Plugin.picked]

    def schedule(self, request: Request, candidates: Slots, *, tell: bool = True) -> Decision | Rejection:
        """Assign the request to endpoints among `candidates` (live, healthy, allowed by a subset hint).

        `tell=False`: only a look. Nothing is remembered; whoever acts on the decision calls `tell` with it.
        """
        if not len(candidates):
            return Rejection(status=503, reason=NO_ENDPOINTS, message="no endpoint is available for this request")
        if request.priority < 0 and self._saturated(candidates):
            message = "the fleet is saturated, and this request's priority is negative"
            return Rejection(status=429, reason=SATURATED, message=message)
        request.candidates = candidates
        for producer in self._producers:
            self._produce(producer, request)

        picks: dict[str, Slots] = {}
        runs: dict[str, Run] = {}
        verdicts: dict[str, tuple[str, Verdict]] = {}
        try:
            while (name := self._handler.next_profile(request, picks, self._fleet)) is not None:
                if name in picks:
                    raise RuntimeError(f"profile handler {self._handler.name!r} asks for profile {name!r} twice")
                if gate := self._gates.get(name):
                    verdict = self._ask(gate, request, picks)
                    verdicts[name] = (gate.name, verdict)
                    if not verdict.disaggregate:
                        picks[name] = NOBODY
                        continue
                runs[name] = self._run(self._profiles[name], request, candidates)
                picks[name] = runs[name].picked
                if request.peer is None and len(picks[name]):
                    request.peer = picks[name].item(0)  # what later profiles may want to be close to
        except UnknownProfile as error:
            return Rejection(status=400, reason=None, message=str(error))

        primary = self._handler.primary(picks)
        if not len(picks[primary]):
            message = f"every endpoint was filtered out by profile {primary!r}"
            return Rejection(status=429, reason=SATURATED, message=message, runs=runs, verdicts=verdicts)
        slots = (*picks[primary].tolist(), *self._next_best(runs[primary]))
        hints = self._hints(request, picks, primary, candidates) if self._hinting else {}
        told = {name: value for hint in hints.values() for name, value in hint.headers.items()}
        decision = Decision(
            primary=primary,
            slots=slots,
            destinations=addresses(slots, self._handler, self._fleet),
            headers={**told, **self._handler.headers(picks, self._fleet)},
            response_headers=self._answer(request, _destination_first(picks, primary)),
            picks=picks,
            runs=runs,
            verdicts=verdicts,
            hints=hints,
            prefill=self._handler.prefill_slot(picks) if isinstance(self._handler, StagedHandler) else None,
        )
        if tell:
            self.tell(request, decision)
        return decision

    def tell(self, request: Request, decision: Decision) -> None:
        """The decision is carried out: plugins that keep something of it may do so."""
        picks = _destination_first(decision.picks, decision.primary) if self._told else {}
        for plugin in self._told:
            self._tell(plugin, request, picks)

    def _run(self, profile: Profile, request: Request, candidates: Slots) -> Run:
        filtered: list[tuple[str, Slots, Mask]] = []
        for filter_ in profile.filters:
            mask = self._keep(filter_, request, candidates)
            filtered.append((filter_.name, candidates, mask))
            candidates = candidates[mask]
            if not len(candidates):
                return Run(profile.name, filtered, NOBODY, [], np.empty(0), NOBODY)

        totals: Vector | None = None
        scores: list[tuple[str, float, Vector]] = []
        for scorer, weight in profile.scorers:
            score = self._score(scorer, request, candidates)
            scores.append((scorer.name, weight, score))
            weighted = score if weight == 1.0 else score * weight
            totals = weighted if totals is None else totals + weighted
        if totals is None:
            totals = np.zeros(len(candidates))
        return Run(
            profile.name, filtered, candidates, scores, totals, self._pick(profile.picker, request, candidates, totals)
        )

    def _next_best(self, run: Run) -> Sequence[int]:
        """The endpoints that the picker left, by total, at most as many as fallbacks are wanted."""
        wanted = self._fallbacks
        if not wanted or len(run.candidates) == len(run.picked):
            return ()
        order = -run.totals
        reach = wanted + len(run.picked)
        if len(order) > 4 * reach:  # sorting a thousand endpoints costs more than the scorers do
            near = order.argpartition(reach)[:reach]
            near = near[order[near].argsort(kind="stable")]
        else:
            near = order.argsort(kind="stable")
        taken = run.picked.tolist()
        return [slot for slot in run.candidates[near].tolist() if slot not in taken][:wanted]

    # Calls into plugins: each says what the plugin's failure costs.

    def _saturated(self, candidates: Slots) -> bool:
        if self._detector is None:
            return False
        try:
            return self._detector.saturation(candidates, self._fleet, self._fleet.clock()) >= 1.0
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(self._detector, "saturation", error)
            return False

    def _produce(self, producer: Producer, request: Request) -> None:
        try:
            producer.produce(request, self._fleet)
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(producer, "produce", error)

    def _ask(self, gate: Decider, request: Request, picks: Mapping[str, Slots]) -> Verdict:
        pick = picks.get(self._handler.primary(picks), NOBODY)
        try:
            return gate.decide(request, pick.item(0) if len(pick) else -1, self._fleet)
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(gate, "decide", error)
            return Verdict(False, "decider-failed")

    def _keep(self, filter_: Filter, request: Request, candidates: Slots) -> Mask:
        try:
            mask = filter_.keep(request, candidates, self._fleet)
            if mask.shape == candidates.shape and mask.dtype == np.bool_:
                return mask
            raise TypeError(f"expected a mask of {candidates.shape}, got {mask.dtype} of {mask.shape}")
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(filter_, "filter", error)
            return np.ones(len(candidates), np.bool_)

    def _score(self, scorer: Scorer, request: Request, candidates: Slots) -> Vector:
        try:
            score = scorer.score(request, candidates, self._fleet)
            if score.shape == candidates.shape:
                clamped: Vector = np.fmin(np.fmax(score, _LEAST), _MOST)  # fmax also turns NaN into 0
                return clamped
            raise TypeError(f"expected scores of {candidates.shape}, got {score.shape}")
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(scorer, "score", error)
            return np.zeros(len(candidates))

    def _pick(self, picker: Picker, request: Request, candidates: Slots, totals: Vector) -> Slots:
        try:
            picked = picker.pick(request, candidates, totals, self._fleet)
            if len(picked):
                return picked
            raise TypeError("picked nothing")
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(picker, "pick", error)
            return candidates[[int(totals.argmax())]]

    def _hints(self, request: Request, picks: Mapping[str, Slots], primary: str, candidates: Slots) -> dict[str, Hint]:
        hints: dict[str, Hint] = {}
        for plugin in self._hinting:
            try:
                hint = plugin.request_headers(request, picks, primary, candidates, self._fleet)
            except Exception as error:  # noqa: BLE001 - counted
                self.failed(plugin, "request-headers", error)
                continue
            if hint is not None:
                hints[plugin.name] = hint
        return hints

    def _answer(self, request: Request, picks: Mapping[str, Slots]) -> dict[str, str]:
        headers: dict[str, str] = {}
        for plugin in self._answering:
            try:
                headers.update(plugin.response_headers(request, picks, self._fleet))
            except Exception as error:  # noqa: BLE001 - counted
                self.failed(plugin, "response-headers", error)
        return headers

    def _tell(self, plugin: Plugin, request: Request, picks: Mapping[str, Slots]) -> None:
        try:
            plugin.picked(request, picks, self._fleet)
        except Exception as error:  # noqa: BLE001 - counted
            self.failed(plugin, "picked", error)

    def failed(self, plugin: Plugin, doing: str, error: Exception) -> None:
        """Count a failure; log the first of each kind and every thousandth with its traceback."""
        key = (plugin.name, doing)
        self.failures[key] += 1
        if self.on_failure:
            self.on_failure(plugin.name, doing)
        if (times := self.failures[key]) % 1000 == 1:
            fields = (plugin.name, plugin.type, doing, times)
            log.error("plugin-failed plugin=%s type=%s doing=%s times=%d", *fields, exc_info=error)


def _destination_first(picks: Mapping[str, Slots], primary: str) -> Mapping[str, Slots]:
    return picks if next(iter(picks)) == primary else {primary: picks[primary], **picks}
