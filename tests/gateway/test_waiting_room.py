"""Waiting for the queue's word, with the whole request path around it and a real event loop."""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import load_text
from gateway.config_document import Model
from gateway.decision_log import DecisionLog
from gateway.extproc.decision import Decided, Head, Rejected
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producers import Producers
from gateway.request_path import RequestPath, Settings
from gateway.served_models import Served, ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Understanding
from gateway.waiting_room import WaitingRoom
from gateway.work_queue import WorkQueue
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Trust, exact
from tokenization.tokenized import Tokenized

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: precise-prefix-cache-producer
- type: expected-work-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: expected-work-queue
  parameters: %s
"""
LONG = 43_000  # tokens; 1.6 s of prefill


class Lengths:
    """A prompt of as many tokens as its `n` says; those with the same `start` begin alike."""

    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        return Tokenized(token_ids=np.arange(body["start"], body["start"] + body["n"], dtype=np.uint32))


class Streams:
    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return exact(0.0)


class Ignored:
    def confirmed(
        self, slot: int, keys: Any, prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        pass


class World:
    """One endpoint (or more), the router in front, no sockets. Time is real."""

    def __init__(self, queue: str = "{}", endpoints: int = 1) -> None:
        self.fleet = Fleet()
        for number in range(endpoints):
            self.fleet.add(Endpoint(name=str(number), address=f"10.0.0.{number}:8000"))
        self.books = Books(self.fleet)
        self.metrics = Metrics(CollectorRegistry())
        self.index = Index()
        self.config = load_text(CONFIG % queue)
        self.room = WaitingRoom(self.fleet, self.metrics)
        self.room.use(self.config.work_queue(self.fleet))
        self.books.when_freed.append(self.room.freed)
        models = ServedModels({"m": Model()}, self.fleet)

        def tokenizer(_: Served) -> Lengths:
            return Lengths()

        self.path = RequestPath(
            fleet=self.fleet,
            books=self.books,
            breaker=Breaker(self.fleet),
            models=models,
            matcher=Matcher(self.fleet, self.index, Streams()),
            scheduler=self.config.scheduler(self.fleet),
            producers=Producers(precise=("precise-prefix-cache-producer",), default="precise-prefix-cache-producer"),
            understanding=Understanding(models, tokenizer, 5.0, self.metrics, NoTracing(), self.fleet.clock),
            accuracy=Ignored(),
            trust=lambda _: exact(0.0),
            metrics=self.metrics,
            tracing=NoTracing(),
            settings=Settings(objectives={"batch": -5, "chat": 5}),
            room=self.room,
        )

    def ask(self, name: str, tokens: int = 100, start: int = 0, **headers: str) -> "asyncio.Task[Decided | Rejected]":
        head = Head(
            method="POST",
            path="/v1/completions",
            headers={"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}},
            request_id=name,
        )
        body = json.dumps({"model": "m", "prompt": "x", "n": tokens, "start": start, "stream": True}).encode()
        return asyncio.create_task(self.path.decide(head, body), name=name)

    async def occupied(self) -> Decided:
        """The endpoint computes a long prompt."""
        answer = await self.ask("long", LONG)
        assert isinstance(answer, Decided)
        return answer

    async def waiting(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.room.queue or ()) != count:  # noqa: ASYNC110 - the queue tells nobody
                await asyncio.sleep(0.001)

    def waits(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("warmroute_queue_wait_seconds_count", {"outcome": outcome}) or 0.0


def broken_schedule(*_: Any, **__: Any) -> None:
    raise RuntimeError("no cycle")


def first_token(answer: Decided) -> None:
    assert answer.observer is not None
    answer.observer.response_headers(200, {"content-type": "text/event-stream"}, None)
    answer.observer.response_chunk(b'data: {"choices":[{"text":"x"}]}\n\n')


def finished(answer: Decided) -> None:
    assert answer.observer is not None
    answer.observer.finished()


async def test_with_room_nobody_waits_and_no_pulse_beats() -> None:
    world = World()
    answer = await world.ask("r")
    assert isinstance(answer, Decided)
    assert len(asyncio.all_tasks()) == 1
    assert world.waits("sent") == 0


async def test_who_finds_no_room_waits_for_a_first_token() -> None:
    world = World()
    running = await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    assert "r" not in world.books
    first_token(running)
    async with asyncio.timeout(1):
        answer = await request
    assert isinstance(answer, Decided)
    assert "r" in world.books
    assert world.waits("sent") == 1


async def test_who_finds_no_memory_waits_for_an_end() -> None:
    world = World()
    world.fleet.kv_capacity_tokens[0] = 45_000
    running = await world.occupied()
    first_token(running)
    request = world.ask("r", LONG + 1_000)
    await world.waiting(1)
    other = world.ask("no more than fits", 10)
    await world.waiting(2)
    finished(running)
    assert isinstance(await request, Decided)
    assert not other.done()
    world.room.close()
    await other


async def test_time_alone_opens_an_endpoint() -> None:
    world = World()
    await world.occupied()
    world.fleet.oldest_since[0] -= 1.2  # as if it had begun that much earlier: 0.4 s are owed
    request = world.ask("r")
    async with asyncio.timeout(2):
        assert isinstance(await request, Decided)


async def test_a_client_that_goes_away_leaves_the_queue() -> None:
    world = World()
    await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert len(world.room.queue or ()) == 0
    assert "r" not in world.books
    assert world.waits("cancelled") == 1


async def test_a_client_that_goes_away_in_the_moment_it_is_sent_is_taken_out_of_the_books() -> None:
    world = World()
    running = await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    first_token(running)
    while "r" not in world.books:  # noqa: ASYNC110 - exactly the turn of the loop is what counts
        await asyncio.sleep(0)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    assert "r" not in world.books
    assert world.fleet.in_flight[0] == 1


async def test_a_full_queue_is_429_with_retry_after() -> None:
    world = World("{maxRequests: 1}")
    await world.occupied()
    first = world.ask("first")
    await world.waiting(1)
    refused = await world.ask("second")
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.reason) == (429, "rejected-saturated")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    better = world.ask("better", x_llm_d_inference_objective="chat")
    evicted = await first
    assert isinstance(evicted, Rejected)
    assert (evicted.status, evicted.reason) == (429, "evicted-queue-pressure")
    world.room.close()
    await better


async def test_the_time_limit_is_429_and_says_so() -> None:
    world = World("{maxWait: 100ms}")
    await world.occupied()
    answer = await world.ask("r")
    assert isinstance(answer, Rejected)
    assert (answer.status, answer.reason) == (429, "rejected-ttl-expired")
    assert "0.1 s" in answer.message
    assert world.waits("rejected-ttl-expired") == 1


async def test_who_is_turned_away_is_explained() -> None:
    world = World("{maxRequests: 1, maxWait: 200ms}")
    log = world.path.decisions = DecisionLog(world.fleet, lambda _: exact(0.0))
    log.pricing = world.config.pricing
    await world.occupied()
    late = world.ask("late", x_warmroute_explain="1")
    await world.waiting(1)
    full = await world.ask("full", x_warmroute_explain="1")
    for name, answer, reason in (("full", full, "rejected-saturated"), ("late", await late, "rejected-ttl-expired")):
        assert isinstance(answer, Rejected)
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        kept = log.find(name)
        assert kept is not None
        told = kept.told()
        assert (told["rejected"]["status"], told["rejected"]["reason"]) == (429, reason)
        [candidate] = told["profiles"]["default"]["candidates"]
        assert candidate["work"]["backlog_s"] > 0.3
        assert json.loads(answer.headers["x-warmroute-explain"])["profiles"] == told["profiles"]


async def test_who_cannot_be_explained_is_turned_away_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("{maxWait: 100ms}")
    world.path.decisions = DecisionLog(world.fleet, lambda _: exact(0.0))
    await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    monkeypatch.setattr(world.path.scheduler, "schedule", broken_schedule)
    monkeypatch.setattr(world.room.queue, "longest_unseen", lambda _: [])
    async with asyncio.timeout(5):
        answer = await request
    assert isinstance(answer, Rejected)
    assert answer.reason == "rejected-ttl-expired"


async def test_shutting_down_answers_who_waits_and_lets_through_who_need_not() -> None:
    world = World(endpoints=1)
    running = await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    world.room.close()
    answer = await request
    assert isinstance(answer, Rejected)
    assert (answer.status, answer.reason) == (503, "rejected-shutting-down")
    late = await world.ask("late")
    assert isinstance(late, Rejected)
    assert late.status == 503
    first_token(running)
    assert isinstance(await world.ask("room again"), Decided)


async def test_higher_objectives_leave_first() -> None:
    world = World()
    world.fleet.scraped_at[0] = np.inf  # where scrapes are stale `batch` would be turned away at once
    running = await world.occupied()
    order: list[str] = []
    tasks = []
    for name, objective in (("a", "batch"), ("b", "unknown"), ("c", "chat")):
        task = world.ask(name, x_gateway_inference_objective=objective)
        task.add_done_callback(lambda done: order.append(done.get_name()))
        tasks.append(task)
        await world.waiting(len(tasks))
    first_token(running)
    await asyncio.gather(*tasks)
    assert order == ["c", "b", "a"]


async def test_requests_of_unknown_length_do_not_wait() -> None:
    world = World()
    await world.occupied()
    head = Head(method="GET", path="/v1/models", headers={}, request_id="r")
    assert isinstance(await world.path.decide(head, b""), Decided)


async def test_two_requests_with_one_id_are_two_requests() -> None:
    world = World()
    running = await world.occupied()
    twins = [world.ask("same"), world.ask("same")]
    await world.waiting(2)
    first_token(running)
    assert all(isinstance(answer, Decided) for answer in await asyncio.gather(*twins))


async def test_a_reload_without_queue_lets_everybody_go_and_one_with_a_queue_keeps_them() -> None:
    world = World()
    await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    world.room.use(world.config.work_queue(world.fleet))
    await asyncio.sleep(0.1)
    assert not request.done()
    world.room.use(None)
    assert isinstance(await request, Decided)


async def test_an_endpoint_that_comes_takes_who_waits() -> None:
    world = World()
    await world.occupied()
    request = world.ask("r", LONG, start=1_000_000)
    await world.waiting(1)
    slot = world.fleet.add(Endpoint(name="new", address="10.0.0.9:8000"))
    async with asyncio.timeout(1):
        answer = await request
    assert isinstance(answer, Decided)
    assert world.fleet.slot_of(answer.destination[0]) == slot


async def test_a_queue_that_fails_keeps_nobody(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    world = World()
    await world.occupied()
    request = world.ask("r")
    await world.waiting(1)

    def broken(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(WorkQueue, "next", broken)
    async with asyncio.timeout(1):
        assert isinstance(await request, Decided)
    assert "queue_failed" in caplog.text


async def test_it_goes_where_its_prefix_is_when_it_leaves_not_when_it_came() -> None:
    world = World(endpoints=2)
    long = [await world.ask("long-0", LONG), await world.ask("other", 1)]
    assert all(isinstance(answer, Decided) for answer in long)
    slots = [world.fleet.slot_of(answer.destination[0]) for answer in long if isinstance(answer, Decided)]
    busy, free = slots
    assert busy != free
    request = world.ask("r", LONG)  # its beginning is being computed on the busy endpoint
    await world.waiting(1)
    world.index.add(int(free or 0), GPU, block_keys(root_key("m"), np.arange(LONG, dtype=np.uint32), 16))
    async with asyncio.timeout(1):
        answer = await request
    assert isinstance(answer, Decided)
    assert world.fleet.slot_of(answer.destination[0]) == free


async def test_a_client_that_goes_away_in_the_moment_of_a_reload_leaves_nothing_behind() -> None:
    world = World()
    await world.occupied()
    gone, other = world.ask("gone"), world.ask("other")
    await world.waiting(2)
    gone.cancel()  # its future is cancelled, and its decide has not run since
    world.room.use(None)
    async with asyncio.timeout(1):
        assert isinstance(await other, Decided)
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    assert "gone" not in world.books
    assert world.waits("cancelled") == 1


@pytest.mark.parametrize("queue", [True, False])
async def test_a_request_that_fails_in_a_reload_fails_alone(queue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    running = await world.occupied()
    broken, other = world.ask("broken"), world.ask("other")
    await world.waiting(2)
    schedule = world.path.scheduler.schedule

    def failing(request: Any, *rest: Any, **more: Any) -> Any:
        if request.id == "broken":
            raise RuntimeError("a handler of somebody else's")
        return schedule(request, *rest, **more)

    monkeypatch.setattr(world.path.scheduler, "schedule", failing)
    world.room.use(world.config.work_queue(world.fleet) if queue else None)
    with pytest.raises(RuntimeError):
        await broken
    first_token(running)
    async with asyncio.timeout(1):
        assert isinstance(await other, Decided)
    assert "broken" not in world.books


async def test_reloads_do_not_start_the_time_limit_again() -> None:
    world = World("{maxWait: 200ms}")
    await world.occupied()
    request = world.ask("r")
    await world.waiting(1)
    async with asyncio.timeout(2):
        while not request.done():
            await asyncio.sleep(0.05)
            world.room.use(world.config.work_queue(world.fleet))
    answer = await request
    assert isinstance(answer, Rejected)
    assert answer.reason == "rejected-ttl-expired"
