"""What a running gateway holds: admin pages that only this bench adds to `warmroute serve`.

/state/left    what must be 0 while nothing runs: books, queue, predictions, samples, replies being read
/state/use     memory, descriptors, threads, tasks
/state/lag     the longest pause of the event loop since the last question, milliseconds
/state/census  elements of every container that can be reached from the gateway, by the class and attribute that own it
"""

import asyncio
import contextlib
import gc
import sys
import time
from collections import Counter, deque
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

BOOKED = (
    "in_flight",
    "awaiting",
    "in_flight_tokens",
    "in_flight_square",
    "decoding",
    "decode_tokens",
    "reserved_tokens",
)
OURS = ("gateway", "fleet", "indexer", "event_ingest", "tokenization", "scorers", "deciders")
SMALL_CACHE = 1 << 20
"""Bytes. Caches that would fill for hours are full after the first rounds, so that what still grows is a leak."""


class Inside:
    """Looks at one `gateway.runtime.Gateway`, private parts included."""

    def __init__(self, gateway: Any) -> None:
        self._gateway = gateway
        self._lag = 0.0
        self.watching: asyncio.Task[None] | None = None

    async def watch(self) -> None:
        while True:
            due = time.monotonic() + 0.05
            await asyncio.sleep(0.05)
            self._lag = max(self._lag, time.monotonic() - due)

    def shrink(self) -> None:
        """Make caches small."""
        self._gateway.path._matcher.chains._max_bytes = SMALL_CACHE
        for tokenizer in self._gateway._tokenizers.local().values():
            tokenizer.segments.cache._max_bytes = SMALL_CACHE

    def sections(self) -> dict[str, Any]:
        return {"left": self.left, "use": self.use, "lag": self.lag, "census": self.census}

    def left(self) -> dict[str, float]:
        it = self._gateway
        found = {name: float(np.abs(getattr(it.fleet, name)).sum()) for name in BOOKED}
        found |= {"books": len(it.books), "computing": len(it.books.computing()), "queue": len(it.room._guests)}
        found |= {"pending": len(it.fleet.pending), "pending_nodes": len(it.fleet.pending._root.children)}
        found |= {"reading": it.path.sending.budget.reading, "parity": len(it._parity._samples)}
        found |= {"predicted": it.predicted.stats().entries if it.predicted else 0}
        found |= {"streams": it._server.service.open_streams}
        return {name: value for name, value in found.items() if value}

    def use(self) -> dict[str, float]:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "rss_mb": int(status["VmRSS"].split()[0]) / 1024,
            "fds": len(list(Path("/proc/self/fd").iterdir())),
            "threads": int(status["Threads"]),
            "tasks": len(asyncio.all_tasks()),
            "memory_blocks": sys.getallocatedblocks(),
        }

    def lag(self) -> float:
        lag, self._lag = self._lag, 0.0
        return lag * 1e3

    def census(self) -> dict[str, int]:
        counts: Counter[str] = Counter()
        seen: set[int] = set()
        todo: deque[tuple[str, Any]] = deque([("gateway", self._gateway)])
        while todo:
            name, it = todo.popleft()
            if id(it) in seen or isinstance(it, str | bytes | int | float | type | ModuleType | None):
                continue
            seen.add(id(it))
            match it:
                case dict() | list() | set() | frozenset() | deque() | tuple():
                    if not isinstance(it, tuple):
                        counts[name] += len(it)
                    parts = [*it.values(), *it.keys()] if isinstance(it, dict) else list(it)
                    todo.extend((name if name.endswith("[][]") else f"{name}[]", part) for part in parts)
                case MethodType():
                    todo.append((name, it.__self__))
                case FunctionType():
                    for cell in it.__closure__ or ():
                        with contextlib.suppress(ValueError):  # nothing in it yet
                            todo.append((f"{it.__qualname__}()", cell.cell_contents))
                case _:
                    kind = type(it)
                    if kind.__module__.partition(".")[0] in OURS:
                        counts[kind.__qualname__] += 1
                    slots = (name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
                    for attribute in [*getattr(it, "__dict__", ()), *slots]:
                        with contextlib.suppress(AttributeError):
                            todo.append((f"{kind.__qualname__}.{attribute}", getattr(it, attribute)))
        gc.collect()
        counts["objects"] = len(gc.get_objects())
        return dict(counts)


def serve() -> None:
    """`warmroute serve`, with the pages."""
    from gateway import runtime
    from gateway.cli import main

    init, start = runtime.Gateway.__init__, runtime.Gateway.start

    def made(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.inside = Inside(self)
        sections = self.picture.sections
        self.picture.sections = lambda: {**sections(), **self.inside.sections()}

    async def started(self: Any) -> None:
        await start(self)
        self.inside.shrink()
        self.inside.watching = asyncio.create_task(self.inside.watch())

    runtime.Gateway.__init__, runtime.Gateway.start = made, started  # type: ignore[method-assign,assignment]
    main()
