"""Whatever happens to requests, endpoints and configuration, in the end nothing is left in the books, the queue or a window."""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.books import Books, Sums
from fleet.breaker import Breaker, BreakerSettings
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.config import LoadedConfig, load_text
from gateway.config_document import Handoff, Model
from gateway.departure import Departures
from gateway.extproc.decision import Decided, Head, Rejected
from gateway.handoff import Handoffs
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.prefill_leg import LegFailed, PrefillLegs
from gateway.prefill_progress import PrefillProgress
from gateway.producer_wiring import bursts_of, producers_of
from gateway.producers import Producers
from gateway.request_path import RequestPath, Settings
from gateway.served_models import ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Understanding
from gateway.waiting_room import WaitingRoom
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Trust, exact
from tokenization.tokenized import Tokenized

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
SCORED = "- {type: expected-work-scorer, parameters: {a: 1.0e-5}}\n- {type: precise-prefix-cache-producer}\n"
QUEUED = "- {type: expected-work-queue, parameters: {openThreshold: 5ms, maxWait: 60ms, maxRequests: 6, %s}}\n"
STAGES = """\
- {type: decode-filter}
- {type: prefill-filter}
- {type: encode-filter}
- {type: %s}
- {type: always-disagg-multimodal-decider}
- type: disagg-profile-handler
  parameters: {deciders: {prefill: %s, encode: always-disagg-multimodal-decider}}
"""
PROFILES = """\
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: expected-work-scorer}]}
- {name: encode, plugins: [{pluginRef: encode-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: expected-work-scorer}]}
"""
BURST = """\
- {type: burst-prefix-cache-producer, parameters: {windowDurationMs: 5, blockSizeTokens: 16}}
- {type: approx-prefix-cache-producer}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}
"""
CONFIGS = [
    load_text(HEAD + "plugins:\n" + text)
    for text in (
        SCORED,
        SCORED + QUEUED % "order: shortest",
        SCORED + QUEUED % "fairness: false" + BURST,
        SCORED + QUEUED % "kvLimit: 0.5" + STAGES % (("always-disagg-pd-decider",) * 2) + PROFILES,
        SCORED + BURST + STAGES % (("cost-pd-decider",) * 2) + PROFILES,
    )
]
ROLES = ("decode", "prefill", "encode", "both", "encode-prefill", "")
USABLE = b'{"kv_transfer_params": {"do_remote_prefill": true}}'
COLUMNS = (*Sums.__struct_fields__, "oldest_tokens", "oldest_square", "oldest_left_tokens", "oldest_left_square")


class Prompts:
    async def tokenize(
        self, path: str, body: Mapping[str, Any], *, size: int | None = None, engine_model: str | None = None
    ) -> Tokenized:
        ids = np.arange(body["start"], body["start"] + body["n"], dtype=np.uint32)
        return Tokenized(token_ids=ids, media=("image",) if body["image"] else ())


class Legs(PrefillLegs):
    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    async def send(self, *args: Any, **more: Any) -> bytes:
        await asyncio.sleep(self._rng.choice([0, 0.001, 0.01]))
        if len(args) > 4:
            args[4].set()  # SGLang: it is on its way
            await asyncio.sleep(0.001)
        match self._rng.randrange(6):
            case 0:
                raise LegFailed("connect", "x")
            case 1:
                raise LegFailed("server_error", "x", 500)
            case 2:
                raise RuntimeError("nobody expects this")
            case 3:
                return b"garbage"
            case _:
                return USABLE


class Streams:
    def block_tokens(self, slot: int) -> int:
        return 16

    def trust(self, slot: int) -> Trust:
        return exact(0.0)


class Ignored:
    def confirmed(self, *_: Any) -> None:
        pass


