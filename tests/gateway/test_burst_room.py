"""A burst producer in the request path: llm-d's sample configuration over endpoints in memory, and everything that can
happen to a request while its window is open."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway import burst_room
from gateway.config import LoadedConfig, load_text
from gateway.config_document import Model
from gateway.decision_log import DecisionLog
from gateway.explain import explanation_text
from gateway.extproc.decision import Decided, Head, Rejected
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producer_wiring import bursts_of, producers_of
from gateway.request_path import RequestPath, Settings
from gateway.served_models import Served, ServedModels
from gateway.tracing import NoTracing
from gateway.understanding import Understanding
from indexer.index import Index
from indexer.trust import Trust, exact
from simulator.engine import Engine
from simulator.engine_settings import EngineSettings
from simulator.hash_chain import HashRecipe
from simulator.sequence import Submission
from tokenization.errors import TokenizationError
from tokenization.tokenized import Tokenized

SAMPLE = (Path(__file__).parent.parent / "data" / "llmd" / "epp-burst-prefix-cache-config.yaml").read_text()
NAME = "burst-prefix-cache-producer"
BLOCK = 64
PD = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: burst-prefix-cache-producer, parameters: {windowDurationMs: 30}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: burst-prefix-cache-producer}}
- {type: prefill-filter}
- {type: decode-filter}
- {type: queue-scorer}
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- name: prefill
  plugins: [{pluginRef: prefill-filter}, {pluginRef: prefix-cache-scorer}]
- name: decode
  plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}]
"""


class Words:
    """`prompt` is a list of words of 64 tokens each, then `tail` tokens that nobody else has."""

    async def tokenize(self, path: str, body: Mapping[str, Any], **_: object) -> Tokenized:
        if body["prompt"] == "broken":
            raise TokenizationError("no", reason="broken")
        return Tokenized(token_ids=np.array(self.ids(body["prompt"], body["tail"]), np.uint32))

    @staticmethod
    def ids(words: Sequence[int], tail: int) -> list[int]:
        return [*(number for word in words for number in range(word * BLOCK, (word + 1) * BLOCK)), *range(tail)]


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
    """The gateway's request path with real time and no sockets. Nothing is ever answered: what is sent stays in flight."""

    def __init__(self, config: str = SAMPLE, endpoints: int = 4, roles: tuple[str, ...] = ()) -> None:
        self.fleet = Fleet()
        for number in range(endpoints):
            labels = {"llm-d.ai/role": roles[number]} if roles else {}
            self.fleet.add(Endpoint(name=f"e{number}", address=f"10.0.0.{number}:8000", labels=labels))
        self.books = Books(self.fleet)
        self.metrics = Metrics(CollectorRegistry())
        models = ServedModels({"m": Model()}, self.fleet)
        self.tokenizer = Words()
        self.config = load_text(config)
        self.path = RequestPath(
            fleet=self.fleet,
            books=self.books,
            breaker=Breaker(self.fleet),
            models=models,
            matcher=Matcher(self.fleet, Index(), Streams()),
            scheduler=self.config.scheduler(self.fleet),
            producers=self.producers(self.config),
            understanding=Understanding(models, self._tokenizer, 5.0, self.metrics, NoTracing(), self.fleet.clock),
            accuracy=Ignored(),
            trust=lambda _: exact(0.0),
            metrics=self.metrics,
            tracing=NoTracing(),
            settings=Settings(),
        )
        self.path.decisions = DecisionLog(self.fleet, lambda _: exact(0.0))

    def _tokenizer(self, _: Served) -> Words:
        return self.tokenizer

    def producers(self, config: LoadedConfig) -> Any:
        bursts = bursts_of(config, self.fleet, self.metrics)
        return msgspec.structs.replace(producers_of(config, self.fleet), bursts=bursts)

    @property
    def room(self) -> burst_room.BurstRoom:
        return self.path.producers.bursts[NAME]

    def ask(self, name: str, *words: int, tail: int = 1, **changes: Any) -> "asyncio.Task[Decided | Rejected]":
        fields: dict[str, Any] = {
            "method": "POST",
            "path": "/v1/completions",
            "headers": {"content-type": "application/json"},
            "request_id": name,
        }
        body = json.dumps({"model": "m", "prompt": changes.pop("prompt", words), "tail": tail, "stream": True}).encode()
        return asyncio.create_task(self.path.decide(Head(**{**fields, **changes}), body), name=name)

    def waiting(self) -> float:
        return self.sample("burst_waiting")

    def group_sizes(self, which: str) -> tuple[float, float]:
        """Requests that were placed, and the mean size of their groups."""
        count, total = (self.sample(f"burst_group_requests_{part}", which=which) for part in ("count", "sum"))
        return count, total / count if count else 0.0

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(5):
            while self.waiting() != count:  # noqa: ASYNC110 - a gauge tells nobody
                await asyncio.sleep(0.001)

    def sample(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"warmroute_{metric}", labels) or 0.0

    def told(self, name: str) -> dict[str, Any]:
        assert self.path.decisions is not None
        kept = self.path.decisions.find(name)
        assert kept is not None
        return kept.told()


