"""The request path end to end without sockets: a body in, a destination (or the client's error) out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.listing import Listing
from gateway.approximate import ApproximateCache
from gateway.config import load_text
from gateway.config_document import Model
from gateway.decision_log import DecisionLog
from gateway.extproc.decision import Decided, Head, Rejected
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producers import Producers
from gateway.request_events import DecidedRequest
from gateway.request_path import RequestPath, Settings
from gateway.served_models import Served, ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Tokenizer, Understanding
from indexer.block_key import block_keys, media_extras, root_key
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Trust, exact
from tokenization.errors import TokenizationError, refuse
from tokenization.tokenized import Extra, Tokenized

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: queue-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 2}
  - {pluginRef: queue-scorer, weight: 1}
"""
SPLIT = CONFIG.replace("plugins:\n- type: precise", "plugins:\n- type: decode-filter\n- type: precise", 1).replace(
    "  - {pluginRef: prefix", "  - {pluginRef: decode-filter}\n  - {pluginRef: prefix"
)
TOKENS = np.arange(100, dtype=np.uint32)


class FixedTokenizer:
    """Every prompt is TOKENS with these images, or fails as told."""

    def __init__(self, error: Exception | None = None, images: tuple[Extra, ...] = ()) -> None:
        self.error, self.images = error, images
        self.engine_models: list[str | None] = []

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        self.engine_models.append(engine_model)
        if self.error:
            raise self.error
        return Tokenized(token_ids=TOKENS, extras=self.images)


class Streams:
    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return exact(0.0)


