"""The scraping loop: asks every model server for its numbers and writes the fleet's columns.

It runs on the event loop's thread, as all that writes the fleet does. A model server is asked again only when its last
answer is in. What a page does not have leaves the column as it was; `scraped_at` says how old everything is.
"""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable, Mapping

import aiohttp
import msgspec

from fleet import listing
from fleet.books import Books
from fleet.fleet import Fleet
from fleet.scrape import ENGINES, EngineMetrics, EngineSpecs, combined, parse

log = logging.getLogger("fleet.scraper")

MAX_BYTES = 8 << 20
"""A longer answer is no metrics page."""
SECONDS_PER_ENDPOINT = 0.005
"""A scrape costs about 1 ms of CPU, so the interval grows with the fleet: a fifth of a core at most goes into scraping."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how often to ask."""

    path: str
    interval_s: float
    scheme: str = "http"
    port: int | None = None
    """None: the endpoint's own."""
    tls: ssl.SSLContext | None = None
    """For https; None: the server's certificate is not checked."""

    def url(self, address: str) -> str:
        host, _, port = address.rpartition(":")
        return f"{self.scheme}://{host}:{self.port or port}{self.path}"


class ScrapeSettings(msgspec.Struct, frozen=True, kw_only=True):
    metrics: Source | None = Source(path="/metrics", interval_s=0.1)
    models: Source | None = Source(path="/v1/models", interval_s=10.0)
    attributes: tuple[tuple[Source, Callable[[str], Mapping[str, float]]], ...] = ()
    """Other pages, each with the function that reads attributes from it."""
    engines: Mapping[str, EngineSpecs] = msgspec.field(default_factory=lambda: dict(ENGINES))
    engine_label: str = "llm-d.ai/engine-type"
    default_engine: str = "vllm"
    timeout_s: float = 1.0
    failures: int = 3
    """So many failed scrapes in a row make a server unhealthy; it is asked on, and one answer makes it healthy again."""
    retry_s: float = 1.0
    """How often an unhealthy server is asked."""


class _Target:
    """One page of one server."""

    __slots__ = ("busy", "due", "failures", "source")

    def __init__(self, source: Source, due: float) -> None:
        self.source, self.due, self.busy, self.failures = source, due, False, 0


