import msgspec
import numpy as np

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from gateway.config import load_text
from gateway.explain import explain

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefill-filter
- type: decode-filter
- type: prefix-cache-scorer
- type: queue-scorer
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 16}
- type: disagg-profile-handler
  parameters: {deciders: {prefill: prefix-based-pd-decider}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer, weight: 2}, {pluginRef: queue-scorer}]}
"""


def situation() -> tuple[Fleet, Request]:
    fleet = Fleet()
    for name, role in (("p", "prefill"), ("d0", "decode"), ("d1", "decode")):
        fleet.add(Endpoint(name=name, address=f"10.0.0.{len(fleet.slots())}:8000", labels={"llm-d.ai/role": role}))
    tokens = np.zeros(fleet.capacity)
    tokens[2] = 512
    match = Match(tokens=tokens, weighted_tokens=tokens, total_tokens=1024, block_tokens=16)
    request = Request(
        id="r", model="m", target_model="m", path="/", prompt_tokens=1030,
        matches={"approx-prefix-cache-producer": match}, default_match="approx-prefix-cache-producer",
    )  # fmt: skip
    return fleet, request


def test_a_rejection_says_which_filter_removed_whom() -> None:
    fleet, request = situation()
    scheduler = load_text(CONFIG).scheduler(fleet)
    told = explain(request, scheduler.schedule(request, fleet.slots()[:1]), fleet)
    assert told["rejected"]["status"] == 429
    assert told["profiles"]["decode"] == {"picked": [], "candidates": [], "removed": {"p": "decode-filter"}}


def test_a_decision_says_what_every_candidate_scored_and_what_the_decider_said() -> None:
    fleet, request = situation()
    told = explain(request, load_text(CONFIG).scheduler(fleet).schedule(request, fleet.slots()), fleet)
    assert told["endpoints"] == ["d1", "d0"]
    assert told["profiles"]["decode"]["removed"] == {"p": "decode-filter"}
    best = told["profiles"]["decode"]["candidates"][0]
    assert best == {
        "endpoint": "d1",
        "total": 2.0,
        "scores": {"prefix-cache-scorer": {"score": 0.5, "weight": 2.0}, "queue-scorer": {"score": 1.0, "weight": 1.0}},
        "cachedTokens": {"approx-prefix-cache-producer": 512.0},
    }
    assert told["deciders"]["prefill"]["reason"] == "uncached"
    assert told["deciders"]["prefill"]["numbers"]["held_tokens"] == 512
    assert told["headers"] == {"x-prefiller-host-port": "10.0.0.0:8000"}
    assert msgspec.json.encode(told)
