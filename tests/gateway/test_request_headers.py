"""From a request's headers to its flow, and from a decision to the headers the engine gets: request path and ext-proc core."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import HeaderReader, Parameters
from fleet.request import Match, Request
from gateway.config import load_text
from gateway.config_document import Model
from gateway.config_source import ConfigError
from gateway.cycle import Decision
from gateway.decision_log import DecisionLog
from gateway.explain import explanation_text
from gateway.extproc.core import Exchange
from gateway.extproc.decision import Decided, Rejected
from gateway.extproc.effects import Decide, Send
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producer_wiring import producers_of
from gateway.producers import Producers
from gateway.request_events import Customer
from gateway.request_path import RequestPath, Settings
from gateway.served_models import ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Understanding
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Reason, Trust, degraded, exact
from tokenization.tokenized import Tokenized

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n"
CONFIG = f"""{HEAD}- type: precise-prefix-cache-producer
- type: queue-scorer
- type: p2p-source-producer
  parameters: {{minCachedTokenDelta: 32}}
- type: agent-identity
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: queue-scorer}}]}}]
"""
TOKENS = np.arange(100, dtype=np.uint32)
SOURCE = "x-kv-cache-source-host-port"
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()


class FixedTokenizer:
    async def tokenize(self, path: str, body: Mapping[str, Any], **_: Any) -> Tokenized:
        return Tokenized(token_ids=TOKENS)


class Streams:
    def __init__(self) -> None:
        self.by_slot: dict[int, Trust] = {}

    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return self.by_slot.get(slot, exact(0.0))


class Confirmations:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def confirmed(self, slot: int, *_: Any) -> None:
        self.seen.append(slot)


class World:
    """Three endpoints; load sends every request to the first, and the others may hold its prompt."""

    def __init__(self) -> None:
        self.fleet, self.index, self.streams = Fleet(), Index(), Streams()
        for number in range(3):
            self.fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000"))
        self.fleet.waiting[:3] = [0, 4, 4]
        self.books, self.metrics = Books(self.fleet), Metrics(CollectorRegistry())
        self.confirmations = Confirmations()
        self.decisions = DecisionLog(self.fleet, self.streams.trust)
        self.customers: list[Customer] = []
        self.metrics.when_sent.append(self.customers.append)
        self.metrics.when_decided.append(lambda decided: self.customers.append(decided.customer))
        served, config, tokenizer = ServedModels({"m": Model()}, self.fleet), load_text(CONFIG), FixedTokenizer()
        self.path = RequestPath(
            fleet=self.fleet,
            books=self.books,
            breaker=Breaker(self.fleet),
            models=served,
            matcher=Matcher(self.fleet, self.index, self.streams),
            scheduler=config.scheduler(self.fleet),
            producers=producers_of(config, self.fleet),
            understanding=Understanding(served, lambda _: tokenizer, 0.4, self.metrics, NoTracing(), lambda: 0.0),
            accuracy=self.confirmations,
            trust=self.streams.trust,
            metrics=self.metrics,
            tracing=NoTracing(),
            settings=Settings(),
            decisions=self.decisions,
            clock=lambda: 0.0,
        )

    def holds(self, slot: int, tokens: int) -> None:
        self.index.add(slot, GPU, block_keys(root_key("m"), TOKENS[:tokens], 16))

    async def send(self, headers: Mapping[str, str] = {}) -> tuple[Decided | Rejected, dict[str, str], list[str]]:
        """Through the ext-proc core: the decision, the headers it sets, the headers it removes."""
        exchange = Exchange()
        head = pb.ProcessingRequest()
        pseudo = {
            ":method": "POST",
            ":path": "/v1/chat/completions",
            ":authority": "a",
            "content-type": "application/json",
        }
        for name, value in {**pseudo, "x-request-id": "r1", **headers}.items():
            head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        head.protocol_config.request_body_mode = ProcessingMode.BodySendMode.BUFFERED
        (first,) = (it.message for it in exchange.received(head) if isinstance(it, Send))
        body = pb.ProcessingRequest(request_body=pb.HttpBody(body=CHAT, end_of_stream=True))
        (ask,) = (it for it in exchange.received(body) if isinstance(it, Decide))
        decided = await self.path.decide(ask.head, ask.body)
        (answer,) = (it.message for it in exchange.decided(decided) if isinstance(it, Send))
        mutation = answer.request_body.response.header_mutation
        removed = [*first.request_headers.response.header_mutation.remove_headers, *mutation.remove_headers]
        return decided, {it.header.key: it.header.raw_value.decode() for it in mutation.set_headers}, removed

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"warmroute_{metric}_total", labels) or 0.0

    def hints(self, outcome: str) -> float:
        return self.count("request_hints", plugin="p2p-source-producer", outcome=outcome)

    def told(self) -> dict[str, Any]:
        kept = self.decisions.find("r1")
        assert kept is not None
        return kept.told()


# Where the engine may pull from


async def test_a_client_cannot_name_a_source() -> None:
    world = World()
    _, set_, removed = await world.send({SOURCE: "10.6.6.6:1"})
    assert SOURCE not in set_
    assert SOURCE in removed
    assert world.hints("no_better") == 1


async def test_the_source_reaches_the_request_in_place_of_the_clients() -> None:
    world = World()
    world.holds(2, 96)
    decided, set_, _ = await world.send({SOURCE: "10.6.6.6:1"})
    assert isinstance(decided, Decided)
    assert decided.destination[0] == "10.0.0.0:8000"
    assert set_[SOURCE] == "10.0.0.2:8000"
    assert (world.hints("named"), world.hints("no_better")) == (1, 0)


@pytest.mark.parametrize(("own", "named"), [(64, True), (80, False), (96, False)])
async def test_the_destinations_own_blocks_are_set_against_the_sources(own: int, named: bool) -> None:
    world = World()
    world.holds(0, own)
    world.holds(1, 96)
    _, set_, _ = await world.send()
    assert (SOURCE in set_) is named


async def test_an_endpoint_whose_stream_is_not_exact_is_no_source() -> None:
    world = World()
    world.holds(1, 96)
    world.holds(2, 48)
    world.streams.by_slot[1] = degraded(Reason.LOST_BATCHES, 0.0)
    _, set_, _ = await world.send()
    assert set_[SOURCE] == "10.0.0.2:8000"


@pytest.mark.parametrize("column", ["tripped", "draining"])
async def test_an_endpoint_that_gets_nothing_new_is_no_source(column: str) -> None:
    world = World()
    world.holds(1, 96)
    getattr(world.fleet, column)[1] = True
    _, set_, _ = await world.send()
    assert SOURCE not in set_


async def test_explain_names_the_source_and_why() -> None:
    world = World()
    world.holds(0, 16)
    world.holds(2, 96)
    await world.send()
    told = world.told()
    assert told["hints"] == {
        "p2p-source-producer": {
            "outcome": "named",
            "endpoint": "e2",
            "numbers": {"computing_tokens": 16, "source_tokens": 96, "waiting": 4, "sources": 1},
        }
    }
    assert (
        "p2p-source-producer: named e2  computing_tokens=16  source_tokens=96  waiting=4  sources=1"
        in explanation_text(told).splitlines()
    )


async def test_explain_says_why_there_is_no_source() -> None:
    world = World()
    world.holds(2, 16)
    await world.send()
    assert "p2p-source-producer: no_better  computing_tokens=0  best_tokens=16" in explanation_text(world.told())


@pytest.mark.parametrize(("held", "confirmed"), [(96, []), (16, [0])])
async def test_what_an_engine_pulled_is_not_held_against_the_prediction(held: int, confirmed: list[int]) -> None:
    world = World()
    world.holds(2, held)
    decided, _, _ = await world.send()
    assert isinstance(decided, Decided)
    assert decided.observer is not None
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": held}}
    body = {"choices": [{"finish_reason": "stop", "message": {"content": "x"}}], "usage": usage}
    decided.observer.response_headers(200, {"content-type": "application/json"}, "10.0.0.0:8000")
    decided.observer.response_chunk(json.dumps(body).encode())
    decided.observer.finished()
    assert world.confirmations.seen == confirmed


PREFILL_DECODE = f"""{HEAD}- type: prefill-filter
- type: decode-filter
- type: always-disagg-pd-decider
- type: disagg-profile-handler
  parameters: {{deciders: {{prefill: always-disagg-pd-decider}}}}
