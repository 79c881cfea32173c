"""How well policies place a recorded trace: time to first token, by policy, on simulated engines in virtual time.

    python -m bench.placement --traces FOLDER [--trace conversation|synthetic] [--speed 3 4] [--policies ...] [--seeds 11 12]

FOLDER holds mooncake_conversation.jsonl.zst or mooncake_synthetic.jsonl.zst, or the files under the names that their
authors gave them. Nothing is measured of this machine: how long a decision takes is in bench_cycle. See docs/placement.md.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench.placement.engine import MODELS
from bench.placement.policies import DEFAULT, POLICIES
from bench.placement.replay import Replay, World
from bench.placement.report import Outcome, outcome, table
from bench.placement.trace import NAMES, Prompt, TraceError, arrivals, read


class Job(msgspec.Struct, frozen=True):
    """One run."""

    policy: str
    speed: float
    seed: int
    world: World
    prompts: list[Prompt]

    def run(self) -> tuple["Job", Outcome, float]:
        """Itself, what it came to, and the seconds of CPU it took."""
        started = time.process_time()
        fates = Replay(POLICIES[self.policy], self.world, self.seed).run(self.prompts, self._progress)
        return self, outcome(fates, self.world.engines), time.process_time() - started

    def _progress(self, left: int) -> None:
        if left % 500 == 0 and sys.stderr.isatty():
            print(f"\r{self.policy}, {self.speed:g}x, seed {self.seed}: {left} to go    ", end="", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="FOLDER", help="where the traces are")
    parser.add_argument("--trace", choices=NAMES, default="conversation")
    parser.add_argument("--speed", type=float, nargs="+", default=[3.0], help="times the trace's own (default 3)")
    names = ", ".join(f"{it.name} ({it.what})" for it in POLICIES.values())
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=DEFAULT, metavar="POLICY", help=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13])
    parser.add_argument("--half", choices=["first", "second", "whole"], default="second")
    parser.add_argument("--requests", type=int, help="only so many from the beginning, for a quick look")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument(
        "--scrape-age", type=float, default=0.05, help="s between scrapes, 0: always fresh (default 0.05)"
    )
    parser.add_argument(
        "--events-late", type=float, default=0.0, help="s until the index learns of a block (default 0)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="a line per run, instead of tables")
    return parser.parse_args()


def done(jobs: list[Job], processes: int) -> Iterator[tuple[Job, Outcome, float]]:
    with ExitStack() as stack:
        if processes > 1:
            yield from stack.enter_context(ProcessPoolExecutor(processes)).map(Job.run, jobs)
        else:
            yield from map(Job.run, jobs)


def main() -> None:
    given = arguments()
    try:
        prompts = read(given.traces, given.trace)
    except TraceError as error:
        sys.exit(f"bench.placement: {error}")
    world = World(
        engines=given.engines, model=given.model, scrape_age_s=given.scrape_age, events_late_s=given.events_late
    )
    jobs = []
    for speed in given.speed:
        for seed in given.seeds:
            spread = arrivals(prompts, given.half, speed, seed)[: given.requests]
            jobs += [Job(policy, speed, seed, world, spread) for policy in given.policies]
    results: dict[float, dict[str, dict[int, Outcome]]] = {
        speed: {policy: {} for policy in given.policies} for speed in given.speed
    }
    for job, came_to, took in done(jobs, given.jobs):
        results[job.speed][job.policy][job.seed] = came_to
        line = f"{job.policy}, {job.speed:g}x, seed {job.seed}: mean {came_to.mean:.3f} s, {took:.0f} s of CPU"
        print(f"\r{line}    ", file=sys.stderr, flush=True)
        if given.json:
            about = {
                "trace": given.trace,
                "half": given.half,
                "speed": job.speed,
                "policy": job.policy,
                "seed": job.seed,
            }
            print(json.dumps(about | msgspec.to_builtins(world) | msgspec.to_builtins(came_to)), flush=True)
    if given.json:
        return
    for speed, rows in results.items():
        of = f"{given.half} half" if given.half != "whole" else "whole"
        print(f"\n{given.trace}, {of}, {speed:g}x, {given.model}, {given.engines} engines, seeds {given.seeds}\n")
        print(table(rows))


if __name__ == "__main__":
    main()