def sample(**parameters: Any) -> str:
    """llm-d's sample with other parameters of the producer."""
    before, rest = SAMPLE.split("    windowDurationMs: 100\n    maxPerReplica: -1\n    minColocateBlocks: 0\n")
    given = {"windowDurationMs": 60, **parameters}
    return before + "".join(f"    {key}: {value}\n" for key, value in given.items()) + rest


def two_producers() -> str:
    other = f"- {{name: other, type: {NAME}, parameters: {{windowDurationMs: 300}}}}\n"
    reader = "- {name: second, type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: other}}\n"
    text = sample(windowDurationMs=300).replace(
        "- type: load-aware-scorer\n", f"{other}{reader}- type: load-aware-scorer\n"
    )
    return text.replace("  - pluginRef: decode-filter\n", "  - pluginRef: decode-filter\n  - pluginRef: second\n")


async def where(*asked: "asyncio.Task[Decided | Rejected]") -> list[str]:
    async with asyncio.timeout(15):
        answers = await asyncio.gather(*asked)
    assert all(isinstance(answer, Decided) for answer in answers)
    return [answer.destination[0] for answer in answers if isinstance(answer, Decided)]


def endpoints_per_group(went: Mapping[str, str]) -> dict[str, int]:
    return {group: len({at for name, at in went.items() if name[0] == group}) for group in "0123"}


async def burst(world: World) -> dict[str, str]:
    """Four groups of eight rollouts of one prompt, shuffled, in one moment: name -> where it went."""
    names = [f"{group}-{number}" for group in range(4) for number in range(8)]
    random.Random(7).shuffle(names)
    asked = [world.ask(name, 9, int(name[0]) + 10) for name in names]
    return dict(zip(names, await where(*asked), strict=True))


def computed_tokens(went: Mapping[str, str]) -> int:
    """Prompt tokens that four engines compute for a burst, all of it in their queues at once."""
    recipe = HashRecipe.of("sha256_cbor", "0", 16)
    engines = {at: Engine(EngineSettings(recipe=recipe)) for at in sorted(set(went.values()))}
    for name, at in went.items():
        prompt = Words.ids([9, int(name[0]) + 10], tail=1)
        engines[at].submit(Submission(id=name, prompt=prompt, reply=[1]), 0.0)
    for engine in engines.values():
        while (step := engine.begin_step(0.0)) is not None:
            engine.finish_step(step)
    return sum(engine.counters.computed_prompt for engine in engines.values())


# The sample configuration, end to end