- type: p2p-source-producer
schedulingProfiles:
- {{name: prefill, plugins: [{{pluginRef: prefill-filter}}]}}
- {{name: decode, plugins: [{{pluginRef: decode-filter}}]}}
"""


@pytest.mark.parametrize(("prefill_holds", "source"), [(0.0, "10.0.0.1:8000"), (64.0, None)])
def test_a_decode_endpoint_may_feed_the_prefill_endpoint(prefill_holds: float, source: str | None) -> None:
    fleet = Fleet()
    for name, role in (("p", "prefill"), ("d", "decode")):
        labels = {"llm-d.ai/role": role}
        fleet.add(Endpoint(name=name, address=f"10.0.0.{len(fleet.slots())}:8000", labels=labels))
    tokens = np.zeros(fleet.capacity)
    tokens[:2] = prefill_holds, 64.0
    match = Match(tokens=tokens, weighted_tokens=tokens, total_tokens=96, block_tokens=16)
    request = Request(
        id="r", model="m", target_model="m", path="/", prompt_tokens=100, matches={"p": match}, default_match="p"
    )
    outcome = load_text(PREFILL_DECODE).scheduler(fleet).schedule(request, fleet.slots())
    assert isinstance(outcome, Decision)
    assert outcome.destinations == ("10.0.0.1:8000",)
    assert outcome.headers["x-prefiller-host-port"] == "10.0.0.0:8000"
    assert outcome.headers.get(SOURCE) == source


# Whose request it is


class Broken(HeaderReader):
    attribute = "broken"

    def read(self, headers: Mapping[str, str]) -> str | None:
        raise RuntimeError("no")


async def test_a_reader_that_fails_costs_its_attribute_only() -> None:
    world = World()
    (reader,) = world.path.producers.readers
    world.path.producers = Producers(readers=(Broken("b", Parameters()), reader))
    decided, _, _ = await world.send({"session_id": "s1"})
    assert isinstance(decided, Decided)
    assert {it.fairness_id for it in world.customers} == {"s1"}
    assert world.count("plugin_errors", plugin="b") > 0


@pytest.mark.parametrize(
    ("headers", "flow"),
    [
        ({}, "default-flow"),
        ({"x-claude-code-session-id": "s1"}, "s1"),
        ({"x-claude-code-session-id": "s1", "x-llm-d-inference-fairness-id": "team"}, "team"),
        ({"x-claude-code-session-id": "s1", "x-gateway-inference-fairness-id": "team"}, "team"),
    ],
)
async def test_the_fairness_id_is_the_header_else_the_agent_else_the_default(
    headers: Mapping[str, str], flow: str
) -> None:
    world = World()
    await world.send(headers)
    assert [it.fairness_id for it in world.customers] == [flow, flow]
    assert world.told()["fairnessId"] == flow


async def test_a_request_that_is_turned_away_has_its_flow_too() -> None:
    world = World()
    for slot in world.fleet.slots().tolist():
        world.fleet.remove(slot)
    await world.send({"session_id": "s1"})
    assert [it.fairness_id for it in world.customers] == ["s1"]


# What the configuration says


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_text(f"{HEAD}{text}", "c.yaml")
    return [str(problem) for problem in caught.value.problems]


AFFINITY = (
    "- type: session-affinity-scorer\n  parameters: {{strategy: session_id, sessionIdConfig: {{sources: [{}]}}}}\n"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "- {type: p2p-source-producer, parameters: {minCachedTokenDelta: 0}}\n",
            "minCachedTokenDelta: expected int >= 1",
        ),
        (
            "- {type: p2p-source-producer, parameters: {minCachedTokensDelta: 4}}\n",
            "did you mean 'minCachedTokenDelta'?",
        ),
        (
            "- {type: queue-scorer}\n- {type: p2p-source-producer, parameters: {prefixMatchInfoProducerName: queue-scorer}}\n",
            "plugins[1].parameters.prefixMatchInfoProducerName: 'queue-scorer' is of type",
        ),
        (
            "- {type: p2p-source-producer, parameters: {prefillProfileName: prefil}}\n- {type: header-profile-handler}\n"
            "schedulingProfiles: [{name: decode}, {name: prefill}]\n",
            "plugins[0].parameters.prefillProfileName: no profile named 'prefil'; did you mean 'prefill'?",
        ),
        ("- {type: agent-identity, parameters: {additionalSessionHeaders: ['']}}\n", "additionalSessionHeaders[0]"),
        ("- {type: agent-identity, parameters: {additionalSessionHeaders: x}}\n", "additionalSessionHeaders: expected"),
        (
            "- {type: agent-identity}\n- {name: b, type: agent-identity}\n",
            "a second plugin that finds 'agent-identity'",
        ),
        (AFFINITY.format("{attribute: agent-identity}"), "no plugin named 'agent-identity'"),
        (
            AFFINITY.format("{attribute: agent-identitty}") + "- {type: agent-identity}\n",
            "sources[0].attribute: no plugin named 'agent-identitty'; did you mean 'agent-identity'?",
        ),
        (
            AFFINITY.format("{attribute: agent-identity, producer: session-id-producer}")
            + "- {type: session-id-producer, parameters: {headerName: x}}\n",
            "'session-id-producer' is of type 'session-id-producer', which is not a header reader",
        ),
        (AFFINITY.format("{attribute: SessionID, producer: nobody}"), "sources[0].producer: no plugin named 'nobody'"),
        (
            AFFINITY.format("{attribute: other, producer: agent-identity}") + "- {type: agent-identity}\n",
            "'agent-identity' finds 'agent-identity', not 'other'",
        ),
    ],
)
def test_what_cannot_work_is_refused(text: str, message: str) -> None:
    assert len(problems(text)) == 1
    assert message in problems(text)[0]


def test_a_source_producer_without_a_named_producer_reads_the_default_one() -> None:
    assert load_text(f"{HEAD}- type: p2p-source-producer\n").default_match == "approx-prefix-cache-producer"
    precise = load_text(f"{HEAD}- type: p2p-source-producer\n- type: precise-prefix-cache-producer\n")
    assert precise.default_match == "precise-prefix-cache-producer"


def test_session_affinity_by_agent_is_accepted() -> None:
    for source in ("{attribute: agent-identity}", "{attribute: agent-identity, producer: me}"):
        name = "me" if "me}" in source else "agent-identity"
        config = load_text(f"{HEAD}{AFFINITY.format(source)}- {{name: {name}, type: agent-identity}}\n")
        assert set(config.plugins) >= {"session-affinity-scorer", name}
