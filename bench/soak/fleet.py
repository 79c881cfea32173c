"""The processes of a soak, the files they read, and what goes wrong with them.

Eight places (ports) that Envoy knows, five engines on them. A place's engine may be killed, silenced or exchanged for one at
another place at any time; `lossy` are the places whose engine stored or removed what nobody can know about it.
"""

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from gateway.demo_setup import HOST, MODEL, choose_ports, engine_command, envoy_command, picker_config, write_configs
from gateway.envoy_binary import find_envoy

PLACES, ENGINES = 8, 5
BLOCKS = 700
"""Per engine: about ten prompts' worth, so that blocks are evicted all the time."""
SERVE = [sys.executable, "-c", "from bench.soak.inside import serve; serve()", "serve", "-c"]
DECIDER, HANDLER = "prefix-based-pd-decider", "disagg-profile-handler"
MISCHIEF = (
    *("kill", "kill", "move", "leave", "rename", "reset", "reset", "restart", "freeze", "no_events"),
    *("drop", "lose", "silent", "deaf", "reload", "reload", "broken", "listing", "envoy"),
)
"""What may happen, the frequent things twice."""


class SoakFleet:
    def __init__(
        self,
        folder: Path,
        session: aiohttp.ClientSession,
        transport: str,
        front: int,
        dice: random.Random,
        *,
        disaggregated: bool,
    ) -> None:
        """`disaggregated`: even places prefill and odd ones decode, and the gateway hands over between them."""
        self.folder, self.session, self.dice = folder, session, dice
        self.transport, self.pieces, self._disaggregated = transport, 0.0, disaggregated
        self.ports = choose_ports(front, PLACES)
        self.admin = choose_ports(front, 0).plain
        self.listed: dict[int, str] = {}  # place -> name
        self.lossy: set[int] = set()
        self.done: Counter[str] = Counter()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._busy: set[int] = set()
        self._names = 0

    def start(self) -> None:
        write_configs(self.ports, self.folder)
        for place in range(ENGINES):
            self._name(place)
            self._engine(place)
        self.list_endpoints()
        self.configure()
        self._spawn("gateway", [*SERVE, str(self.folder / "warmroute.yaml")])
        self._spawn("envoy", envoy_command(find_envoy(), self.folder / "envoy.yaml"))

    def stop(self) -> None:
        for name in list(self.processes):
            self._kill_now(name)

    def revive(self) -> list[str]:
        """Start engines that ended by themselves; which. RuntimeError where the gateway did."""
        if (code := self.processes["gateway"].poll()) is not None:
            raise RuntimeError(f"the gateway ended with {code}; look into {self.folder}/gateway.log")
        dead = [place for place in self.listed if self.processes[f"engine-{place}"].poll() is not None]
        for place in dead:
            self._engine(place)
        return [f"engine-{place} ended by itself" for place in dead]

    def configure(self, *, broken: bool = False) -> None:
        """Write the gateway's configuration; it reads it when it changes."""
        config = picker_config(self.ports)
        path = str(self.folder / "endpoints.yaml")
        config["plugins"][0] = {"type": "file-discovery", "parameters": {"path": path, "watchFile": True}}
        config["plugins"][2]["parameters"] = {"speculativeIndexing": True}
        config["dataLayer"]["discovery"]["pluginRef"] = "file-discovery"
        if self._disaggregated:
            config["plugins"] += [{"type": type_} for type_ in ("prefill-filter", "decode-filter", "queue-scorer")]
            config["plugins"].append({"type": DECIDER, "parameters": {"nonCachedTokens": 256}})
            config["plugins"].append({"type": HANDLER, "parameters": {"deciders": {"prefill": DECIDER}}})
            config["schedulingProfiles"] = [
                _profile("prefill", "prefill-filter", "expected-work-scorer"),
                _profile("decode", "decode-filter", "queue-scorer"),
            ]
            config["warmroute"]["handoff"] = {"mode": "gateway", "timeout": "5s"}
        if broken:
            config["plugins"].append({"type": "no-such-scorer"})
        config["warmroute"] |= {
            "adminPort": self.admin,
            "decideTimeout": self.dice.choice(["5s", "4s"]),
            "transport": self.transport,
            "replyPiecesPerSecond": self.pieces,
            "explain": True,
            "compatibilityMetrics": True,
        }
        self._write("warmroute.yaml", config)

    def list_endpoints(self) -> None:
        """Write the file that file-discovery watches."""
        rows = []
        for place, name in self.listed.items():
            own = self.ports.engines[place]
            row = {"name": name, "address": HOST, "port": own.http, "model": MODEL}
            row |= {"events": own.events, "replay": own.replay}
            rows.append(row | ({"role": ("prefill", "decode")[place % 2]} if self._disaggregated else {}))
        self._write("endpoints.yaml", {"endpoints": rows})

    def address(self, place: int) -> str:
        return f"{HOST}:{self.ports.engines[place].http}"

    async def post(self, place: int, path: str, **body: Any) -> None:
        """To an engine, past the gateway; nothing happens where there is none."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            url, limit = f"http://{self.address(place)}{path}", aiohttp.ClientTimeout(5)
            async with self.session.post(url, json=body, timeout=limit) as answer:
                await answer.read()

    async def mischief(self) -> None:
        """One thing goes wrong, and is mended after a while where it does not mend itself."""
        able = [place for place in self.listed if place not in self._busy]
        if not able:
            return
        place, what = self.dice.choice(able), self.dice.choice(MISCHIEF)
        self.done[what] += 1
        self._busy.add(place)
        await getattr(self, f"_{what}")(place)
        self._busy.discard(place)

    # What may happen to a place

    async def _kill(self, place: int) -> None:
        self._kill_now(f"engine-{place}")
        await asyncio.sleep(self.dice.uniform(0, 3))
        self._engine(place)

    async def _move(self, place: int) -> None:
        new = self.dice.choice([it for it in range(PLACES) if it not in self.listed and it not in self._busy])
        del self.listed[place]
        self._name(new)
        self._engine(new)
        self.list_endpoints()
        await asyncio.sleep(self.dice.choice([0, 2]))
        self._kill_now(f"engine-{place}")

    async def _leave(self, place: int) -> None:
        name = self.listed.pop(place)
        self.list_endpoints()
        await asyncio.sleep(self.dice.uniform(0.5, 4))
        self.listed[place] = name
        self.list_endpoints()

    async def _rename(self, place: int) -> None:
        self._name(place)
        self.list_endpoints()

    async def _reset(self, place: int) -> None:
        await self.post(place, "/reset_prefix_cache")

    async def _restart(self, place: int) -> None:
        await self.post(place, "/sim/restart")

    async def _freeze(self, place: int) -> None:
        process = self.processes[f"engine-{place}"]
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self.dice.uniform(0.5, 5))
        process.send_signal(signal.SIGCONT)

    async def _no_events(self, place: int) -> None:
        self._kill_now(f"engine-{place}")
        self._engine(place, events=False)
        await asyncio.sleep(6)
        await self._kill(place)

    async def _drop(self, place: int) -> None:
        await self.post(place, "/sim/faults", drop_next=self.dice.randint(1, 5))

    async def _lose(self, place: int) -> None:
        self.lossy.add(place)
        await self.post(place, "/sim/faults", lose_next=self.dice.randint(1, 3))

    async def _silent(self, place: int) -> None:
        await self.post(place, "/sim/faults", silent=True)
        await asyncio.sleep(3)
        await self.post(place, "/sim/faults", silent=False)

    async def _deaf(self, place: int) -> None:
        await self.post(place, "/sim/faults", silent=True, deaf=True)
        await asyncio.sleep(2)
        await self.post(place, "/sim/faults", silent=False, deaf=False)

    # What may happen to everything else

    async def _reload(self, _: int) -> None:
        self.configure()
        if self.dice.random() < 0.3:
            self.processes["gateway"].send_signal(signal.SIGHUP)

    async def _broken(self, _: int) -> None:
        self.configure(broken=True)
        await asyncio.sleep(2)
        self.configure()

    async def _listing(self, _: int) -> None:
        (self.folder / "endpoints.yaml").write_text("endpoints: [{name: x")
        await asyncio.sleep(2)
        self.list_endpoints()

    async def _envoy(self, _: int) -> None:
        if self.dice.random() < 0.4:
            self._kill_now("envoy")
            self._spawn("envoy", envoy_command(find_envoy(), self.folder / "envoy.yaml"))

    # The inside

    def _engine(self, place: int, *, events: bool = True) -> None:
        self.lossy.discard(place)
        command = engine_command(place, self.ports, BLOCKS, reply_tokens=24)
        if not events:
            for option in ("--events-port", "--replay-port"):
                at = command.index(option)
                del command[at : at + 2]
        self._spawn(f"engine-{place}", [*command, "--speed", "8", "--die-with-parent"])

    def _name(self, place: int) -> None:
        self._names += 1
        self.listed[place] = f"engine-{self._names}"

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        self.processes[name] = started

    def _kill_now(self, name: str) -> None:
        if (process := self.processes.pop(name, None)) is not None:
            process.kill()
            process.wait()

    def _write(self, name: str, value: object) -> None:
        fresh = self.folder / f".{name}"
        fresh.write_text(yaml.safe_dump(value, sort_keys=False))
        fresh.rename(self.folder / name)


def _profile(name: str, *plugins: str) -> dict[str, Any]:
    return {"name": name, "plugins": [{"pluginRef": it} for it in (*plugins, "max-score-picker")]}
