"""`speculativeIndexing`: what was just sent counts as held, until events confirm it, it fails, or its time is up."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from event_ingest.events import Batch, BlockRemoved, BlockStored, Decoded
from event_ingest.pipeline import EventPath
from fleet.books import Books
from fleet.breaker import Breaker
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import load_text
from gateway.config_document import Model
from gateway.extproc.decision import Decided, Head
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producer_wiring import predicted_of
from gateway.producers import Producers
from gateway.request_path import RequestPath, Settings
from gateway.served_models import Served, ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Understanding
from indexer.block_key import block_keys, pack_tokens, root_key
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Reason, Trust, blind, exact
from tokenization.tokenized import Tokenized

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
  parameters: {speculativeIndexing: true, speculativeTTL: 2s}
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer}
"""
NAME = "precise-prefix-cache-producer"
TOKENS = np.arange(100, dtype=np.uint32)
KEYS = block_keys(root_key("m"), TOKENS, 16)
CHAT = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
SERVED = Served("m", "m")


class SameTokens:
    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        return Tokenized(token_ids=TOKENS)


class Streams:
    trusted = exact(0.0)

    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return self.trusted


class Accuracy:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def confirmed(
        self, slot: int, keys: Any, prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        self.seen.append((predicted, cached))


class World:
    """A request path over four endpoints that scores by prefix alone."""

    def __init__(self, speculative: bool = True) -> None:
        config = load_text(
            CONFIG.replace("speculativeIndexing: true", f"speculativeIndexing: {str(speculative).lower()}")
        )
        self.fleet, self.index, self.streams, self.accuracy = Fleet(), Index(), Streams(), Accuracy()
        for number in range(4):
            self.fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
        self.predicted = predicted_of(config)
        self.now = 0.0
        self.matcher = Matcher(self.fleet, self.index, self.streams, predicted=self.predicted)
        served = ServedModels({"m": Model()}, self.fleet)
        metrics = Metrics(CollectorRegistry())
        self.path = RequestPath(
            fleet=self.fleet,
            books=Books(self.fleet),
            breaker=Breaker(self.fleet),
            models=served,
            matcher=self.matcher,
            scheduler=config.scheduler(self.fleet),
            producers=Producers(precise=(NAME,), default=NAME),
            understanding=Understanding(served, lambda _: SameTokens(), 0.4, metrics, NoTracing(), self.clock),
            accuracy=self.accuracy,
            trust=self.streams.trust,
            metrics=metrics,
            tracing=NoTracing(),
            settings=Settings(response_headers=True),
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    async def ask(self, name: str = "r") -> Decided:
        head = Head(
            method="POST",
            path="/v1/chat/completions",
            headers={"content-type": "application/json"},
            request_id=name,
        )
        answer = await self.path.decide(head, CHAT)
        assert isinstance(answer, Decided)
        return answer

    def tokens(self) -> list[float]:
        return self.matcher.match(self.matcher.keys(Tokenized(token_ids=TOKENS), SERVED)).match.tokens[:4].tolist()


async def burst(world: World, size: int = 12) -> set[str]:
    first = (await world.ask("first")).destination[0]
    others = await asyncio.gather(*(world.ask(f"r{number}") for number in range(size)))
    return {first, *(other.destination[0] for other in others)}


def test_it_is_off_unless_configured() -> None:
    assert World(speculative=False).predicted is None


async def test_a_burst_of_siblings_follows_the_first() -> None:
    assert len(await burst(World())) == 1
    assert len(await burst(World(speculative=False))) > 1, "no plugin but expected work sees what is on its way"


async def test_an_expectation_is_no_prediction_of_cached_tokens() -> None:
    """What an engine will have in a moment is worth a request; what it reports for it may still be less."""
    world = World()
    await world.ask("first")
    second = await world.ask("second")
    assert second.response_headers["x-warmroute-predicted-cached-tokens"] == "0"


async def test_what_is_only_expected_is_not_announced() -> None:
    world = World()
    slot = int((await world.ask()).destination[0].split(":")[0][-1])
    world.index.add(slot, GPU, KEYS[:2])
    match = world.matcher.match(world.matcher.keys(Tokenized(token_ids=TOKENS), SERVED)).match
    assert (match.tokens_at(np.array([slot]))[0], match.announced_at(np.array([slot]))[0]) == (96, 32)


async def test_time_ends_what_was_expected_and_never_what_is_held() -> None:
    world = World()
    slot = int((await world.ask()).destination[0].split(":")[0][-1])
    world.index.add(slot, GPU, KEYS[:2])
    assert world.tokens()[slot] == 96
    assert world.predicted is not None
    assert world.predicted.expire(1.9) == 0
    assert world.predicted.expire(2.1) == 1
    assert world.tokens()[slot] == 32


async def test_events_take_over_from_the_expectation() -> None:
    world = World()
    slot = int((await world.ask()).destination[0].split(":")[0][-1])
    path = EventPath(world.index, slot, name="e", model="m", can_replay=False, predicted=world.predicted)
    path.connected(0.0)
    stored = BlockStored(hashes=(1, 2, 3, 4, 5, 6), tokens=pack_tokens(TOKENS[:96]), block_tokens=16)
    path.feed_batch(0, 1.0, Decoded(Batch(1.0, (stored,), 0)), 1.0)
    assert not world.predicted
    path.feed_batch(1, 2.0, Decoded(Batch(2.0, (BlockRemoved(hashes=(6, 5)),), 0)), 2.0)
    assert world.tokens()[slot] == 64, "an announced removal counts at once, whatever was expected earlier"


async def test_only_what_the_endpoint_lacks_is_expected() -> None:
    world = World()
    world.index.add(2, GPU, KEYS[:4])
    assert (await world.ask()).destination[0] == "10.0.0.2:8000"
    assert world.predicted is not None
    assert world.predicted.stats().entries == 2


@pytest.mark.parametrize("end", ["aborted", "failed"])
async def test_a_request_that_comes_to_nothing_takes_its_expectation_along(end: str) -> None:
    world = World()
    observer = (await world.ask("one")).observer
    other = (await world.ask("two")).observer
    assert observer is not None
    assert other is not None
    if end == "aborted":
        observer.aborted("client")
    else:
        observer.response_headers(503, {"content-type": "application/json"}, None)
        observer.finished()
    assert max(world.tokens()) == 96, "the other request still stands for it"
    other.aborted("client")
    assert max(world.tokens()) == 0


async def test_a_request_that_was_served_is_left_to_the_engines_events() -> None:
    world = World()
    observer = (await world.ask()).observer
    assert observer is not None
    observer.response_headers(200, {"content-type": "application/json"}, None)
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
    observer.response_chunk(json.dumps({"choices": [{"message": {"content": "x"}}], "usage": usage}).encode())
    observer.finished()
    assert world.accuracy.seen == [(0, 0)]
    assert max(world.tokens()) == 96


async def test_our_own_knowledge_needs_no_stream_to_vouch_for_it() -> None:
    world = World()
    world.streams.trusted = blind(Reason.NO_EVENTS, 0.0)
    world.index.add(1, GPU, KEYS[:4])
    assert world.tokens() == [0, 0, 0, 0]
    assert len(await burst(world)) == 1
