"""What one scheduling cycle costs: microseconds from a matched request to a decision, by configuration and fleet size.

    python -m bench.bench_cycle [--json]

The request's tokens and matches are there already, as in the gateway. CPU time of the thread, best of several runs of many
calls; compare figures within one run, not across machines. The situation is bench_scoring's: half of the fleet holds half of
an 8,192-token prompt, and every endpoint has two prompts on their way that begin like this one.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from bench.bench_scoring import situation
from fleet.books import Books
from fleet.fleet import Fleet
from fleet.request import Request
from gateway.config import load, load_text
from gateway.cycle import Decision, Scheduler

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
CONFIGS = {
    "expected work (the default)": f"{HEAD}plugins: []\n",
    "llm-d's default: queue, kv, prefix": f"""{HEAD}plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: queue-scorer, weight: 2}}
  - {{pluginRef: kv-cache-utilization-scorer, weight: 2}}
  - {{pluginRef: prefix-cache-scorer, weight: 3}}
""",
    "a filter and five scorers": f"""{HEAD}plugins:
- type: decode-filter
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
- type: active-request-scorer
- type: token-load-scorer
""",
}
SIZES = (8, 100, 1000)
PREFILL_DECODE = Path(__file__).parent.parent / "configs" / "prefill-decode.yaml"


def schedulers(fleet: Fleet) -> dict[str, Scheduler]:
    made = {name: load_text(text).scheduler(fleet) for name, text in CONFIGS.items()}
    made["prefill/decode with the cost decider"] = load(PREFILL_DECODE).scheduler(fleet)
    return made


def prepared(endpoints: int) -> tuple[Fleet, Books, Request]:
    """bench_scoring's situation, every second endpoint a prefill one, the match under every name that is asked for."""
    fleet, books, request = situation(endpoints)
    for slot in fleet.slots().tolist():
        endpoint = fleet.endpoint(slot)
        role = "prefill" if slot % 2 else "both"
        fleet.replace(
            slot, type(endpoint)(name=endpoint.name, address=endpoint.address, labels={"llm-d.ai/role": role})
        )
    match = next(iter(request.matches.values()))
    request.matches = dict.fromkeys(("precise-prefix-cache-producer", "approx-prefix-cache-producer"), match)
    request.default_match = "approx-prefix-cache-producer"
    return fleet, books, request


def best(call: Callable[[], object], seconds: float = 0.6, runs: int = 30) -> float:
    """Microseconds of CPU per call, of the best run."""
    call()
    count, fastest = 1, float("inf")
    for run in range(runs + 1):
        start = time.thread_time()
        for _ in range(count):
            call()
        each = (time.thread_time() - start) / count
        if run == 0:
            count = max(1, int(seconds / runs / each))
        else:
            fastest = min(fastest, each)
    return fastest * 1e6


def measure() -> dict[str, dict[int, float]]:
    results: dict[str, dict[int, float]] = {}
    for size in SIZES:
        fleet, _, request = prepared(size)
        for name, scheduler in schedulers(fleet).items():

            def once(scheduler: Scheduler = scheduler, request: Request = request, fleet: Fleet = fleet) -> None:
                request.peer = None
                fleet.pending.add(0, ())  # as between two requests: nothing is remembered from the last decision
                fleet.pending.remove(0, ())
                outcome = scheduler.schedule(request, fleet.available())
                assert isinstance(outcome, Decision)

            results.setdefault(name, {})[size] = best(once)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = measure()
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"| microseconds per decision | {' | '.join(f'{size} endpoints' for size in SIZES)} |")
    print(f"|---|{'---|' * len(SIZES)}")
    for name, row in results.items():
        print(f"| {name} | {' | '.join(f'{row[size]:.0f}' for size in SIZES)} |")


if __name__ == "__main__":
    main()