class Scraper:
    """`await run()` until cancelled. `counts` has (page, outcome) -> answers, for metrics: outcome ok, or why not."""

    def __init__(self, fleet: Fleet, settings: ScrapeSettings | None = None, books: Books | None = None) -> None:
        """`books` are corrected by what engines report (`Books.reconcile`)."""
        self.counts: Counter[tuple[str, str]] = Counter()
        self._fleet = fleet
        self._settings = settings or ScrapeSettings()
        self._books = books
        self._targets: dict[tuple[str, str], _Target] = {}
        self._slots: dict[str, list[int]] = {}
        self._generation = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def use(self, settings: ScrapeSettings) -> None:
        """Reconfigure. Pages whose source has changed are asked at once, the others when it is their turn."""
        self._settings = settings
        self._generation = -1

    async def run(self) -> None:
        connector = aiohttp.TCPConnector(limit=256)
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                while True:
                    self.start_due(session)
                    await asyncio.sleep(0.02)
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    def start_due(self, session: aiohttp.ClientSession) -> None:
        """Ask every server whose time has come and whose last answer is in."""
        if self._generation != self._fleet.generation:
            self._follow_fleet()
        now = self._fleet.clock()
        for (address, page), target in self._targets.items():
            if target.due <= now and not target.busy:
                target.busy = True
                target.due = now + self.interval_s(target.source)
                task = asyncio.create_task(self._visit(session, address, page, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def interval_s(self, source: Source) -> float:
        """Seconds between two scrapes of one server; longer than configured in a large fleet."""
        return max(source.interval_s, len(self._slots) * SECONDS_PER_ENDPOINT)

    def _follow_fleet(self) -> None:
        self._generation = self._fleet.generation
        self._slots = {}
        for slot in self._fleet.slots().tolist():
            self._slots.setdefault(self._fleet.endpoint(slot).address, []).append(slot)
        settings, now = self._settings, self._fleet.clock()
        pages: dict[str, Source] = {}
        if settings.metrics:
            pages["metrics"] = settings.metrics
            self._fleet.scrape_interval_s = self.interval_s(settings.metrics)
        if settings.models:
            pages["models"] = settings.models
        pages |= {f"attributes-{index}": source for index, (source, _) in enumerate(settings.attributes)}
        old, self._targets = self._targets, {}
        for address in self._slots:
            for page, source in pages.items():
                known = old.get((address, page))
                self._targets[address, page] = known if known and known.source == source else _Target(source, now)

    async def _visit(self, session: aiohttp.ClientSession, address: str, page: str, target: _Target) -> None:
        outcome = "ok"
        try:
            body = await self._get(session, target.source, address)
            self._apply(address, page, body)
        except aiohttp.ClientResponseError as error:
            outcome = "status-5xx" if error.status >= 500 else "status-4xx"
        except TimeoutError:  # before OSError and ClientError: it is a kind of both
            outcome = "timeout"
        except (aiohttp.ClientError, OSError):
            outcome = "connection"
        except (ValueError, msgspec.DecodeError) as error:
            outcome = "unreadable"
            if target.failures == 0 and not self.counts[page, outcome]:
                log.warning("page_unreadable address=%s path=%s error=%r", address, target.source.path, error)
        except Exception:
            outcome = "internal"
            log.exception("scrape_failed address=%s path=%s", address, target.source.path)
        finally:
            target.busy = False
        self.counts[page, outcome] += 1
        if page == "metrics":
            self._judge(address, target, outcome)

    def _judge(self, address: str, target: _Target, outcome: str) -> None:
        # A server that answers is alive, even if it has no such page or writes it in a way nobody can read.
        if outcome not in ("status-5xx", "connection", "timeout"):
            if target.failures >= self._settings.failures:
                log.info("server_healthy address=%s", address)
            target.failures = 0
        else:
            target.failures += 1
            if target.failures == self._settings.failures:
                log.warning("server_unhealthy address=%s failures=%d last=%s", address, target.failures, outcome)
        down = target.failures >= self._settings.failures
        if down:
            target.due = max(target.due, self._fleet.clock() + self._settings.retry_s)
        for slot in self._live(address):
            self._fleet.healthy[slot] = not down

    async def _get(self, session: aiohttp.ClientSession, source: Source, address: str) -> bytes:
        tls: ssl.SSLContext | bool = source.tls if source.tls is not None else False
        async with session.get(source.url(address), ssl=tls, raise_for_status=True) as response:
            body = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > MAX_BYTES:
                    raise ValueError(f"longer than {MAX_BYTES} bytes")
            return bytes(body)

    def _live(self, address: str) -> list[int]:
        """Slots of the address that still hold it: an answer may come in after its endpoint has left."""
        slots = self._slots.get(address, ())
        return [slot for slot in slots if slot in self._fleet and self._fleet.endpoint(slot).address == address]

    def _apply(self, address: str, page: str, body: bytes) -> None:
        slots = self._live(address)
        if not slots:
            return
        if page == "models":
            found = listing.parse(body)
            for slot in slots:
                self._fleet.listed(slot, found)
        elif page == "metrics":
            engine = self._fleet.endpoint(slots[0]).labels.get(
                self._settings.engine_label, self._settings.default_engine
            )
            specs = self._settings.engines.get(engine)
            if specs is None:
                raise ValueError(f"no engine {engine!r}; known are {', '.join(sorted(self._settings.engines))}")
            by_rank = parse(body.decode(), specs)
            for slot in slots:
                rank = self._fleet.endpoint(slot).rank
                # Where one endpoint stands for several ranks the server spreads requests itself: they are one engine.
                whole = len(slots) == 1 and by_rank and (rank == 0 or rank not in by_rank)
                metrics = combined(by_rank.values()) if whole else by_rank.get(rank)
                if metrics is not None:
                    self._write(slot, metrics)
        else:
            read = self._settings.attributes[int(page.rpartition("-")[2])][1]
            for key, value in read(body.decode()).items():
                self._fleet.attribute(key)[slots] = value

    def _write(self, slot: int, metrics: EngineMetrics) -> None:
        fleet = self._fleet
        now = fleet.clock()
        fleet.scraped_at[slot] = now
        for name in ("waiting", "running", "kv_usage", "kv_capacity_tokens", "block_tokens"):
            value = getattr(metrics, name)
            if value is not None:
                getattr(fleet, name)[slot] = value
        if metrics.adapters is not None:
            fleet.adapters[slot] = metrics.adapters
        for key, value in metrics.custom.items():
            fleet.attribute(key)[slot] = value
        if self._books is not None and metrics.waiting is not None and metrics.running is not None:
            for request_id in self._books.reconcile(slot, metrics.waiting + metrics.running, now):
                log.warning("request_lost request_id=%s slot=%d reason=engine-idle", request_id, slot)
