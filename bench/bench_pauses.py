"""What else the process does, and how long a decision waits for it: the event loop's longest pauses, before and after care.

    python -m bench.bench_pauses [--json]

A loop that only notes when it could run (every millisecond) stands for decisions. Beside it, one after the other:

    scrape       /metrics of so many endpoints is written: on the event loop, and as the gateway does it
    collection   a full garbage collection with so many KV blocks in the ledgers: with the modules and blocks in its sight (a list
                 of as many objects as plain Python blocks would be), and as the gateway has it
    replay       a thread applies stored blocks without rest: at Python's switch interval, and at the gateway's

Pauses also contain what else the machine does; compare within one run.
"""

import argparse
import array
import asyncio
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable

import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from event_ingest.events import BlockStored
from event_ingest.reblock import Reblocker
from gateway import interpreter
from gateway.metrics import Metrics

TICK_S = 0.001
REPLAY_S = 3.0


class PlainBlock:
    """What a block would be if it were an ordinary object: something to look at, with two more objects behind it."""

    __slots__ = ("hash", "key", "keys")

    def __init__(self, number: int) -> None:
        self.hash, self.key = number, [number]
        self.keys = (self.key,)


class Pauses:
    """Notes how much later than asked it was called."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def run(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.seconds.append(time.perf_counter() - before - TICK_S)

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.seconds)
        return {"p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3, "longest_ms": ordered[-1] * 1e3}


async def during(act: Callable[[], Awaitable[object]]) -> dict[str, float]:
    pauses = Pauses()
    noting = asyncio.create_task(pauses.run())
    await asyncio.sleep(0.05)
    await act()
    await asyncio.sleep(0.05)
    noting.cancel()
    return pauses.figures()


def series(endpoints: int) -> CollectorRegistry:
    """A registry as it looks when every endpoint has served something."""
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for number in range(endpoints):
        name = f"10.0.{number >> 8}.{number & 255}:8000"
        metrics.ttft.labels(name).observe(0.1)
        metrics.decisions.labels(name, "most_cached").inc()
        metrics.responses.labels(name, "finished").inc()
        for which in ("best", "chosen", "reused"):
            metrics.match_fraction.labels(name, which).observe(0.5)
        for direction in ("over", "under"):
            metrics.cached_error.labels(name, direction).observe(1)
    return registry


def stored(rng: random.Random, blocks: int) -> BlockStored:
    tokens = array.array("I", [rng.randrange(50_000) for _ in range(16 * blocks)]).tobytes()
    return BlockStored(hashes=tuple(rng.getrandbits(63) for _ in range(blocks)), tokens=tokens, block_tokens=16)


async def scrape(endpoints: int) -> dict[str, dict[str, float]]:
    registry = series(endpoints)

    async def here() -> None:
        generate_latest(registry)

    return {"before": await during(here), "now": await during(lambda: asyncio.to_thread(generate_latest, registry))}


async def collection(blocks: int) -> dict[str, dict[str, float]]:
    rng = random.Random(1)

    async def collect() -> None:
        gc.collect()

    plain: list[PlainBlock] | None = [PlainBlock(number) for number in range(blocks)]
    before = await during(collect)
    plain = None  # noqa: F841 - given back before the other one is measured
    interpreter.settle()
    ledger = Reblocker(model="m", block_tokens=16)
    for _ in range(blocks // 100):
        ledger.apply(stored(rng, 100))
    now = await during(collect)
    gc.unfreeze()
    return {"before": before, "now": now}


async def replay() -> dict[str, dict[str, float]]:
    rng = random.Random(1)
    events = [stored(rng, 100) for _ in range(200)]
    found = {}
    usual = sys.getswitchinterval()
    for name, interval in (("before", usual), ("now", interpreter.SWITCH_S)):
        sys.setswitchinterval(interval)
        over = threading.Event()

        def apply(over: threading.Event = over) -> None:
            while not over.is_set():
                ledger = Reblocker(model="m", block_tokens=16)
                for event in events:
                    ledger.apply(event)

        thread = threading.Thread(target=apply)
        thread.start()
        found[name] = await during(lambda: asyncio.sleep(REPLAY_S))
        over.set()
        await asyncio.to_thread(thread.join)
    sys.setswitchinterval(usual)
    return found


async def measure() -> dict[str, dict[str, dict[str, float]]]:
    found = {}
    for endpoints in (8, 100, 1000):
        print(f"scrape, {endpoints} endpoints ...", file=sys.stderr)
        found[f"scrape, {endpoints} endpoints"] = await scrape(endpoints)
    for blocks in (20_000, 200_000, 1_000_000):
        print(f"collection, {blocks} blocks ...", file=sys.stderr)
        found[f"collection, {blocks:,} blocks"] = await collection(blocks)
    print("replay ...", file=sys.stderr)
    found["replay"] = await replay()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = uvloop.run(measure())
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    print("| pause of the event loop, ms: p99 / longest | before | now |")
    print("|---|---|---|")
    for name, row in found.items():
        cells = (f"{row[which]['p99_ms']:.1f} / {row[which]['longest_ms']:.1f}" for which in ("before", "now"))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
