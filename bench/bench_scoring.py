"""What scoring costs: microseconds per scorer, filter, picker and whole profile, at 8 and 1,000 endpoints.

    python -m bench.bench_scoring [--json]

Times are the best of several runs of many calls, on one core; compare them within one run, not across machines. The
request has a prompt of 8,192 tokens (512 blocks) whose first half is held by half of the fleet; every endpoint has two
prompts without a first token that share its first block, so that counting what is on its way is part of the figure.
"""

import argparse
import json
import random
import time
from collections.abc import Callable

import numpy as np

import scorers
from fleet.books import Books
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from fleet.plugin import Filter, Picker, Scorer, registered
from fleet.request import Match, Request

BLOCK, BLOCKS = 16, 512
FIXED = {
    "endpoint-attribute-scorer",
    "endpoint-attribute-filter",
    "header-label-affinity-scorer",
    "by-label",
    "utilization-filter",
}
"""Plugins with required parameters; others cost the same."""


def chain(*parts: object) -> list[int]:
    keys = [hash(("root", *parts[:1]))]
    for part in parts[1:]:
        keys.append(hash((keys[-1], part)))
    return keys


def situation(endpoints: int) -> tuple[Fleet, Books, Request]:
    """A fleet under load and a request that is about to be placed."""
    rng = random.Random(1)
    fleet = Fleet()
    books = Books(fleet)
    now = fleet.clock()
    for number in range(endpoints):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:8000"
        slot = fleet.add(Endpoint(name=f"e{number}", address=address))
        fleet.waiting[slot], fleet.running[slot], fleet.kv_usage[slot] = (
            rng.randrange(9),
            rng.randrange(99),
            rng.random(),
        )
        for copy in range(2):
            keys = chain("shared", *((slot, copy, block) for block in range(200)))
            books.reserve(f"{slot}-{copy}", slot, rng.randrange(9000), 400, now, cached_tokens=500, keys=keys)
    keys = chain("shared", *range(BLOCKS - 1))
    tokens = np.zeros(fleet.capacity)
    tokens[: endpoints // 2] = BLOCK * BLOCKS // 2
    match = Match(tokens=tokens, weighted_tokens=tokens, total_tokens=BLOCK * BLOCKS, block_tokens=BLOCK, keys=keys)
    request = Request(
        id="r",
        model="m",
        target_model="m",
        path="/v1/completions",
        prompt_tokens=BLOCK * BLOCKS + 5,
        matches={"p": match},
        default_match="p",
    )
    return fleet, books, request


def microseconds(call: Callable[[], object], calls: int, runs: int = 5) -> float:
    best = float("inf")
    for _ in range(runs):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - started) / calls)
    return best * 1e6


def measure(endpoints: int) -> dict[str, float]:
    fleet, books, request = situation(endpoints)
    slots, results = fleet.slots(), {}
    calls = 2000 if endpoints < 100 else 200
    scores = np.random.default_rng(1).random(len(slots))
    for type_, kind in sorted(registered().items()):
        if type_ in FIXED or not issubclass(kind, Scorer | Filter | Picker):
            continue
        plugin = kind(type_, kind.Parameters())
        if isinstance(plugin, Scorer):
            call = lambda plugin=plugin: plugin.score(request, slots, fleet)  # noqa: E731
        elif isinstance(plugin, Filter):
            call = lambda plugin=plugin: plugin.keep(request, slots, fleet)  # noqa: E731
        else:
            call = lambda plugin=plugin: plugin.pick(request, slots, scores, fleet)  # noqa: E731
        results[type_] = microseconds(call, calls)

    def profile(*names: str) -> Callable[[], object]:
        parts = [registered()[name](name, registered()[name].Parameters()) for name in names]
        picker = registered()["max-score-picker"]("p", registered()["max-score-picker"].Parameters())

        def run() -> object:
            left, total = slots, None
            for part in parts:
                if isinstance(part, Filter):
                    left = left[part.keep(request, left, fleet)]
                elif isinstance(part, Scorer):
                    score = np.clip(part.score(request, left, fleet), 0.0, 1.0)
                    total = score if total is None else total + score
            assert isinstance(picker, Picker)
            return picker.pick(request, left, np.asarray(total), fleet)

        return run

    expected, compatible = (
        ("decode-filter", "expected-work-scorer"),
        ("decode-filter", "prefix-cache-scorer", "queue-scorer"),
    )
    results["profile: expected work"] = microseconds(profile(*expected), calls)
    results["profile: prefix, queue, kv"] = microseconds(profile(*compatible, "kv-cache-utilization-scorer"), calls)
    counter = iter(range(10**9))
    keys = request.matches["p"].keys

    def book() -> None:
        name = f"b{next(counter)}"
        books.reserve(name, 0, 4096, 400, 0.0, cached_tokens=4096, keys=keys)
        books.first_token(name, 0.0)
        books.finish(name, 0.0)

    results["books: reserve, first token, finish"] = microseconds(book, calls)
    results["blocks on their way"] = microseconds(lambda: fleet.pending.leading(keys, fleet.capacity), calls)
    results["Fleet.available"] = microseconds(fleet.available, calls)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of scoring, in microseconds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    assert scorers, "importing it registers the plugins"
    results = {count: measure(count) for count in (8, 1000)}
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{'us per call':40}{'8':>10}{'1000':>10}")
    for name in results[8]:
        print(f"{name:40}{results[8][name]:10.1f}{results[1000][name]:10.1f}")


if __name__ == "__main__":
    main()
