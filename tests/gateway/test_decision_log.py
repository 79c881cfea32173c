"""Decisions that are kept: bounded, true to the fleet they were made in, shown on a page and in a header."""

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.request import Match, Request
from gateway.config import LoadedConfig, load_text
from gateway.cycle import Decision
from gateway.decision_log import DecisionLog, with_explanation
from gateway.explain import MOST_BYTES
from gateway.explain_page import decisions_page
from gateway.extproc.decision import Decided, Rejected
from gateway.http_server import admin_app
from gateway.matching import Found
from indexer.trust import Reason, Trust, degraded, exact

CONFIG = """\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: expected-work-scorer
- type: max-score-picker
schedulingProfiles:
- {name: default, plugins: [{pluginRef: expected-work-scorer}, {pluginRef: max-score-picker}]}
"""
PRODUCER = "approx-prefix-cache-producer"


class World:
    def __init__(self, endpoints: int = 3, kept: int = 4) -> None:
        self.fleet = Fleet()
        for number in range(endpoints):
            self.fleet.add(Endpoint(name=f"engine-{number}", address=f"10.0.0.{number}:8000"))
        self.config: LoadedConfig = load_text(CONFIG)
        self.scheduler = self.config.scheduler(self.fleet)
        self.log = DecisionLog(self.fleet, self._trust, kept)
        self.log.pricing = self.config.pricing

    @staticmethod
    def _trust(slot: int) -> Trust:
        return degraded(Reason.LOST_BATCHES, 0.0) if slot == 1 else exact(0.0)

    def decide(self, request_id: str) -> Any:
        tokens = np.zeros(self.fleet.capacity)
        tokens[1] = 512
        match = Match(
            tokens=tokens / 2, weighted_tokens=tokens / 2, total_tokens=1024, block_tokens=16, keys=tuple(range(64))
        )
        request = Request(
            id=request_id, model="m", target_model="m", path="/", prompt_tokens=1030, matches={PRODUCER: match},
            default_match=PRODUCER,
        )  # fmt: skip
        outcome = self.scheduler.schedule(request, self.fleet.slots())
        return self.log.keep(request, outcome, Found(match, tokens))


def test_only_the_last_ones_are_kept_and_without_their_block_keys() -> None:
    world = World()
    for number in range(9):
        world.decide(f"r{number}")
    assert len(world.log) == 4
    assert world.log.find("r0") is None
    assert [kept.request.id for kept in world.log.last(2)] == ["r8", "r7"]
    assert all(match.keys == () for kept in world.log.last(9) for match in kept.request.matches.values())


def test_a_decision_names_the_endpoints_of_its_own_time() -> None:
    world = World()
    world.decide("before")
    world.fleet.remove(1)
    world.fleet.release(1)
    world.fleet.add(Endpoint(name="newcomer", address="10.0.0.9:8000"))
    world.decide("after")
    before, after = (world.log.find(name) for name in ("before", "after"))
    assert before is not None
    assert after is not None
    assert before.told()["endpoints"][0] == "engine-1"
    assert after.told()["endpoints"][0] == "newcomer"


def test_match_work_and_trust_of_every_candidate_are_told() -> None:
    told = World().decide("r").told()
    first, second = told["profiles"]["default"]["candidates"][:2]
    assert (first["endpoint"], first["cachedTokens"], first["trust"]) == (
        "engine-1", {PRODUCER: 256.0}, "degraded(lost_batches)",
    )  # fmt: skip
    assert first["work"]["own_s"] < second["work"]["own_s"]
    assert first["work"]["cached"] == 256
    assert second["trust"] == "exact"


def test_a_header_is_added_only_where_it_is_asked_for_and_never_too_long() -> None:
    kept = World(endpoints=400).decide("r")
    answer = Decided(destination=("10.0.0.1:8000",), response_headers={"a": "b"})
    for headers in ({}, {"x-warmroute-explain": "0"}):
        assert with_explanation(headers, kept, answer) is answer
    asked = with_explanation({"x-warmroute-explain": "1"}, kept, answer)
    assert isinstance(asked, Decided)
    text = asked.response_headers["x-warmroute-explain"]
    assert len(text) <= MOST_BYTES
    assert json.loads(text)["endpoints"][0] == "engine-1"
    assert asked.response_headers["a"] == "b"
    refused = with_explanation({"x-warmroute-explain": "1"}, kept, Rejected(status=429, message="full"))
    assert isinstance(refused, Rejected)
    assert json.loads(refused.headers["x-warmroute-explain"])["request"] == "r"


def test_names_that_fit_into_no_header_are_escaped() -> None:
    world = World(endpoints=1)
    world.fleet.replace(0, Endpoint(name="mäschine\n", address="10.0.0.0:8000"))
    world.fleet.add(Endpoint(name="other", address="10.0.0.1:8000"))
    kept = world.decide("r")
    assert isinstance(kept.outcome, Decision)
    asked = with_explanation({"x-warmroute-explain": "1"}, kept, Decided(destination=()))
    assert isinstance(asked, Decided)
    text = asked.response_headers["x-warmroute-explain"]
    assert text.isascii()
    assert text.isprintable()


@pytest.fixture
async def page() -> AsyncIterator[tuple[World, TestClient[Any, Any]]]:
    world = World()
    app = admin_app({"index": lambda: {"keys": 0}}, [decisions_page(lambda: world.log)])
    async with TestClient(TestServer(app)) as client:
        yield world, client


async def test_the_page_says_what_is_wrong_with_a_question(page: tuple[World, TestClient[Any, Any]]) -> None:
    _, client = page
    for query, status in (("request=nobody", 404), ("last=x", 400)):
        async with client.get(f"/state/decisions?{query}") as answer:
            assert answer.status == status
            assert "error" in await answer.json()
    off: web.Application = admin_app({}, [decisions_page(lambda: None)])
    async with TestClient(TestServer(off)) as other, other.get("/state/decisions") as answer:
        assert answer.status == 404
        assert "warmroute.explain: true" in (await answer.json())["error"]


async def test_the_page_shows_the_last_decisions_and_one_in_full(page: tuple[World, TestClient[Any, Any]]) -> None:
    world, client = page
    for number in range(3):
        world.decide(f"r{number}")
    async with client.get("/state/decisions?last=2&candidates=1") as answer:
        told = await answer.json()
    assert [it["request"] for it in told] == ["r2", "r1"]
    assert len(told[0]["profiles"]["default"]["candidates"]) == 1
    async with client.get("/state/decisions?request=r0") as answer:
        assert len((await answer.json())["profiles"]["default"]["candidates"]) == 3
    async with client.get("/state/index") as answer:
        assert await answer.json() == {"keys": 0}