async def test_llm_ds_sample_sends_each_group_of_a_burst_to_one_endpoint() -> None:
    world = World()
    went = await burst(world)
    assert endpoints_per_group(went) == dict.fromkeys("0123", 1)
    assert Counter(went.values()) == {f"10.0.0.{number}:8000": 8 for number in range(4)}
    assert world.sample("burst_window_requests_count", ended="time") == 1
    assert world.sample("burst_window_requests_sum", ended="time") == 32
    assert world.sample("burst_wait_seconds_count", outcome="colocated") == 32
    assert world.sample("burst_assigned_total", followed="yes") == 32
    assert world.group_sizes("alike") == world.group_sizes("together") == (32, 8)
    assert world.waiting() == 0
    assert computed_tokens(went) == 4 * (2 * BLOCK + 1) + 28, "each prompt once, and the last token of its 28 siblings"


async def test_without_the_producer_the_same_burst_is_spread() -> None:
    begin, end = SAMPLE.index("- type: burst-prefix-cache-producer"), SAMPLE.index("- type: load-aware-scorer")
    without = SAMPLE[:begin] + SAMPLE[end:].replace("  - pluginRef: prefix-cache-scorer\n    weight: 2.0\n", "")
    world = World(without)
    assert not world.path.producers.bursts
    went = await burst(world)
    assert min(endpoints_per_group(went).values()) > 1
    assert computed_tokens(went) > 2 * (4 * (2 * BLOCK + 1) + 28)
    assert world.sample("decision_step_seconds_count", step="schedule") == 32, "nobody is looked at twice"


async def test_a_request_waits_as_long_as_its_window_and_no_longer() -> None:
    world = World()
    loop = asyncio.get_running_loop()
    started = loop.time()
    first = world.ask("first", 1)
    await asyncio.sleep(0.05)
    second = world.ask("second", 1)
    assert len(set(await where(first, second))) == 1
    assert 0.09 < loop.time() - started < 0.6, "100 ms, with room for a slow machine"
    told = world.told("second")["bursts"][NAME]
    assert told["waited_s"] < world.told("first")["bursts"][NAME]["waited_s"]


# What must not be held


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": []},
        {"prompt": "broken"},
        {"path": "/v1/models", "method": "GET"},
        {"subset": ("10.0.0.2:8000",)},
    ],
    ids=["no full block", "not tokenized", "no prompt", "no choice"],
)
async def test_what_a_window_cannot_help_is_not_held(changes: dict[str, Any]) -> None:
    world = World(sample(windowDurationMs=10000))
    await where(world.ask("r", 1, **changes))
    assert sum(world.sample("burst_wait_seconds_count", outcome=outcome) for outcome in ("alone", "colocated")) == 0


async def test_a_request_that_is_refused_is_refused_at_once() -> None:
    world = World(sample(windowDurationMs=10000))
    async with asyncio.timeout(5):
        answer = await world.ask("r", 1, headers={"content-type": "application/json", "prefer": "if-available"})
    assert isinstance(answer, Rejected)
    assert answer.status == 412


async def test_a_producer_that_no_profile_reads_holds_nobody_and_is_warned_about() -> None:
    unread = sample(windowDurationMs=10000).replace("  - pluginRef: prefix-cache-scorer\n    weight: 2.0\n", "")
    world = World(unread)
    assert any("nothing reads 'burst-prefix-cache-producer'" in str(warning) for warning in world.config.warnings)
    assert not world.path.producers.bursts
    await where(world.ask("r", 1))


# While the window is open


async def test_a_client_that_goes_away_is_in_no_group_and_leaves_nothing_behind() -> None:
    world = World(sample())
    stays, goes = world.ask("stays", 1), world.ask("goes", 1)
    await world.until_waiting(2)
    goes.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await goes
    assert world.waiting() == 1
    await where(stays)
    assert world.told("stays")["bursts"][NAME]["why"] == "alone"
    assert world.group_sizes("alike") == (0, 0), "who was not placed is in no group"
    assert world.sample("burst_wait_seconds_count", outcome="cancelled") == 1
    assert len(world.books) == 1