class Confirmations:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def confirmed(
        self, slot: int, keys: Any, prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        self.seen.append((slot, predicted, cached))


class World:
    """A request path over three endpoints, with everything around it real but the tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        models: Mapping[str, Model] | None = None,
        config: str = CONFIG,
        roles: Sequence[str] = ("", "", ""),
    ) -> None:
        self.fleet = Fleet()
        for number, role in enumerate(roles):
            labels = {"llm-d.ai/role": role} if role else {}
            self.fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000", labels=labels))
        self.index = Index()
        self.books = Books(self.fleet)
        self.breaker = Breaker(self.fleet)
        self.metrics = Metrics(CollectorRegistry())
        self.confirmations = Confirmations()
        self.now = 0.0
        served = ServedModels(models if models is not None else {"m": Model()}, self.fleet)
        chosen = tokenizer or FixedTokenizer()
        loaded = load_text(config)
        self.path = RequestPath(
            fleet=self.fleet,
            books=self.books,
            breaker=self.breaker,
            models=served,
            matcher=Matcher(self.fleet, self.index, Streams()),
            scheduler=loaded.scheduler(self.fleet),
            producers=Producers(precise=("precise-prefix-cache-producer",), default="precise-prefix-cache-producer"),
            understanding=Understanding(served, lambda _: chosen, 0.4, self.metrics, NoTracing(), self.clock),
            accuracy=self.confirmations,
            trust=lambda _: exact(0.0),
            metrics=self.metrics,
            tracing=NoTracing(),
            settings=Settings(response_headers=True, objectives={"batch": -1}),
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    async def ask(self, body: bytes | None, **changes: Any) -> Decided | Rejected:
        fields: dict[str, Any] = {
            "method": "POST",
            "path": "/v1/chat/completions",
            "headers": {"content-type": "application/json"},
            "request_id": "r1",
        }
        return await self.path.decide(Head(**{**fields, **changes}), body or b"")

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"warmroute_{metric}", labels) or 0.0


CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "m", ', 400, "malformed_json"),
        (b"[]", 400, "malformed_json"),
        (b'{"messages": []}', 400, "invalid_request"),
        (b'{"model": 7, "messages": []}', 400, "invalid_request"),
        (b'{"model": "unknown", "messages": []}', 404, "model_not_found"),
        (b'{"model": "\\ud800", "messages": []}', 400, "invalid_request"),
    ],
)
async def test_what_the_client_did_wrong_is_answered(body: bytes, status: int, code: str) -> None:
    world = World()
    answer = await world.ask(body)
    assert isinstance(answer, Rejected)
    assert (answer.status, answer.code) == (status, code)
    assert not world.books
    assert world.count("requests_total", model=(answer.status == 404 and "unknown") or "", outcome=str(status)) <= 1


async def test_a_prompt_the_engine_would_refuse_is_refused_here() -> None:
    answer = await World(FixedTokenizer(refuse("messages must not be empty"))).ask(CHAT)
    assert isinstance(answer, Rejected)
    assert (answer.status, answer.message) == (400, "messages must not be empty")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TokenizationError("multimodal", "an image"), "multimodal"),
        (RuntimeError("boom"), "tokenizer_failed"),
        (TimeoutError(), "tokenizer_timeout"),
    ],
)
async def test_what_cannot_be_tokenized_is_routed_by_load_and_counted(error: Exception, reason: str) -> None:
    world = World(FixedTokenizer(error))
    world.fleet.waiting[:3] = [5, 0, 5]
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.destination[0] == "10.0.0.1:8000"
    assert world.count("routed_blind_total", reason=reason) == 1


async def test_the_endpoint_that_holds_the_prefix_is_chosen_and_told() -> None:
    world = World()
    world.index.add(2, GPU, block_keys(root_key("m"), TOKENS, 16))
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.destination[0] == "10.0.0.2:8000"
    assert len(answer.destination) == 3  # the others, by score, are fallbacks
    assert answer.body is None
    assert answer.response_headers["x-warmroute-predicted-cached-tokens"] == "96"
    assert answer.response_headers["x-warmroute-trust"] == "exact"
    assert world.fleet.in_flight_tokens[2] == 4


async def test_a_decision_that_cannot_be_counted_is_carried_out_and_released_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(decided: DecidedRequest) -> None:
        raise RuntimeError("boom")

    world = World()
    world.metrics.when_decided.append(fails)
    answer = await world.ask(STREAM)
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    assert "count_failed request_id=r1" in caplog.text
    answer.observer.finished()
    assert not world.books
    assert world.path.sending.budget.reading == 0


async def test_images_have_the_names_that_the_engines_model_gives_them_and_decide_over_the_match() -> None:
    tokenizer = FixedTokenizer(images=(Extra("boat", 40, 30),))
    world = World(tokenizer)
    world.fleet.listed(0, Listing(("m",), {}, "Qwen/Qwen2.5-VL-7B-Instruct"))
    for slot, image in ((1, "boat"), (2, "another")):
        world.index.add(slot, GPU, block_keys(root_key("m"), TOKENS, 16, media_extras([(image, 40)], 16)))
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.destination[0] == "10.0.0.1:8000"
    assert answer.response_headers["x-warmroute-predicted-cached-tokens"] == "96"
    assert tokenizer.engine_models == ["Qwen/Qwen2.5-VL-7B-Instruct"]


async def test_requests_without_a_prompt_go_by_load() -> None:
    world = World()
    world.fleet.waiting[:3] = [1, 1, 0]
    for changes in (
        {"method": "GET", "path": "/v1/models"},
        {"path": "/v1/audio", "headers": {"content-type": "audio/wav"}},
    ):
        answer = await world.ask(b"", **changes)
        assert isinstance(answer, Decided)
        assert answer.destination[0] == "10.0.0.2:8000"
        assert answer.observer is not None
        answer.observer.aborted("ended-before-response")
    assert world.count("routed_blind_total", reason="no_prompt") == 2


async def test_a_subset_is_a_limit_even_where_another_endpoint_is_better() -> None:
    world = World()
    world.index.add(2, GPU, block_keys(root_key("m"), TOKENS, 16))
    answer = await world.ask(CHAT, subset=("10.0.0.0:8000", "10.9.9.9:1"))
    assert isinstance(answer, Decided)
    assert list(answer.destination) == ["10.0.0.0:8000"]
    refused = await world.ask(CHAT, subset=("10.9.9.9:1",), request_id="r2")
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.reason) == (503, "rejected-no-endpoints")


async def test_unhealthy_endpoints_are_skipped_and_used_when_there_is_no_other() -> None:
    world = World()
    world.fleet.healthy[:3] = [False, True, False]
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert list(answer.destination) == ["10.0.0.1:8000"]
    world.fleet.healthy[:3] = False
    answer = await world.ask(CHAT, request_id="r2")
    assert isinstance(answer, Decided)
    assert len(answer.destination) == 3
    assert world.count("routed_blind_total", reason="no_healthy_endpoint") == 1


async def test_a_split_fleet_whose_decode_endpoints_are_all_unhealthy_uses_them_rather_than_none() -> None:
    world = World(roles=["prefill", "prefill", "decode"], config=SPLIT)
    world.fleet.healthy[:3] = [False, True, False]
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.destination[0] == "10.0.0.2:8000"
    assert world.count("routed_blind_total", reason="no_healthy_endpoint") == 1


async def test_an_unhealthy_decode_endpoint_is_left_out_while_any_other_can_decode() -> None:
    world = World(roles=["prefill", "both", "decode"], config=SPLIT)
    world.fleet.healthy[:3] = [True, True, False]
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert list(answer.destination) == ["10.0.0.1:8000"]


async def test_prefer_if_available_is_412_where_nobody_holds_a_prefix() -> None:
    world = World()
    headers = {"content-type": "application/json", "prefer": "if-available"}
    answer = await world.ask(CHAT, headers=headers)
    assert isinstance(answer, Rejected)
    assert answer.status == 412
    assert not world.books


async def test_a_finished_response_releases_the_books_and_confirms_the_prediction() -> None:
    world = World()
    world.index.add(0, GPU, block_keys(root_key("m"), TOKENS[:32], 16))
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    observer = answer.observer
    assert observer is not None
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
    body = {"choices": [{"finish_reason": "stop", "message": {"content": "x"}}], "usage": usage}
    world.now = 0.25
    observer.response_headers(200, {"content-type": "application/json"}, "10.0.0.0:8000")
    observer.response_chunk(json.dumps(body).encode())
    observer.finished()
    assert not world.books
    assert world.fleet.in_flight[:3].sum() == 0
    assert world.confirmations.seen == [(0, 32, 16)]
    assert world.count("cached_tokens_error_sum", endpoint="10.0.0.0:8000", direction="over") == 16
    assert world.count("time_to_first_token_seconds_sum", endpoint="10.0.0.0:8000") == 0.25


async def test_an_abort_releases_the_books_and_confirms_nothing() -> None:
    world = World()
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    answer.observer.response_headers(200, {"content-type": "text/event-stream"}, None)
    answer.observer.response_chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    answer.observer.aborted("ended-during-response")
    assert not world.books
    assert not world.confirmations.seen
    assert sum(world.count("responses_total", endpoint=f"10.0.0.{n}:8000", end="aborted") for n in range(3)) == 1


async def test_a_response_of_a_fallback_is_booked_where_it_runs() -> None:
    world = World()
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    chosen = world.fleet.slot_of(answer.destination[0])
    other = world.fleet.slot_of(answer.destination[1])
    assert answer.observer is not None
    answer.observer.response_headers(200, {"content-type": "application/json"}, answer.destination[1])
    assert world.fleet.in_flight[chosen] == 0
    assert world.fleet.in_flight[other] == 1


async def test_two_requests_decided_at_once_see_each_other() -> None:
    world = World()
    first = await world.ask(CHAT, request_id="r1")
    assert isinstance(first, Decided)
    slot = world.fleet.slot_of(first.destination[0])
    assert world.fleet.in_flight[slot] == 1
    assert world.fleet.in_flight_tokens[slot] == 100


async def test_an_unlisted_model_is_not_sent_to_an_endpoint_that_serves_another() -> None:
    world = World(models={"m": Model(), "n": Model()})
    world.fleet.replace(0, Endpoint(name="0", address="10.0.0.0:8000", model="n"))
    world.fleet.replace(1, Endpoint(name="1", address="10.0.0.1:8000", model="n"))
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert list(answer.destination) == ["10.0.0.2:8000"]
    assert Served("m", "m").base == "m"


JSON = {"content-type": "application/json"}


async def test_a_header_sends_the_request_to_another_model_and_its_body_says_so() -> None:
    world = World(models={"m": Model(), "n": Model()})
    world.fleet.replace(1, Endpoint(name="1", address="10.0.0.1:8000", model="n"))
    world.fleet.replace(0, Endpoint(name="0", address="10.0.0.0:8000", model="m"))
    world.fleet.replace(2, Endpoint(name="2", address="10.0.0.2:8000", model="m"))
    answer = await world.ask(CHAT, headers={**JSON, "x-llm-d-model-name-rewrite": "n"})
    assert isinstance(answer, Decided)
    assert list(answer.destination) == ["10.0.0.1:8000"]
    assert answer.body is not None
    assert json.loads(answer.body) == {**json.loads(CHAT), "model": "n"}
    assert world.count("requests_total", model="n", outcome="routed") == 1


async def test_a_rewrite_to_an_unknown_model_is_404() -> None:
    answer = await World().ask(CHAT, headers={**JSON, "x-gateway-model-name-rewrite": "nobody"})
    assert isinstance(answer, Rejected)
    assert answer.status == 404


async def test_without_the_header_the_body_is_left_alone() -> None:
    answer = await World().ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.body is None


async def test_a_sheddable_objective_is_turned_away_from_a_saturated_fleet() -> None:
    world = World()
    world.fleet.scraped_at[:3] = world.fleet.clock() + 1e6  # fresh
    world.fleet.waiting[:3] = 100
    for header in ("x-llm-d-inference-objective", "x-gateway-inference-objective"):
        refused = await world.ask(CHAT, headers={**JSON, header: "batch"})
        assert isinstance(refused, Rejected)
        assert (refused.status, refused.reason) == (429, "rejected-saturated")
    assert isinstance(await world.ask(CHAT, headers={**JSON, "x-llm-d-inference-objective": "other"}), Decided)
    world.fleet.waiting[:3] = 0
    assert isinstance(await world.ask(CHAT, headers={**JSON, "x-llm-d-inference-objective": "batch"}), Decided)


async def test_a_session_token_comes_back_and_leads_back() -> None:
    config = CONFIG.replace(
        "- type: queue-scorer\n",
        "- type: queue-scorer\n- type: session-affinity-scorer\n",
    )
    config = config.rstrip() + "\n  - {pluginRef: session-affinity-scorer, weight: 100}\n"
    world = World(config=config)
    world.fleet.waiting[:3] = [1, 1, 0]
    first = await world.ask(CHAT)
    assert isinstance(first, Decided)
    token = first.response_headers["x-session-token"]
    world.fleet.waiting[:3] = [0, 0, 9]
    again = await world.ask(CHAT, request_id="r2", headers={**JSON, "x-session-token": token})
    assert isinstance(again, Decided)
    assert again.destination[0] == first.destination[0] == "10.0.0.2:8000"


async def test_if_available_goes_by_what_was_sent_where_there_are_no_events() -> None:
    world = World(config=CONFIG.replace("precise-prefix-cache-producer", "approx-prefix-cache-producer"))
    cache = ApproximateCache(world.fleet, 16, 1000, None)
    world.path.producers = Producers(
        approximate={"approx-prefix-cache-producer": cache}, default="approx-prefix-cache-producer"
    )
    headers = {**JSON, "prefer": "if-available"}
    cold = await world.ask(CHAT, headers=headers)
    assert isinstance(cold, Rejected)
    assert cold.status == 412
    assert isinstance(await world.ask(CHAT, request_id="r2"), Decided)
    assert isinstance(await world.ask(CHAT, request_id="r3", headers=headers), Decided)


async def test_an_answer_that_ends_after_its_endpoint_has_left_is_still_counted() -> None:
    world = World()
    answer = await world.ask(CHAT, subset=("10.0.0.0:8000",))
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    world.fleet.remove(0)
    world.fleet.release(0)
    world.fleet.add(Endpoint(name="other", address="10.0.0.9:8000"))
    answer.observer.response_headers(500, {}, None)
    answer.observer.finished()
    assert world.count("responses_total", endpoint="10.0.0.0:8000", end="error") == 1
    assert not world.books


async def test_two_requests_with_one_id_are_two_in_the_books() -> None:
    world = World()
    subset = ("10.0.0.0:8000",)
    twins = [await world.ask(CHAT, subset=subset), await world.ask(CHAT, subset=subset)]
    assert world.fleet.in_flight[0] == 2
    for left, answer in ((1, twins[0]), (0, twins[1])):
        assert isinstance(answer, Decided)
        assert answer.observer is not None
        answer.observer.aborted("ended-before-response")
        assert world.fleet.in_flight[0] == left


async def test_what_is_being_computed_for_others_is_not_charged_again() -> None:
    world = World()
    subset = ("10.0.0.0:8000",)
    await world.ask(CHAT, subset=subset)
    await world.ask(CHAT, subset=subset, request_id="r2")
    assert world.fleet.in_flight_tokens[0] == 100 + 4


async def test_a_decision_that_fails_at_the_last_moment_leaves_nothing_in_the_books() -> None:
    world = World()

    def broken(_: int) -> Trust:
        raise RuntimeError("no")

    world.path.sending._trust = broken
    with pytest.raises(RuntimeError):
        await world.ask(STREAM)
    assert not world.books
    assert world.fleet.in_flight.sum() == 0
    assert world.path.sending.budget.reading == 0


async def test_a_limit_on_the_reply_is_believed_and_a_large_one_is_not() -> None:
    world = World()
    reserved = []
    for limit in (7, 5000):
        body = json.dumps({**json.loads(CHAT), "max_completion_tokens": limit}).encode()
        await world.ask(body, subset=("10.0.0.0:8000",), request_id=f"r{limit}")
        reserved.append(world.fleet.reserved_tokens[0])
    assert reserved == [100 + 7, 100 + 7 + 4 + 400]


async def test_a_name_that_only_a_client_has_said_is_no_metric_label() -> None:
    world = World(models={})
    answer = await world.ask(b'{"model": "whatever", "messages": [{"role": "user", "content": "x"}]}')
    assert isinstance(answer, Decided)
    assert world.count("requests_total", model="other", outcome="routed") == 1


async def test_an_error_repeats_only_the_beginning_of_a_long_name() -> None:
    answer = await World().ask(json.dumps({"model": "x" * 100_000, "messages": []}).encode())
    assert isinstance(answer, Rejected)
    assert len(answer.message) < 1000


async def test_without_a_match_the_response_claims_neither_cached_tokens_nor_trust() -> None:
    answer = await World(FixedTokenizer(TokenizationError("multimodal", "an image"))).ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.response_headers["x-request-id"] == "r1"
    assert "x-warmroute-predicted-cached-tokens" not in answer.response_headers
    assert "x-warmroute-trust" not in answer.response_headers


async def test_a_request_that_would_rather_not_go_is_explained_as_one_that_went_nowhere() -> None:
    world = World()
    log = world.path.decisions = DecisionLog(world.fleet, lambda _: exact(0.0))
    answer = await world.ask(CHAT, headers={**JSON, "prefer": "if-available", "x-warmroute-explain": "1"})
    assert isinstance(answer, Rejected)
    assert answer.status == 412
    kept = log.find("r1")
    assert kept is not None
    told = kept.told()
    assert told["rejected"] == {"status": 412, "reason": None, "message": answer.message}
    assert "endpoints" not in told
    assert told["profiles"]["default"]["candidates"]
    assert '"rejected":{"status":412' in answer.headers["x-warmroute-explain"]


async def test_an_explanation_that_fails_costs_neither_the_request_nor_the_books(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> str:
        raise RuntimeError("an explanation that nobody can write down")

    world = World()
    world.path.decisions = DecisionLog(world.fleet, lambda _: exact(0.0))
    monkeypatch.setattr("gateway.decision_log.header_text", broken)
    headers = {"content-type": "application/json", "x-warmroute-explain": "1"}
    answer = await world.ask(CHAT, headers=headers)
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    assert world.fleet.in_flight.sum() == 1
    answer.observer.aborted("ended-before-response")
    assert world.fleet.in_flight.sum() == 0


async def test_a_probe_whose_client_goes_away_does_not_keep_its_endpoint_away() -> None:
    world = World(roles=("",))
    for _ in range(5):
        world.breaker.report(0, None, world.now)
    world.now = 2.0
    world.breaker.tick(world.now)
    answer = await world.ask(CHAT)
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    assert world.fleet.tripped[0], "nobody follows the probe"
    answer.observer.aborted("ended-before-response")
    assert not world.fleet.tripped[0]


async def test_a_streamed_reply_beyond_the_budget_is_not_read_and_its_end_releases_the_books() -> None:
    world = World()
    world.path.sending.budget.per_second = 0
    answer = await world.ask(STREAM)
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    assert not answer.observe_response
    answer.observer.response_headers(200, {"content-type": "text/event-stream"}, None)
    world.now = 3.0
    answer.observer.finished()
    assert not world.books
    assert not world.confirmations.seen
    assert sum(world.count("responses_total", endpoint=f"10.0.0.{n}:8000", end="unread") for n in range(3)) == 1
    for n in range(3):
        assert not world.count("time_to_first_token_seconds_count", endpoint=f"10.0.0.{n}:8000"), "nobody saw it"
        assert not world.count("cached_tokens_unreported_total", endpoint=f"10.0.0.{n}:8000")
    assert world.count("streamed_replies_total", read="no") == 1


async def test_what_is_shown_although_it_need_not_be_is_read() -> None:
    world = World()
    world.path.sending.budget.per_second = 0
    answer = await world.ask(STREAM)
    assert isinstance(answer, Decided)
    assert answer.observer is not None
    answer.observer.response_headers(200, {"content-type": "text/event-stream"}, None)
    answer.observer.response_chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')
    answer.observer.finished()
    assert sum(world.count("responses_total", endpoint=f"10.0.0.{n}:8000", end="finished") for n in range(3)) == 1


async def test_replies_are_read_within_the_budget_and_again_when_others_are_over() -> None:
    world = World()
    world.path.sending.budget.per_second = 100.0  # two at 50 a second
    answers = [await world.ask(STREAM, request_id=f"r{number}") for number in range(3)]
    whole = await world.ask(CHAT, request_id="whole")
    assert [isinstance(it, Decided) and it.observe_response for it in (*answers, whole)] == [True, True, False, True]
    assert isinstance(answers[0], Decided)
    assert answers[0].observer is not None
    answers[0].observer.aborted("ended-before-response")
    again = await world.ask(STREAM, request_id="again")
    assert isinstance(again, Decided)
    assert again.observe_response
