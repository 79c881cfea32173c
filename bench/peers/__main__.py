"""Routers side by side in front of the same simulated engines, with the same traffic, in one run.

    python -m bench.peers --vllm-router VENV/bin/vllm-router --smg VENV/bin/smg --sglang-router VENV/bin/sglang-router

Warmroute (a real Envoy and the gateway, with KV events) always takes part. Other routers come from environments of their
own; one whose executable is not given is named as left out. Any further router can join with --other NAME=COMMAND.

Every router plays every scenario once, started afresh before emptied engines; from scenario to scenario another one begins.
What the figures mean and what they do not show: docs/peers.md.
"""

import argparse
import asyncio
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec

from bench.overhead import free_ports
from bench.peers import processes, rows
from bench.peers.contestants import PEERS, Contestant, contestants
from bench.peers.fleet import Fleet
from bench.peers.scenarios import Scenario, Stage, scenarios
from bench.peers.table import table
from bench.peers.traffic import Traffic
from gateway.demo_children import ChildDied, Children
from gateway.demo_setup import HOST, MODEL, choose_ports
from gateway.demo_traffic import ask, client_session

READY_S = 60.0
IDLE_S = 1.0
LIMIT_S = 60.0


def main() -> None:
    options = parser().parse_args()
    try:
        everyone, missing = contestants(
            options.speed, {name: getattr(options, name.replace("-", "_")) for name in PEERS}, options.other
        )
    except ValueError as error:
        sys.exit(f"bench.peers: --other {error}")
    known = [each.name for each in everyone]
    if unknown := set(options.routers or []) - {*known, *missing}:
        sys.exit(
            f"bench.peers: no router named {', '.join(sorted(unknown))}; there are {', '.join([*known, *missing])}"
        )
    wanted = [each for each in everyone if each.name in (options.routers or known)]
    left_out = [name for name in missing if name in (options.routers or missing)]
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores, load {_load()}")
    for each in wanted:
        print(f"{each.name}: {each.version()}")
    for name in left_out:
        print(f"{name}: left out, --{name.partition(':')[0]} was not given")
    sys.stdout.flush()
    try:
        measured = asyncio.run(run(options, wanted))
    except ChildDied as error:
        sys.exit(f"bench.peers: {error}")
    if options.json:
        versions = {each.name: each.version() for each in wanted}
        report = {"versions": versions, "left_out": left_out, "rows": measured}
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1))
    print(f"load at the end {_load()}")


def parser() -> argparse.ArgumentParser:
    names = list(scenarios(1.0))
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PEERS:
        found.add_argument(f"--{name}", metavar="EXECUTABLE", help=f"of {name}, in an environment of its own")
    found.add_argument("--other", action="append", default=[], metavar="NAME=COMMAND", help="with {port} and {engines}")
    found.add_argument("--routers", nargs="+", metavar="NAME", help="only these, e.g. warmroute smg:cache_aware")
    found.add_argument("--scenarios", nargs="+", choices=names, default=names)
    found.add_argument("--engines", type=int, default=4)
    found.add_argument("--blocks", type=int, default=1100, help="KV blocks of 16 tokens per engine")
    found.add_argument("--speed", type=float, default=0.2, help="of the engines; 1: a 70B model on eight H100")
    found.add_argument("--reply-tokens", type=int, default=8)
    found.add_argument("--size", type=float, default=1.0, help="scales the number of conversations")
    found.add_argument("--logs", type=Path, help="keep configurations and logs here")
    found.add_argument("--json", type=Path, metavar="FILE", help="write all rows there")
    return found


async def run(options: argparse.Namespace, routers: Sequence[Contestant]) -> list[rows.Row]:
    """Play all scenarios; prints each one's table when it is done."""
    measured = []
    playing = scenarios(options.size)
    with TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        async with Children(folder) as children, client_session() as session:
            ports = choose_ports(free_ports(1)[0], options.engines)
            fleet = Fleet(
                children, ports, blocks=options.blocks, speed=options.speed, reply_tokens=options.reply_tokens
            )
            await fleet.start(session)
            for turn, name in enumerate(options.scenarios):
                scenario = playing[name]
                started = time.monotonic()
                first = turn % len(routers)
                order = [*routers[first:], *routers[:first]]
                played = {each.name: await play(scenario, each, fleet, folder) for each in order}
                some = [played[each.name] for each in routers]
                print(f"\n{name}: {scenario.title}; {', '.join(each.name for each in order)} in this order")
                print(f"({time.monotonic() - started:.0f} s, load {_load()})\n\n{table(some)}", flush=True)
                measured += some
    return measured


async def play(scenario: Scenario, router: Contestant, fleet: Fleet, folder: Path) -> rows.Row:
    """One router in one scenario."""
    await fleet.restart_all()
    ports = msgspec.structs.replace(choose_ports(free_ports(1)[0], 0), engines=fleet.ports.engines)
    url = f"http://{HOST}:{ports.front}"
    async with Children(folder) as children, client_session() as session:
        parts = await router.start(children, ports, folder)
        await _until_ready(session, children, url, router, 2 * len(fleet.names))
        at_rest = processes.cpu_ms(parts)
        await asyncio.sleep(IDLE_S)
        before = processes.cpu_ms(parts)
        traffic = Traffic(url, scenario.shape, scenario.users, LIMIT_S)
        stage = Stage(fleet, traffic)
        async with asyncio.TaskGroup() as group:
            group.create_task(traffic.run(session))
            group.create_task(scenario.script(stage))
        after, memory = processes.cpu_ms(parts), processes.rss_mb(parts)
    count = max(1, len(traffic.answers))
    return rows.row(
        scenario.name,
        router.name,
        traffic.answers,
        complete=traffic.complete,
        engines=fleet.names,
        phases=stage.phases,
        struck=stage.struck,
        usage=rows.Usage(
            cpu_ms={name: (after[name] - before[name]) / count for name in parts},
            idle_ms_per_s={name: (before[name] - at_rest[name]) / IDLE_S for name in parts},
            rss_mb=memory,
        ),
    )


async def _until_ready(
    session: aiohttp.ClientSession, children: Children, url: str, router: Contestant, wanted: int
) -> None:
    """Until so many short chats in a row are served: all connections are made by then."""
    deadline = time.monotonic() + READY_S
    in_a_row = 0
    while in_a_row < wanted:
        children.check()
        seen, _ = await ask(session, url, MODEL, [{"role": "user", "content": "Ready?"}], max_tokens=1)
        in_a_row = in_a_row + 1 if router.serves(seen) else 0
        if time.monotonic() > deadline:
            raise ChildDied(
                f"{router.name} is not ready after {READY_S:.0f} s; its last answer: {seen.error or 'unrouted'}"
            )
        await asyncio.sleep(0 if in_a_row else 0.2)


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


if __name__ == "__main__":
    main()