async def test_a_client_that_goes_away_as_the_window_ends_is_nobodys_company() -> None:
    """Cancelled, and its task has not run again when the window is placed."""
    world = World(sample(maxBatchSize=3))
    stays, goes = world.ask("stays", 1), world.ask("goes", 1)
    await world.until_waiting(2)
    last = world.ask("last", 2)
    goes.cancel()
    await where(stays, last)
    assert world.told("stays")["bursts"][NAME]["group"] == 1


async def test_when_everybody_has_left_the_next_request_gets_a_whole_window() -> None:
    world = World(sample(windowDurationMs=120))
    goes = world.ask("goes", 1)
    await world.until_waiting(1)
    await asyncio.sleep(0.06)
    goes.cancel()
    await asyncio.sleep(0)
    await where(world.ask("next", 1))
    assert world.told("next")["bursts"][NAME]["waited_s"] > 0.1


async def test_an_endpoint_that_goes_away_gets_nothing_and_one_that_comes_waits_for_the_next_window() -> None:
    world = World(sample(), endpoints=2)
    asked = [world.ask(str(number), 1) for number in range(4)]
    await world.until_waiting(4)
    world.fleet.remove(0)
    world.fleet.release(0)
    assert world.fleet.add(Endpoint(name="new", address="10.0.0.9:8000")) == 0, "the slot means somebody else now"
    assert set(await where(*asked)) == {"10.0.0.1:8000"}


async def test_an_endpoint_that_stops_taking_requests_is_left_out() -> None:
    world = World(sample(), endpoints=5)
    asked = [world.ask(str(number), 1) for number in range(4)]
    await world.until_waiting(4)
    world.fleet.healthy[0], world.fleet.draining[1], world.fleet.tripped[2] = False, True, True
    went = set(await where(*asked))
    assert len(went) == 1
    assert went < {"10.0.0.3:8000", "10.0.0.4:8000"}


async def test_a_fleet_that_is_gone_when_the_window_ends_is_an_answer() -> None:
    world = World(sample(), endpoints=2)
    asked = [world.ask(str(number), 1) for number in range(2)]
    await world.until_waiting(2)
    world.fleet.remove(0)
    world.fleet.remove(1)
    answers = await asyncio.gather(*asked)
    assert [answer.status for answer in answers if isinstance(answer, Rejected)] == [503, 503]
    assert world.sample("burst_wait_seconds_count", outcome="no_endpoint") == 2


async def test_an_endpoint_that_goes_away_after_the_placement_is_no_match_for_its_successor() -> None:
    world = World(sample())
    await where(*[world.ask(str(number), 1) for number in range(2)])
    assigned = burst_room.Assigned(
        slot=0, address="10.0.0.0:8000", rank=0, why="colocated", group=2, together=2, window=2, waited_s=0.1
    )
    assert world.room.match([1, 2], assigned).tokens[0] == 2 * BLOCK
    world.fleet.remove(0)
    world.fleet.release(0)
    world.fleet.add(Endpoint(name="new", address="10.0.0.9:8000"))
    assert world.room.match([1, 2], assigned).tokens.max() == 0


async def test_a_subset_hint_holds_for_the_members_that_have_it() -> None:
    world = World(sample())
    hinted = world.ask("hinted", 1, subset=("10.0.0.1:8000", "10.0.0.3:8000"))
    others = [world.ask(str(number), 1) for number in range(5)]
    went = await where(hinted, *others)
    assert len(set(went)) == 1
    assert went[0] in ("10.0.0.1:8000", "10.0.0.3:8000"), "the endpoint that all of them may use"


async def test_a_full_window_ends_early() -> None:
    world = World(sample(windowDurationMs=10000, maxBatchSize=4))
    await where(*[world.ask(str(number), 1) for number in range(8)])
    assert world.sample("burst_window_requests_count", ended="full") == 2