class World:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.fleet = Fleet(capacity=4)
        self.numbers = itertools.count()
        self.removed: list[int] = []
        for _ in range(4):
            self.come()
        self.books = Books(self.fleet, idle_timeout_s=1000.0)
        self.metrics = Metrics(CollectorRegistry())
        self.index = Index()
        self.breaker = Breaker(self.fleet, BreakerSettings(failures=3, open_s=0.01))
        self.room = WaitingRoom(self.fleet, self.metrics)
        self.books.when_freed.append(self.room.freed)
        self.departures = Departures(self.metrics)
        self.legs = Legs(rng)
        models = ServedModels({"m": Model()}, self.fleet)
        self.path = RequestPath(
            fleet=self.fleet,
            books=self.books,
            breaker=self.breaker,
            models=models,
            matcher=Matcher(self.fleet, self.index, Streams()),
            scheduler=CONFIGS[0].scheduler(self.fleet),
            producers=Producers(),
            understanding=Understanding(models, lambda _: Prompts(), 5.0, self.metrics, NoTracing(), self.fleet.clock),
            accuracy=Ignored(),
            trust=lambda _: exact(0.0),
            metrics=self.metrics,
            tracing=NoTracing(),
            settings=Settings(objectives={"low": -1, "high": 5}, response_headers=True),
            departures=self.departures,
            room=self.room,
        )
        self.progress = PrefillProgress(
            self.fleet, self.books, lambda slot, key: self.index.tier_of(slot, key) is not None, lambda _: 16
        )
        self.reload()
        self.asked: set[asyncio.Task[Decided | Rejected]] = set()
        self.running: list[tuple[Decided, bool]] = []
        self.outcomes: set[str] = set()

    # What happens

    def come(self) -> None:
        number = next(self.numbers)
        labels = {"llm-d.ai/role": role} if (role := self.rng.choice(ROLES)) else {}
        slot = self.fleet.add(
            Endpoint(name=f"e{number}", address=f"10.0.{number // 250}.{number % 250}:80", labels=labels)
        )
        self.fleet.kv_capacity_tokens[slot] = self.rng.choice([0, 2_000, 100_000])

    def go(self) -> None:
        if len(self.fleet.slots()) > 1:
            slot = int(self.rng.choice(self.fleet.slots()))
            self.fleet.remove(slot)
            self.removed.append(slot)

    def release(self) -> None:
        if self.removed:
            self.fleet.release(self.removed.pop())

    def reload(self) -> None:
        config: LoadedConfig = self.rng.choice(CONFIGS)
        self.path.scheduler = config.scheduler(self.fleet)
        retired = self.path.producers
        made = producers_of(config, self.fleet)
        self.path.producers = Producers(
            precise=made.precise,
            approximate=made.approximate,
            default=made.default,
            bursts=bursts_of(config, self.fleet, self.metrics),
        )
        retired.close()
        self.progress.scorer = config.pricing
        self.room.use(config.work_queue(self.fleet))
        connector = self.rng.choice([None, "nixl", "sglang"])
        self.departures.handoffs = None
        if connector is not None:
            handoff = Handoff(mode="gateway", connector=connector, timeout=0.05)
            self.departures.handoffs = Handoffs(
                handoff, self.legs, self.fleet, self.books, self.breaker, self.metrics, self.fleet.clock
            )

    def ask(self) -> None:
        rng = self.rng
        body = {
            "model": "m",
            "prompt": "x",
            "n": rng.choice([0, 1, 15, 200, 900, 3000]),
            "start": rng.choice([0, 0, 5000]),
            "image": rng.random() < 0.3,
            "stream": rng.random() < 0.5,
            "max_tokens": rng.choice([1, 50, 10_000]),
        }
        headers = {
            "content-type": "application/json",
            "x-llm-d-inference-objective": rng.choice(["low", "", "high"]),
            "x-llm-d-inference-fairness-id": rng.choice("abc"),
            **({"prefer": "if-available"} if rng.random() < 0.05 else {}),
        }
        head = Head(method="POST", path="/v1/completions", headers=headers, request_id=f"r{rng.randrange(40)}")
        self.asked.add(asyncio.create_task(self.path.decide(head, json.dumps(body).encode())))

    def cancel(self) -> None:
        if self.asked:
            self.rng.choice(sorted(self.asked, key=id)).cancel()

    def collect(self) -> None:
        for task in [task for task in self.asked if task.done()]:
            self.asked.discard(task)
            if task.cancelled():
                self.outcomes.add("cancelled")
                continue
            answer = task.result()
            self.outcomes.add("decided" if isinstance(answer, Decided) else str(answer.status))
            if isinstance(answer, Decided):
                self.running.append((answer, False))

    def respond(self) -> None:
        if not self.running:
            return
        answer, begun = self.running.pop(self.rng.randrange(len(self.running)))
        observer = answer.observer
        assert observer is not None
        if not begun and self.rng.random() < 0.8:
            served = self.rng.choice([None, *answer.destination, "10.9.9.9:80"])
            kind = self.rng.choice(["text/event-stream", "application/json"])
            observer.response_headers(self.rng.choice([200, 200, 200, 429, 503]), {"content-type": kind}, served)
            begun = True
        match self.rng.randrange(4):
            case 0 | 1 if begun:
                observer.response_chunk(b'data: {"choices":[{"text":"x"}]}\n\n')
                self.running.append((answer, begun))
            case 2:
                observer.aborted("ended-during-response" if begun else "ended-before-response")
            case _:
                observer.finished()

    def store(self) -> None:
        for slot, oldest in [(slot, self.books.oldest(slot)) for slot in self.books.computing()]:
            if oldest is not None and len(oldest.keys) and slot in self.fleet:
                self.index.add(slot, GPU, list(oldest.keys[: self.rng.randint(1, len(oldest.keys))]))

    def housekeeping(self) -> None:
        now = time.monotonic()
        self.breaker.tick(now)
        self.progress.tick(now)
        match self.rng.randrange(6):
            case 0:
                self.books.expire(now + 2000.0)
            case 1:
                self.books.reconcile(int(self.rng.choice(self.fleet.slots())), 0, now + 2000.0)
            case 2:
                slots = self.fleet.slots().tolist()
                self.books.feed("peer", {slot: Sums(in_flight=1, awaiting=1, in_flight_tokens=500) for slot in slots})

    async def live(self, steps: int) -> None:
        rng, fleet = self.rng, self.fleet
        happens = (self.ask, self.respond, self.cancel, self.housekeeping, self.store, self.come, self.go, self.release)
        for _ in range(steps):
            rng.choices((*happens, self.reload), (12, 12, 2, 2, 2, 0.5, 0.5, 0.5, 0.3))[0]()
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.004]))
            self.collect()
            for name in COLUMNS:
                assert (getattr(fleet, name) >= 0).all(), name

    async def end(self) -> None:
        for task in self.asked:
            if self.rng.random() < 0.5:
                task.cancel()
        for task in list(self.asked):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(task), 5.0)
        self.collect()
        while self.running:
            self.respond()
        self.books.feed("peer", {})


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_left_behind(seed: int) -> None:
    world = World(seed)
    await world.live(500)
    await world.end()
    assert {"decided", "cancelled"} <= world.outcomes
    left = {name: getattr(world.fleet, name)[getattr(world.fleet, name) != 0].tolist() for name in COLUMNS}
    assert left == {name: [] for name in COLUMNS}
    assert (len(world.books), world.books.computing(), len(world.fleet.pending)) == (0, [], 0)
    assert not world.room._guests
    assert not len(world.room.queue or ())
    assert world.metrics.registry.get_sample_value("warmroute_burst_waiting") == 0
