"""How fast the index is, against a naive walk in the same run: `python -m bench.bench_index`.

Ratios travel between machines, absolute figures do not. docs/index.md has a recorded run.
"""

import argparse
import random
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from indexer import tier
from indexer.block_key import block_keys, pack_tokens, root_key
from indexer.index import Index
from indexer.matched import Matched
from indexer.predicted import Predicted

SLOTS = 100
BLOCKS = 8192


def naive_walk(held: dict[int, set[int]], keys: Sequence[int]) -> dict[int, int]:
    """What the match must answer: a set of slots per key, intersected block by block."""
    answer: dict[int, int] = {}
    active: set[int] | None = None
    for position, key in enumerate(keys):
        here = held.get(key, set())
        still = here if active is None else active & here
        for slot in (active or set()) - still:
            answer[slot] = position
        active = still
        if not active:
            break
    for slot in active or ():
        answer[slot] = len(keys)
    return answer


def median_s(call: Callable[[], object], repeats: int = 31) -> float:
    """CPU seconds of one call: what this thread spent, so that a busy machine disturbs it less."""
    start = time.thread_time()
    call()
    number = max(1, min(1000, int(2e-4 / max(time.thread_time() - start, 1e-7))))
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(number):
            call()
        times.append((time.thread_time() - start) / number)
    return statistics.median(times)


def chain(seed: int, blocks: int) -> list[int]:
    return block_keys(root_key(f"model-{seed}"), np.arange(blocks * 16, dtype=np.uint32), 16)


def depths_of(shape: str) -> list[int]:
    draw = random.Random(7)
    return {
        "all full": [BLOCKS] * SLOTS,
        "all half": [BLOCKS // 2] * SLOTS,
        "8 depths": [BLOCKS * (1 + slot % 8) // 8 for slot in range(SLOTS)],
        "100 depths": [draw.randrange(1, BLOCKS + 1) for _ in range(SLOTS)],
        "1 block shared, 1 full": [BLOCKS, *[1] * (SLOTS - 1)],
        "none": [0] * SLOTS,
    }[shape]


def bench_match() -> None:
    print(f"\nmatch of {BLOCKS} blocks x {SLOTS} endpoints, median CPU us (ratio to the naive walk)")
    print(f"{'shape':26}{'naive':>9}{'dense':>16}{'walked':>16}{'2 tiers':>16}{'+siblings':>16}{'vectors':>10}")
    keys = chain(0, BLOCKS)
    for shape in ("all full", "all half", "8 depths", "100 depths", "1 block shared, 1 full", "none"):
        depths = depths_of(shape)
        held: dict[int, set[int]] = {}
        dense, walked, tiered = Index(), Index(), Index()
        for slot, depth in enumerate(depths):
            for key in keys[:depth]:
                held.setdefault(key, set()).add(slot)
            for index in (dense, walked, tiered):
                index.add(slot, tier.GPU, keys[: depth if index is not tiered else depth // 2])
            tiered.add(slot, tier.CPU, keys[:depth])
            dense.set_dense(slot, True)
            tiered.set_dense(slot, True)
        predicted = Predicted()
        predicted.predict(3, keys[depths[3] :], 0.0)
        predicted.predict(4, keys[depths[4] :], 0.0)
        truth = naive_walk(held, keys)
        for index in (dense, walked, tiered):
            assert index.match(keys).by_slot() == truth
        reference = median_s(lambda held=held: naive_walk(held, keys))
        cells = []
        for index, extra in ((dense, None), (walked, None), (tiered, None), (dense, predicted)):
            spent = median_s(lambda index=index, extra=extra: index.match(keys, extra))
            cells.append(f"{spent * 1e6:9.1f} ({reference / spent:4.0f})")
        matched: Matched = dense.match(keys)
        vectors = median_s(lambda matched=matched: (matched.tokens(SLOTS, 16), matched.weighted_tokens(SLOTS, 16)))
        print(f"{shape:26}{reference * 1e6:9.1f}" + "".join(f"{cell:>16}" for cell in cells) + f"{vectors * 1e6:10.1f}")


def bench_keys() -> None:
    print("\nblock keys, ns per block (from a list / from an array / packed already)")
    for size in (16, 64, 128):
        array = np.arange(131072, dtype=np.uint32)
        forms = (array.tolist(), array, pack_tokens(array))
        root = root_key("m")
        figures = [median_s(partial(block_keys, root, form, size)) for form in forms]
        print(f"  {size:4} tokens" + "".join(f"{spent / (131072 // size) * 1e9:9.1f}" for spent in figures))


def bench_writes() -> None:
    print("\nwrites, keys per CPU second")
    chains = [chain(seed, 512) for seed in range(200)]
    keys = sum(map(len, chains))

    def rate(call: Callable[[], object]) -> float:
        start = time.process_time()
        call()
        return keys / (time.process_time() - start)

    index = Index()
    print(f"  add, new, 512 a batch   {rate(lambda: [index.add(0, 0, batch) for batch in chains]):12,.0f}")
    print(f"  add, a second holder    {rate(lambda: [index.add(1, 0, batch) for batch in chains]):12,.0f}")
    print(f"  touch                   {rate(lambda: [index.touch(batch) for batch in chains]):12,.0f}")
    print(f"  remove, 512 a batch     {rate(lambda: [index.remove(1, 0, batch) for batch in chains]):12,.0f}")
    print(f"  clear with keys         {rate(lambda: [index.clear(0, batch) for batch in chains]):12,.0f}")
    print(f"  add, 1 a batch          {rate(lambda: [index.add(0, 0, (key,)) for b in chains for key in b]):12,.0f}")
    full = Index(max_keys=20_000)
    print(f"  add, evicting           {rate(lambda: [full.add(0, 0, batch) for batch in chains]):12,.0f}")
    other = Index()
    batches: list[list[list[int]]] = [chains[:100], chains[100:]]

    def threaded() -> None:
        workers = [
            threading.Thread(target=lambda part=part: [other.add(0, 0, batch) for batch in part]) for part in batches
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    print(f"  add, 2 threads          {rate(threaded):12,.0f}")


def bench_memory() -> None:
    print("\nmemory, bytes per key, keys included (tracemalloc)")
    draw = random.Random(1)
    for holders in (1, 2, 10, 100, -1):
        figures = []
        for keys in (12_000, 16_000, 20_000):
            names = [draw.getrandbits(64) for _ in range(keys)]
            tracemalloc.start()
            index = Index()
            for start in range(0, keys, 512):
                batch = [int(str(key)) for key in names[start : start + 512]]  # the index's own key objects
                for slot in range(64, 64 + max(holders, 1)):  # below 64 CPython shares some of the bitsets
                    index.add(slot, tier.GPU, batch)
                if holders < 0:
                    index.add(64, tier.CPU, batch)
            figures.append(tracemalloc.get_traced_memory()[0] / keys)
            tracemalloc.stop()
            assert len(index) == keys
        title = f"{holders} holders" if holders > 0 else "1 holder, GPU and CPU"
        print(f"  {title:22}" + "".join(f"{figure:9.0f}" for figure in figures) + "   (12k, 16k, 20k keys)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="*", default=["match", "keys", "writes", "memory"])
    parts = {"match": bench_match, "keys": bench_keys, "writes": bench_writes, "memory": bench_memory}
    for part in parser.parse_args().part:
        parts[part]()


if __name__ == "__main__":
    main()