@pytest.mark.parametrize("size", [1, -1])
async def test_the_smallest_and_no_batch_size(size: int) -> None:
    world = World(sample(maxBatchSize=size))
    await where(*[world.ask(str(number), 1) for number in range(5)])
    assert world.sample("burst_window_requests_sum", ended="full" if size == 1 else "time") == 5


async def test_a_shutdown_ends_the_window_and_nobody_is_held_any_more() -> None:
    world = World(sample(windowDurationMs=10000))
    asked = [world.ask(str(number), 1) for number in range(3)]
    await world.until_waiting(3)
    world.path.producers.close()
    assert len(set(await where(*asked))) == 1, "placed together all the same"
    assert world.sample("burst_window_requests_count", ended="closed") == 1
    await where(world.ask("late", 1))
    assert "bursts" not in world.told("late")


async def test_a_reload_ends_the_window_and_the_new_producer_begins_its_own() -> None:
    world = World(sample(windowDurationMs=10000))
    asked = [world.ask(str(number), 1) for number in range(3)]
    await world.until_waiting(3)
    old = world.path.producers
    world.path.producers = world.producers(load_text(sample(windowDurationMs=20, blockSizeTokens=32)))
    old.close()
    await where(*asked)
    await where(world.ask("a", 1), world.ask("b", 1))
    assert world.sample("burst_window_requests_count", ended="time") == 1


async def test_a_placement_that_fails_costs_the_match_and_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(burst_room, "place", broken)
    world = World(sample())
    await where(*[world.ask(str(number), 1) for number in range(3)])
    assert world.sample("burst_wait_seconds_count", outcome="failed") == 3
    assert world.sample("plugin_errors_total", plugin=NAME) == 1


async def test_a_window_that_closes_between_two_producers_is_an_answer_too() -> None:
    """Two windows are waited for in tasks of their own, which begin a moment later."""
    world = World(two_producers())
    asked = world.ask("r", 1)
    await asyncio.sleep(0)  # both are asked, neither is entered
    world.path.producers.close()
    await where(asked)
    assert world.waiting() == 0


async def test_behind_the_window_the_router_queue_is_as_it_was() -> None:
    queue = "- {type: expected-work-scorer}\n- {type: expected-work-queue}\n- type: load-aware-scorer\n"
    world = World(sample().replace("- type: load-aware-scorer\n", queue), endpoints=2)
    world.path.room.use(world.config.work_queue(world.fleet))
    asked = [world.ask(str(number), 1) for number in range(4)]
    await world.until_waiting(4)
    for slot in range(2):  # a prefill of 100,000 tokens runs on each: nobody has room
        world.books.reserve(f"long{slot}", slot, 100_000.0, 100, world.fleet.clock())
    async with asyncio.timeout(5):
        while world.sample("queue_waiting") != 4:  # noqa: ASYNC110 - a gauge tells nobody
            await asyncio.sleep(0.001)
    asked.pop().cancel()
    for slot in range(2):
        world.books.finish(f"long{slot}", world.fleet.clock())
    world.path.room.freed()
    assert len(set(await where(*asked))) == 1
    assert world.sample("queue_wait_seconds_count", outcome="sent") == 3


# The parameters


async def test_the_windows_of_two_producers_run_side_by_side() -> None:
    world = World(two_producers())
    started = asyncio.get_running_loop().time()
    await where(*[world.ask(str(number), 1) for number in range(2)])
    assert asyncio.get_running_loop().time() - started < 0.55, "300 ms each"
    assert {name: it["together"] for name, it in world.told("0")["bursts"].items()} == {NAME: 2, "other": 2}


async def test_max_per_replica_splits_a_group() -> None:
    world = World(sample(maxPerReplica=3))
    went = Counter(await where(*[world.ask(str(number), 1) for number in range(9)]))
    assert sorted(went.values()) == [3, 3, 3]
    assert (world.group_sizes("alike"), world.group_sizes("together")) == ((9, 9), (9, 3))


