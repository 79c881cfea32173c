"""What matching costs: microseconds from token ids to what every endpoint holds, by fleet size and kinds of engines.

    python -m bench.bench_matching [--json]

A prompt of 8,192 tokens, half of which half of the fleet holds. `keys` is what a repeated prompt costs (its chains are
remembered), `match` the question to the index, with the streams' trust. Every call is timed by itself, situations take turns,
and of the times the tenth percentile and the median are shown; compare figures within one run, not across machines.
"""

import argparse
import json
import time

import numpy as np

from bench.bench_cycle import percentile
from event_ingest.pipeline import EventPath
from fleet.endpoint import Endpoint
from fleet.fleet import Fleet
from gateway.matching import Matcher
from gateway.served_models import Served
from indexer.block_key import block_keys, root_key
from indexer.index import Index
from indexer.tier import GPU
from indexer.trust import Trust
from tokenization.tokenized import Tokenized

SIZES = (8, 1000)
KINDS = {"one block size": (16,), "two block sizes": (16, 32)}
ROUNDS, CALLS, WARM = 20, 50, 5
SERVED = Served("m", "m")
PROMPT = Tokenized(token_ids=np.arange(8192, dtype=np.uint32))


class Paths:
    """The answers of `gateway.event_streams`, from real streams that nobody feeds."""

    def __init__(self, index: Index, blocks: dict[int, int]) -> None:
        self._paths = {
            slot: EventPath(index, slot, name=str(slot), model="m", can_replay=True, block_tokens=block)
            for slot, block in blocks.items()
        }

    def block_tokens(self, slot: int) -> int:
        return self._paths[slot].block_tokens or 0

    def trust(self, slot: int) -> Trust:
        return self._paths[slot].trust


def prepared(endpoints: int, sizes: tuple[int, ...]) -> Matcher:
    """Engines of the sizes alternate in pairs; of every pair the first holds half of the prompt."""
    fleet, index, blocks = Fleet(), Index(), {}
    halves = {block: block_keys(root_key("m"), PROMPT.token_ids[:4096], block) for block in sizes}
    for number in range(endpoints):
        slot = fleet.add(Endpoint(name=f"e{number}", address=f"10.0.{number >> 8}.{number & 255}:8000"))
        blocks[slot] = sizes[number // 2 % len(sizes)]
    paths = Paths(index, blocks)
    for slot, block in blocks.items():
        if slot % 2 == 0:
            index.add(slot, GPU, halves[block])
        index.set_dense(slot, True)
    return Matcher(fleet, index, paths)


def measure() -> dict[str, dict[str, list[float]]]:
    """Per situation and step the sorted microseconds of single calls."""
    made = {f"{size} endpoints, {kind}": prepared(size, KINDS[kind]) for size in SIZES for kind in KINDS}
    times: dict[str, dict[str, list[float]]] = {name: {"keys": [], "match": []} for name in made}
    for _ in range(ROUNDS):
        for name, matcher in made.items():
            for number in range(-WARM, CALLS):
                started = time.perf_counter_ns()
                keys = matcher.keys(PROMPT, SERVED)
                between = time.perf_counter_ns()
                found = matcher.match(keys)
                ended = time.perf_counter_ns()
                assert found.raw_tokens[0] == 4096
                if number >= 0:
                    times[name]["keys"].append((between - started) / 1e3)
                    times[name]["match"].append((ended - between) / 1e3)
    return {name: {step: sorted(spent) for step, spent in row.items()} for name, row in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {
        name: {step: {"p10": percentile(spent, 0.1), "p50": percentile(spent, 0.5)} for step, spent in row.items()}
        for name, row in measure().items()
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print("| us per prompt, p10 / p50 | keys | match |\n|---|---|---|")
    for name, row in results.items():
        cells = (f"{it['p10']:.0f} / {it['p50']:.0f}" for it in row.values())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
