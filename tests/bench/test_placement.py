"""The placement bench: that its engines keep their rules, and that a run is what it says, on a made-up trace."""

import random
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from bench.placement.engine import KEY_BYTES, TraceEngine
from bench.placement.policies import CONSTANTS, PATIENCE, POLICIES
from bench.placement.replay import Replay, Served, World
from bench.placement.report import Outcome, outcome, ratio, table
from bench.placement.trace import Prompt, TraceError, arrivals, parse, read
from fleet.request import Request
from gateway.config import load, load_text
from simulator.step import Outcome as StepOutcome
from simulator.step import Step

WORLD = World(engines=3, kv_tokens=100_000)
"""A small cache, so that blocks are evicted and requests wait for memory."""


def conversations(requests: int, rate: float, seed: int) -> list[Prompt]:
    """One block in all prompts, two in five go on with an earlier prompt, lengths from 100 to 30,000 tokens."""
    rng = random.Random(seed)
    talks: list[tuple[int, ...]] = [(0,)]
    prompts, now, fresh = [], 0.0, 1
    for _ in range(requests):
        now += rng.expovariate(rate)
        start = rng.choice(talks) if rng.random() < 0.4 else (0,)
        more = int(min(30_000, max(100, rng.lognormvariate(8.0, 1.0))))
        tokens = min(len(start) * 512 + more, 60_000)
        blocks = (*start, *range(fresh, fresh + 200))[: -(-tokens // 512)]
        fresh += 200
        prompts.append(Prompt(now, tokens, rng.randrange(1, 600), blocks))
        talks.append(blocks[: tokens // 512])
    return prompts


CROWD = conversations(300, rate=7.0, seed=1)


class Checked(Replay):
    """Looks at an engine after each of its steps, and at what is known when something is placed."""

    steps = 0

    def stepped(self, slot: int, outcome: StepOutcome) -> None:
        super().stepped(slot, outcome)
        self.steps += 1
        engine = self.engines[slot]
        pool = engine.pool
        private = {block.number for it in engine.running for block in it.blocks if block.digest is None}
        assert len(private) + pool.copies <= pool.usable
        cached = {int.from_bytes(digest, "big") for digest in pool.cached_digests if len(digest) == KEY_BYTES}
        assert self.known.copies[slot].keys() == cached
        assert self.known.blocks[slot] == len(cached)
        for output in outcome.outputs:
            assert output.sequence.sampled > 1 or output.sequence.first_token_at == self.now

    def _request(self, name: str, fate: Served) -> Request:
        if self.policy.scrapes and self.world.scrape_age_s:
            assert self.now - self.fleet.scraped_at[0] <= self.world.scrape_age_s + 1e-9
        return super()._request(name, fate)


def replayed(policy: str, world: World = WORLD, prompts: list[Prompt] = CROWD, seed: int = 11) -> list[Served]:
    return Replay(POLICIES[policy], world, seed).run(prompts)


@pytest.mark.parametrize("policy", POLICIES)
def test_everybody_is_answered_and_no_engine_breaks_its_rules(policy: str) -> None:
    replay = Checked(POLICIES[policy], WORLD, 11)
    fates = replay.run(CROWD)
    assert [fate.prompt for fate in fates] == CROWD
    cost = replay.engines[0].settings.cost
    for fate in fates:
        assert 0 <= fate.slot < WORLD.engines
        assert fate.prompt.at <= fate.sent < fate.first <= fate.finished
        new = min(fate.prompt.tokens - fate.cached, 8192)
        assert fate.first - fate.sent >= cost.step_ms([(new, fate.cached)], []) / 1e3 - 1e-9, (
            "before its step had ended"
        )
    assert replay.steps > len(fates)
    assert not any(engine.busy or engine.pool.used or engine.counters.preemptions for engine in replay.engines)
    assert any(engine.pool.copies for engine in replay.engines)
    assert not len(replay.books)
    assert not replay.fleet.in_flight.any()
    assert abs(replay.fleet.reserved_tokens).max() < 1e-6


def test_steps_taken_in_one_stride_are_the_same_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    strides, steps = replayed("warmroute", prompts=CROWD[:150]), []

    def one(step: Step) -> int:
        steps.append(step)
        return 1

    monkeypatch.setattr(TraceEngine, "_alike", staticmethod(one))
    assert replayed("warmroute", prompts=CROWD[:150]) == strides
    assert len(steps) > 10 * len(strides), "no strides: the test does not test"


def test_a_seed_says_everything() -> None:
    assert replayed("random") == replayed("random")
    assert replayed("random") != replayed("random", seed=12)
    spread = arrivals(CROWD, "whole", 1.0, 11)
    assert spread == arrivals(CROWD, "whole", 1.0, 11)
    assert spread != arrivals(CROWD, "whole", 1.0, 12)


def test_the_default_finds_more_in_caches_than_chance_does() -> None:
    hits = {policy: outcome(replayed(policy), WORLD.engines).hit for policy in ("warmroute", "random")}
    assert hits["warmroute"] > 1.2 * hits["random"] > 0


def test_in_overload_prompts_wait_in_the_router_and_only_with_a_queue() -> None:
    rush = arrivals(CROWD, "whole", 3.0, 1)
    assert any(fate.sent > fate.prompt.at for fate in replayed("warmroute", prompts=rush))
    assert not any(fate.sent > fate.prompt.at for fate in replayed("warmroute-no-queue", prompts=rush))


def test_late_events_are_late_and_older_load_is_older() -> None:
    late = msgspec.structs.replace(WORLD, events_late_s=5.0)
    assert sum(fate.cached for fate in replayed("least-work", late)) < sum(
        fate.cached for fate in replayed("least-work")
    )
    old = msgspec.structs.replace(WORLD, scrape_age_s=10.0)
    assert outcome(replayed("llm-d", old), 3).mean > outcome(replayed("llm-d"), 3).mean


def test_the_default_policy_is_the_default_configuration_but_for_turning_nobody_away() -> None:
    assert POLICIES["warmroute"].config is not None
    ours, default = load_text(POLICIES["warmroute"].config(CONSTANTS["8b"], 1)), load(None)
    assert ours.queue is not None
    assert default.queue is not None
    given = ours.queue[0].parameters
    patience = {"max_wait": given.max_wait, "max_requests": given.max_requests}
    assert given == msgspec.structs.replace(default.queue[0].parameters, **patience)
    assert (given.max_wait, given.max_requests) == (24 * 3600.0, PATIENCE["maxRequests"])
    assert ours.queue[1].parameters == default.queue[1].parameters
    assert [[scorer.type for scorer, _ in it.scorers] for it in ours.profiles] == [["expected-work-scorer"]]


# Reading a trace


LINE = b'{"timestamp": 3000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}'


def test_only_full_blocks_are_keys() -> None:
    (prompt,) = parse(LINE, "t")
    assert (prompt.at, prompt.tokens, prompt.reply, prompt.blocks, prompt.full) == (3.0, 1000, 5, (0, 7), (0,))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "t:2: "),
        (LINE.replace(b"1000", b"1025"), "t:2: expected .* got 1025, 5 and 2"),
        (LINE.replace(b"output_length", b"outputs"), "t:2: .*output_length"),
    ],
)
def test_a_bad_line_is_named(line: bytes, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        list(parse(LINE + b"\n" + line, "t"))


def test_a_missing_trace_says_what_was_looked_for_and_where_it_is(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"mooncake_synthetic\.jsonl.* of GitHub kvcache-ai/Mooncake"):
        read(tmp_path, "synthetic")


def test_a_trace_is_read_with_and_without_compression(tmp_path: Path) -> None:
    (tmp_path / "synthetic_trace.jsonl").write_bytes(LINE)
    plain = read(tmp_path, "synthetic")
    assert len(plain) == 1
    if shutil.which("zstd") is None:
        pytest.skip("needs the program zstd")
    subprocess.run(["zstd", "-q", "--rm", "synthetic_trace.jsonl"], cwd=tmp_path, check=True)
    assert read(tmp_path, "synthetic") == plain
    (tmp_path / "synthetic_trace.jsonl.zst").write_bytes(b"nothing of the kind")
    with pytest.raises(TraceError, match=r"synthetic_trace\.jsonl\.zst: "):
        read(tmp_path, "synthetic")


def test_a_bucket_of_arrivals_is_spread_over_its_time_and_speed_shortens_it() -> None:
    prompts = [Prompt(at, 600, 1, (0, 1)) for at in [0.0] * 50 + [3.0] * 50 + [6.0] * 100]
    second = [prompt.at for prompt in arrivals(prompts, "second", 1.0, 1)]
    assert second == [0.0] * 100, "nothing is known of how long the last bucket is"
    first = [prompt.at for prompt in arrivals(prompts, "first", 2.0, 1)]
    assert first == sorted(first)
    assert 0.0 < first[0] < first[48] < 1.5
    assert len({*first}) >= 50


# The table


def test_ratios_are_taken_seed_by_seed() -> None:
    def of(mean: float) -> Outcome:
        rest = dict.fromkeys(Outcome.__struct_fields__, 1.0)
        return Outcome(**{**rest, "mean": mean})

    base, runs = {1: of(1.0), 2: of(4.0), 3: of(9.0)}, {1: of(0.5), 2: of(3.0)}
    assert ratio(runs, base, "mean") == "0.62 ± 0.18"
    assert ratio(runs, {}, "mean") == "-"
    assert "| 0.62 ± 0.18 | - |" in table({"least-work": base, "it": runs})
