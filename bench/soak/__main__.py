"""Days of a gateway in minutes: mixed traffic and chaos around the real thing, and what is left whenever it pauses.

    python -m bench.soak [--minutes 15] [--transport http2] [--pieces 5000 50 0] [--rate 18] [--disaggregated]

`warmroute serve`, an Envoy and simulated engines with small caches. Rounds of traffic (`traffic`), each with the next of
`--pieces` as replyPiecesPerSecond. Meanwhile engines are killed, exchanged, silenced and reset, endpoints leave and return,
batches of events are lost, the configuration is reloaded (also an invalid one), Envoy is killed (`fleet`), and all pages are
read.

After each round traffic pauses with everything up, and the gateway is looked into (`inside`). Nothing may be in the books or
half done, the index must hold what the engines hold (but for blocks of lost batches), chats asked again must be cached as
predicted. What grows from pause to pause is a leak. Exits with 1 for any of these, for a traceback in the log, an answer of
5xx that no engine's end explains, or a dead gateway.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from bench.soak.fleet import SoakFleet
from bench.soak.traffic import Traffic
from gateway.demo_setup import HOST, MODEL

ROUND_S = 45.0
PAUSE_S = 30.0
"""At most until everything is quiet: an engine that starts takes a few seconds, and its stream is asked again only then."""
SETTLE_S = 3.0
NEWS = list(range(1000, 1040))
"""A prompt of more than a block, as token ids."""
PAGES = ("endpoints", "streams", "index", "routed", "alarms", "decisions", "dump")
WARM = 4
"""Rounds until caches are full and all series are there; growth counts from then on."""
BOUNDED = ("Repeats._seen", "_Seen")
"""What grows for long, has a bound of its own, and cannot be made small: remembered log lines."""
SIZES = ("rss_mb", "fds", "threads", "tasks", "memory_blocks")


class Soak:
    def __init__(self, options: argparse.Namespace, folder: Path, session: aiohttp.ClientSession) -> None:
        dice = random.Random(options.seed)
        self.problems: list[str] = []
        wanted = (options.transport, options.front, dice)
        self.fleet = SoakFleet(folder, session, *wanted, disaggregated=options.disaggregated)
        self.traffic = Traffic(f"http://{HOST}:{options.front}", session, dice)
        self._options, self._session, self._dice = options, session, dice

    async def run(self) -> list[dict[str, Any]]:
        """What was seen in the pauses."""
        fleet, rounds = self.fleet, list[dict[str, Any]]()
        fleet.pieces = self._options.pieces[0]
        fleet.start()
        if not await self._until(self._settled, 90.0):
            raise RuntimeError(f"not everything came up; look into {fleet.folder}")
        ends = time.monotonic() + self._options.minutes * 60
        while time.monotonic() < ends:
            fleet.pieces = self._options.pieces[len(rounds) % len(self._options.pieces)]
            fleet.configure()
            rounds.append(await self._round())
            self._tell(len(rounds), rounds[-1])
        return rounds

    async def _round(self) -> dict[str, Any]:
        ends = asyncio.get_running_loop().time() + ROUND_S
        await self._state("lag")  # what it was in the pause is no matter
        chaos = [self._chaos(ends) for _ in range(2)]
        await asyncio.gather(self.traffic.run(self._options.rate, ends), self._readers(ends), *chaos)
        lag = await self._state("lag")
        self._complain(*self.fleet.revive())
        self.fleet.list_endpoints()
        await self._until(self._settled, PAUSE_S)
        for name, value in (await self._state("left")).items():
            self._complain(f"{name} is {value:g} in a pause")
        await self._compare()
        self._complain(*self.traffic.failures)
        self.traffic.failures.clear()
        page = await self._get(self.fleet.ports.metrics, "/metrics")
        series = sum(not line.startswith("#") for line in page.splitlines())
        use, census, alarms = [await self._state(name) for name in ("use", "census", "alarms")]
        return {**use, "lag_ms": lag, "series": series, "alarms": alarms, "census": census}

    async def _compare(self) -> None:
        """Predictions with reports, and what is believed of engines with what they hold."""
        for place in (
            self.fleet.listed
        ):  # that it was reset or restarted, an idle engine says with the next block that it stores
            await self.fleet.post(place, "/v1/completions", model=MODEL, prompt=NEWS, max_tokens=1)
        await asyncio.sleep(SETTLE_S)
        for chat in self._dice.sample(self.traffic.chats, min(12, len(self.traffic.chats))):
            reply = await self.traffic.ask({"model": MODEL, "max_tokens": 3, "messages": list(chat)})
            handed_over = reply is not None and "x-warmroute-handoff" in reply.headers
            if reply is not None and reply.headers.get("x-warmroute-trust") == "exact" and not handed_over:
                predicted = int(reply.headers["x-warmroute-predicted-cached-tokens"])
                if predicted != reply.cached:
                    where = reply.headers["x-warmroute-endpoint"]
                    self._complain(f"{predicted} cached tokens predicted at {where}, {reply.cached} reported")
            await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        streams = {row["endpoint"]: row for row in await self._state("streams")}
        entries, held_keys = (await self._state("index"))["entries"], sum(row["keys"] for row in streams.values())
        if entries != held_keys:
            self._complain(f"the index has {entries} entries, the streams' ledgers {held_keys} keys")
        for place in set(self.fleet.listed) - self.fleet.lossy:
            row = streams[self.fleet.address(place)]
            held = (await self._get(self.fleet.ports.engines[place].http, "/sim/cached"))["digests"]
            if row["state"] != "exact" or row["keys"] != held:
                told = f"{row['state']}({row['reason']}), {row['keys']} keys"
                self._complain(f"{row['endpoint']} holds {held} blocks; its stream: {told}")

    async def _settled(self) -> bool:
        """Whether all endpoints are up, all streams followed, and nothing runs."""
        endpoints, streams = await self._state("endpoints"), await self._state("streams")
        up = sorted(row["name"] for row in endpoints if row["up"]) == sorted(self.fleet.listed.values())
        return up and all(_followed(row) for row in streams) and not await self._state("left")

    async def _chaos(self, ends: float) -> None:
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(self._dice.uniform(0.3, 2.5))
            await self.fleet.mischief()

    async def _readers(self, ends: float) -> None:
        while asyncio.get_running_loop().time() < ends:
            await self._get(self.fleet.ports.metrics, "/metrics")
            await self._state(self._dice.choice(PAGES))
            await asyncio.sleep(1.0)

    async def _until(self, true: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if await true():
                    return True
            except (aiohttp.ClientError, TimeoutError):
                pass  # it is not up yet
            await asyncio.sleep(0.25)
        return False

    async def _state(self, section: str) -> Any:
        return await self._get(self.fleet.admin, f"/state/{section}")

    async def _get(self, port: int, path: str) -> Any:
        limit = aiohttp.ClientTimeout(30)
        async with self._session.get(f"http://{HOST}:{port}{path}", timeout=limit, raise_for_status=True) as answer:
            return await (answer.json() if answer.content_type == "application/json" else answer.text())

    def _complain(self, *problems: str) -> None:
        self.problems += problems
        for problem in problems:
            print(f"    {problem}", flush=True)

    def _tell(self, number: int, it: dict[str, Any]) -> None:
        alarms = ", ".join(f"{alarm['alarm']} {alarm['where']}" for alarm in it["alarms"]) or "none"
        print(
            f"{number:3}  pieces {self.fleet.pieces:5g}  RSS {it['rss_mb']:6.1f} MiB  memory blocks {it['memory_blocks']:8,}"
            f"  fds {it['fds']:3}  threads {it['threads']:3}  tasks {it['tasks']:3}  series {it['series']:5}"
            f"  lag {it['lag_ms']:5.0f} ms  alarms {alarms}  {dict(self.traffic.answers)}",
            flush=True,
        )


def _followed(stream: dict[str, Any]) -> bool:
    return bool(stream["state"] == "exact" or stream["reason"] == "lost_batches")


def growing(rounds: list[dict[str, Any]]) -> list[str]:
    """What grew all the time since the caches were full: in the last third never as small as in the first one."""
    rows = [{**row["census"], **{name: row[name] for name in (*SIZES, "series")}} for row in rounds[WARM:]]
    third, found = len(rows) // 3, list[str]()
    if third < 3:
        print(f"{len(rounds)} rounds are too few to see a leak; {WARM + 9} are needed")
        return found
    for name in sorted(set().union(*rows)):
        values = [row.get(name, 0) for row in rows]
        first, last = max(values[:third]), min(values[-third:])
        middle = min(values[third:-third])
        if name not in BOUNDED and last > 1.05 * first + third and first <= middle:
            found.append(f"{name} grows: {values}")
    return found


async def soak(options: argparse.Namespace, folder: Path) -> list[str]:
    """The problems."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        it = Soak(options, folder, session)
        try:
            rounds = await it.run()
        finally:
            it.fleet.stop()
    print(f"requests: {dict(it.traffic.answers)}\nmischief: {dict(it.fleet.done)}")
    tracebacks = (folder / "gateway.log").read_text(errors="replace").count("Traceback (most recent call last)")
    return [
        *it.problems,
        *growing(rounds),
        *([f"{tracebacks} tracebacks in {folder}/gateway.log"] if tracebacks else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--transport", choices=["http2", "grpcio"], default="http2")
    parser.add_argument(
        "--pieces", type=float, nargs="+", default=[5000, 50, 0], help="replyPiecesPerSecond, by rounds"
    )
    parser.add_argument("--rate", type=float, default=18.0, help="requests per second")
    parser.add_argument("--front", type=int, default=18080, help="Envoy's port")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--disaggregated", action="store_true", help="prefill and decode endpoints, handed over by the gateway"
    )
    parser.add_argument("--logs", type=Path, help="a folder; a temporary one by default")
    options = parser.parse_args()
    folder = options.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs in {folder}", flush=True)
    problems = asyncio.run(soak(options, folder))
    print(*(problems or ["nothing is left, nothing grows"]), sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
