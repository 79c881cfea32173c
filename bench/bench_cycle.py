"""What one scheduling cycle costs: microseconds from a matched request to a decision, by configuration and fleet size.

    python -m bench.bench_cycle [--json]

The request's tokens and matches are there already, as in the gateway. Every decision is timed by itself, configurations take
turns, and of the times the tenth percentile and the median are shown: on a machine with other load the first is nearer to what
the code costs. Compare figures within one run, not across machines. The situation is bench_scoring's: half of the fleet holds
half of an 8,192-token prompt, and every endpoint has two prompts on their way that begin like this one. Of the prefill/decode
configuration only decisions count that ran both profiles.
"""

import argparse
import json
import time
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
ROUNDS, CALLS, WARM = 20, 200, 20
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


def measure() -> dict[str, dict[int, list[float]]]:
    """Per configuration and fleet size the sorted microseconds of single decisions, all of them with every profile run."""
    worlds = {size: prepared(size) for size in SIZES}
    made = {(size, name): made for size in SIZES for name, made in schedulers(worlds[size][0]).items()}
    results: dict[str, dict[int, list[float]]] = {}
    for _ in range(ROUNDS):
        for (size, name), scheduler in made.items():
            fleet, _, request = worlds[size]
            times = results.setdefault(name, {}).setdefault(size, [])
            for number in range(-WARM, CALLS):
                request.peer = None
                fleet.pending.add(0, ())  # as between two requests: nothing is remembered from the last decision
                fleet.pending.remove(0, ())
                started = time.perf_counter_ns()
                outcome = scheduler.schedule(request, fleet.available())
                spent = time.perf_counter_ns() - started
                assert isinstance(outcome, Decision)
                if number >= 0 and all(verdict.disaggregate for _, verdict in outcome.verdicts.values()):
                    times.append(spent / 1e3)
    return {name: {size: sorted(times) for size, times in row.items()} for name, row in results.items()}


def percentile(times: list[float], share: float) -> float:
    return times[int(len(times) * share)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {
        name: {size: {"p10": percentile(times, 0.1), "p50": percentile(times, 0.5)} for size, times in row.items()}
        for name, row in measure().items()
    }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"| us per decision, p10 / p50 | {' | '.join(f'{size} endpoints' for size in SIZES)} |")
    print(f"|---|{'---|' * len(SIZES)}")
    for name, row in results.items():
        cells = (f"{it['p10']:.0f} / {it['p50']:.0f}" for it in row.values())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