async def test_prompts_are_alike_up_to_the_longest_prefix_that_is_looked_at() -> None:
    asked = [(1, 2, 3), (1, 2, 4), (1, 2, 5)]
    for most, together in ((128, 3), (0, 0)):
        world = World(sample(maxPrefixTokensToMatch=most))
        await where(*[world.ask(str(number), *words) for number, words in enumerate(asked)])
        assert world.told("0")["bursts"][NAME]["together"] == together


async def test_min_colocate_blocks_brings_different_prompts_with_one_beginning_together() -> None:
    world = World(sample(minColocateBlocks=2))
    asked = [(family, family, number) for number in range(4) for family in (20, 30, 40, 50)]
    went = await where(*[world.ask(str(number), *words) for number, words in enumerate(asked)])
    by_family = [
        {at for at, words in zip(went, asked, strict=True) if words[0] == family} for family in (20, 30, 40, 50)
    ]
    assert [len(at) for at in by_family] == [1, 1, 1, 1]
    assert len(set.union(*by_family)) == 4


async def test_what_is_in_flight_counts_in_the_balance() -> None:
    world = World(sample(), endpoints=2)
    for number in range(5):
        world.books.reserve(f"busy{number}", 0, 1000.0, 100, world.fleet.clock())
    await where(*[world.ask(f"{group}{number}", group) for group in (1, 2) for number in range(2)])
    assert {world.told(name)["bursts"][NAME]["assigned"] for name in ("10", "20")} == {"10.0.0.1:8000"}


async def test_balance_by_tokens_reads_the_tokens_in_the_books() -> None:
    world = World(sample(balanceBy="tokens"), endpoints=2)
    world.books.reserve("long", 0, 100_000.0, 100, world.fleet.clock())
    for number in range(5):
        world.books.reserve(f"short{number}", 1, 10.0, 100, world.fleet.clock())
    await where(*[world.ask(str(number), 1) for number in range(2)])
    assert world.told("0")["bursts"][NAME]["assigned"] == "10.0.0.1:8000"


async def test_with_a_hand_off_the_group_goes_where_prompts_are_computed() -> None:
    world = World(PD, roles=("prefill", "prefill", "decode", "decode"))
    await where(*[world.ask(str(number), 1) for number in range(6)])
    told = [world.told(str(number)) for number in range(6)]
    assert len({it["prefill"] for it in told}) == 1
    assert {it["bursts"][NAME]["assigned"] for it in told} < {"10.0.0.0:8000", "10.0.0.1:8000"}


# Saying so


async def test_the_explanation_names_the_assignment() -> None:
    world = World(sample())
    went = await where(*[world.ask(str(number), 1) for number in range(3)], world.ask("other", 2))
    told = world.told("0")
    said = told["bursts"][NAME]
    assert (said["assigned"], said["why"]) == (went[0], "colocated")
    assert (said["group"], said["together"], said["window"]) == (3, 3, 4)
    assert f"{NAME}: assigned to {went[0]} (colocated), 3 of 3 alike together, window of 4" in explanation_text(told)
    assert f"{NAME}: not assigned (alone)" in explanation_text(world.told("other"))


async def test_an_assignment_that_other_scorers_overrule_is_counted() -> None:
    heavy = sample().replace("weight: 2.0", "weight: 0.1").replace("load-aware-scorer", "running-requests-size-scorer")
    world = World(heavy, endpoints=2)
    asked = [world.ask(str(number), 1) for number in range(4)]
    await world.until_waiting(4)
    world.fleet.running[0] = 50  # scraped; the books know nothing of it
    await where(*asked)
    assert world.sample("burst_assigned_total", followed="no") == 4


def test_a_decision_may_take_longer_by_the_window() -> None:
    long, none = load_text(sample(windowDurationMs=10000)), load_text(sample(windowDurationMs=1))
    assert long.decision_limit_s == pytest.approx(none.decision_limit_s + 9.999)
