"""The running gateway: everything made from one configuration, started and stopped in order.

    start   tokenizers -> fleet (first look) -> streams, scraper -> metrics port -> gRPC port -> SERVING
    stop    NOT_SERVING -> drain -> gRPC port -> streams, scraper, discovery -> metrics port -> tokenizers

A reload makes new plugins, profiles and tokenizers beside the old ones and swaps them between two requests; fleet, books
and index stay, and so does what plugins of the same name remember. What only a restart can change (ports, TLS, index size) is
said in the log.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.fleet import Fleet
from fleet.scraper import Scraper
from gateway import housekeeping
from gateway.admin_access import token_required
from gateway.approximate import ApproximateCache
from gateway.compatibility_metrics import CompatibilityMetrics
from gateway.config import LoadedConfig, load
from gateway.config_page import config_page
from gateway.config_source import ConfigError
from gateway.cycle import Scheduler
from gateway.data_sources import scrape_settings
from gateway.decision_log import DecisionLog
from gateway.departed_series import DepartedSeries
from gateway.departure import Departures
from gateway.dump_page import dump_page
from gateway.event_streams import EventStreams
from gateway.explain_page import decisions_page
from gateway.extproc.grpc_server import Server
from gateway.extproc.server_tls import TlsError
from gateway.fleet_follower import FleetFollower, look
from gateway.handoff import Handoffs
from gateway.http_server import BoundApp, admin_app, metrics_app
from gateway.listening import PortTaken, check_ports, server_settings
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.parity_watch import ParityWatch
from gateway.part_metrics import PartCollector
from gateway.parts import GatewayParts
from gateway.picture import GatewayPicture
from gateway.picture_metrics import PictureCollector
from gateway.prefill_leg import PrefillLegs
from gateway.prefill_progress import PrefillProgress
from gateway.producer_wiring import bursts_of, index_of, predicted_of, producers_of, weights_of
from gateway.producers import Producers
from gateway.request_path import RequestPath, Settings
from gateway.restart_only import needs_restart
from gateway.scrape_view import ScrapeView
from gateway.served_models import ServedModels
from gateway.template_knowledge import TemplateKnowledge
from gateway.tokenizers import TokenizerError, Tokenizers
from gateway.traced_cycle import TracedScheduler
from gateway.tracing import NoTracing, OtlpTracing, Tracing
from gateway.understanding import Understanding
from gateway.waiting_room import WaitingRoom
from gateway.watching import Watching

log = logging.getLogger(__name__)

NOTHING_SENT: Mapping[str, ApproximateCache] = {}
NO_DISCOVERY = "the configuration names no discovery, so there are no endpoints; add static-discovery or file-discovery"


class StartError(Exception):
    """The gateway cannot start; the message says what and where."""


class Gateway:
    """One process's endpoint picker."""

    def __init__(self, config: LoadedConfig, config_file: Path | None = None) -> None:
        settings = config.settings
        self._config, self._config_file = config, config_file
        self._started_with = config
        self.fleet = Fleet()
        self.books = Books(self.fleet)
        self.breaker = Breaker(self.fleet)
        self.index = index_of(config)
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self.metrics = Metrics(self.registry)
        self._departed = DepartedSeries(self.fleet, self.metrics)
        self.models = ServedModels(settings.models, self.fleet)
        self.predicted = predicted_of(config)
        self.streams = EventStreams(self.fleet, self.index, self.models, config, self.predicted)
        self.picture = GatewayPicture(self.fleet, self.index, self.streams)
        self._tracing: Tracing = OtlpTracing(settings.tracing.endpoint) if settings.tracing.enabled else NoTracing()
        self._tokenizers = Tokenizers()
        self._understanding = Understanding(
            self.models, self._tokenizers.backend, settings.decide_timeout, self.metrics, self._tracing, time.monotonic
        )
        self._legs = PrefillLegs()
        self._departures = Departures(self.metrics)
        self._use_departures(config)
        self._templates = TemplateKnowledge(self.metrics)
        self.room = WaitingRoom(self.fleet, self.metrics)
        self.books.when_freed.append(self.room.freed)
        matcher = Matcher(
            self.fleet,
            self.index,
            self.streams,
            weights_of(config),
            layout_of=self.streams.layout,
            engine_block_of=self.streams.engine_block_tokens if self.streams.has_own_block_size else None,
            dynamo=self.streams.dynamo.slots if self.streams.dynamo else None,
            predicted=self.predicted,
        )
        self._progress = PrefillProgress(
            self.fleet, self.books, lambda slot, key: self.index.tier_of(slot, key) is not None, matcher.block_tokens
        )
        self._use_queue(config)
        self._parity = ParityWatch(self.index, self.metrics, self.streams.trust)
        self.streams.on_stored = self._parity.stored
        self.fleet.when_released.append(self._parity.released)
        self.watch = Watching(
            self.fleet, self.streams, self.metrics.alarm, matcher.block_tokens, precise=config.precise is not None
        )
        self.picture.watch = self.watch
        self.path = RequestPath(
            fleet=self.fleet,
            books=self.books,
            breaker=self.breaker,
            models=self.models,
            matcher=matcher,
            scheduler=self._scheduler(config),
            producers=self._producers(config),
            understanding=self._understanding,
            accuracy=self.watch,
            trust=self.streams.trust,
            metrics=self.metrics,
            tracing=self._tracing,
            settings=_path_settings(config),
            departures=self._departures,
            rewrites_history=self._templates.rewrites_history,
            room=self.room,
            parity=self._parity,
            decoder=lambda served: self._tokenizers.decoder(served),
        )
        self._use_decisions(config)
        self.path.sending.budget.per_second = settings.reply_pieces_per_second
        self.picture.routed = self.path.record.last
        self.path.record.on_matched = self.watch.routed
        self._scraper: Scraper | None = None
        parts = GatewayParts(
            books=self.books,
            breaker=self.breaker,
            chains=matcher.chains,
            backends=lambda: self._tokenizers.backends(),
            scraper=lambda: self._scraper,
            extproc=lambda: self._server.service.counts if self._server else Counter(),
            transport=lambda: (self._server.transport, self._server.settings.transport) if self._server else None,
            event_errors=lambda: self.streams.errors,
            predicted=self.predicted,
            dynamo=self.streams.dynamo,
        )
        self._scraped = ScrapeView(self.picture, parts)
        self.registry.register(PictureCollector(self._scraped))
        self.registry.register(PartCollector(self._scraped))
        if settings.compatibility_metrics:
            CompatibilityMetrics(self.registry, self.metrics, self._scraped, self._scraped)
        self._server: Server | None = None
        self._pages: list[BoundApp] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._reloading: asyncio.Task[None] | None = None
        self._reload_wanted = False
        self.when_reloaded: Callable[[], None] = lambda: None
        """Called when a new configuration is in force and the old one's parts are closed."""
        self._quick_chores: list[housekeeping.Chore] = [self.breaker.tick, self._parity.tick, self._progress.tick]
        if self.predicted is not None:
            self._quick_chores.append(self.predicted.expire)
        self._chores: list[housekeeping.Chore] = [
            housekeeping.expiry(self.books),
            lambda _: self.streams.follow_models(),
            self._departed.tick,
            lambda _: self.watch.tick(),
            housekeeping.when_changed(config_file, self.reload),
        ]
        self._follower = FleetFollower(self.fleet, self.streams)
        self._probing: asyncio.Task[None] | None = None
        self._serving = False

    async def start(self) -> None:
        """Come up and take requests. Raises StartError; call `stop` then too."""
        settings = self._config.settings
        try:
            check_ports(settings)
            first = await look(self._config.discovery) if self._config.discovery else None
            if first is None:
                log.warning("no_endpoints reason=%r", NO_DISCOVERY)
            self._use_tokenizers(await Tokenizers.load(self._config), self._config)
            self._follower.use(first)
            self.streams.start()
            self._scraper = Scraper(self.fleet, scrape_settings(self._config.sources), self.books)
            self._tasks = [
                self._task(self._scraper.run(), "scraper"),
                self._task(housekeeping.upkeep(self._chores), "housekeeping"),
                self._task(self._follower.run(), "discovery"),
                self._task(housekeeping.pulse(self._quick_chores), "pulse"),
            ]
            await self._open_pages()
            self._server = Server(self.path, server_settings(self._config))
            await self._server.start()
        except (PortTaken, TokenizerError, TlsError, OSError, ValueError) as error:
            raise StartError(str(error)) from error
        self.path.scheduler.on_failure = self._plugin_failed
        self.metrics.streams_open.set_function(lambda: float(self._server.service.open_streams if self._server else 0))
        self._serving = True
        await self._server.set_serving(True)
        log.info(
            "serving grpc_port=%d metrics_port=%d endpoints=%d",
            self._server.port,
            settings.metrics_port,
            len(self.fleet.slots()),
        )

    async def stop(self) -> None:
        """Say NOT_SERVING, end burst windows, turn away who waits in the queue, let running requests finish within
        `drainTimeout`, then close everything."""
        served, self._serving = self._serving, False
        self.path.producers.close()
        self.room.close()
        if self._server is not None:
            await (self._server.drain() if served else self._server.stop())
        for task in (*self._tasks, self._reloading, self._probing):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await asyncio.to_thread(self.streams.stop)
        for page in self._pages:
            await page.stop()
        await self._legs.close()
        await self._tokenizers.close()
        await asyncio.to_thread(self._tracing.close)
        log.info("stopped")

    def reload(self) -> None:
        """Read the configuration file again (SIGHUP). What is invalid is logged and changes nothing; asked for again while it
        is being done, it is done once more."""
        if self._config_file is None:
            return
        self._reload_wanted = True
        if self._reloading is None or self._reloading.done():
            self._reloading = self._task(self._reload_until_current(self._config_file), "reload")

    async def _reload_until_current(self, file: Path) -> None:
        while self._reload_wanted:
            self._reload_wanted = False
            log.info("config_reloading file=%s", file)
            await self._reload(file)

    async def _reload(self, file: Path) -> None:
        try:
            config = await asyncio.to_thread(load, file)
            scheduler, scraping = self._scheduler(config), scrape_settings(config.sources)
            first = await look(config.discovery) if config.discovery else None
            tokenizers = await Tokenizers.load(config, self._tokenizers)
        except Exception as error:
            self.metrics.reloads.labels("refused").inc()
            known = isinstance(error, ConfigError | TokenizerError | OSError | ValueError)
            log.error("config_refused file=%s kept=old error=%s", file, error, exc_info=None if known else error)
            return
        for setting in needs_restart(self._started_with, config):
            log.warning("config_needs_restart setting=%s", setting)
        for name, plugin in config.plugins.items():
            if type(there := self._config.plugins.get(name)) is type(plugin):
                plugin.take_over(there)
        before = self._tokenizers
        self._use_tokenizers(tokenizers, config)
        self.models.configure(config.settings.models)
        self.path.scheduler = scheduler
        self.path.scheduler.on_failure = self._plugin_failed
        if self._scraper is not None:
            self._scraper.use(scraping)
        retired, self.path.producers = self.path.producers, self._producers(config, self.path.producers.approximate)
        retired.close()
        self.path.settings = _path_settings(config)
        self.path.sending.budget.per_second = config.settings.reply_pieces_per_second
        self._use_queue(config)
        if self._server is not None:
            self._server.service.decide_timeout_s = config.decision_limit_s
        self._use_departures(config)
        self._use_decisions(config)
        self._config = config
        self._follower.use(first)
        await before.close(keep=tokenizers)
        self.when_reloaded()
        self.metrics.reloads.labels("ok").inc()
        log.info("config_reloaded file=%s profiles=%d", file, len(config.profiles))

    def _use_tokenizers(self, tokenizers: Tokenizers, config: LoadedConfig) -> None:
        self._tokenizers = tokenizers
        self._understanding.tokenizers = tokenizers.backend
        self._understanding.timeout_s = max(config.settings.decide_timeout, tokenizers.budget_s)
        if self._probing is not None:
            self._probing.cancel()
        learning = self._templates.learn(config.settings.models, tokenizers.local())
        self._probing = self._task(learning, "template-probe")

    def _use_decisions(self, config: LoadedConfig) -> None:
        if not config.settings.explain:
            self.path.decisions = None
            return
        if self.path.decisions is None:
            self.path.decisions = DecisionLog(self.fleet, self.streams.trust)
        self.path.decisions.pricing = config.pricing

    def _use_departures(self, config: LoadedConfig) -> None:
        settings, departures = config.settings, self._departures
        departures.forward_token_ids = settings.forward_token_ids
        departures.handoffs = None
        if settings.handoff.mode == "gateway":
            departures.handoffs = Handoffs(
                settings.handoff,
                self._legs,
                self.fleet,
                self.books,
                self.breaker,
                self.metrics,
                time.monotonic,
                tell_clients=settings.response_headers,
            )

    def _scheduler(self, config: LoadedConfig) -> Scheduler:
        if isinstance(self._tracing, NoTracing):
            return config.scheduler(self.fleet)
        scheduler = config.scheduler(self.fleet, TracedScheduler)
        assert isinstance(scheduler, TracedScheduler)
        scheduler.tracing = self._tracing
        return scheduler

    def _producers(self, config: LoadedConfig, before: Mapping[str, ApproximateCache] = NOTHING_SENT) -> Producers:
        made = producers_of(config, self.fleet)
        approximate = {
            name: old if (old := before.get(name)) is not None and old.is_like(new) else new
            for name, new in made.approximate.items()
        }
        bursts = bursts_of(config, self.fleet, self.metrics)
        return msgspec.structs.replace(made, approximate=approximate, bursts=bursts)

    def _plugin_failed(self, plugin: str, doing: str) -> None:
        self.metrics.plugin_errors.labels(plugin).inc()

    def _use_queue(self, config: LoadedConfig) -> None:
        self._progress.scorer = config.pricing
        self.room.use(config.work_queue(self.fleet))

    async def _open_pages(self) -> None:
        settings = self._config.settings
        self._scraped.bind(asyncio.get_running_loop())
        wanted = [(metrics_app(self.registry, lambda: self._serving), settings.metrics_listen, settings.metrics_port)]
        if settings.admin_port is not None:
            pages = [
                decisions_page(lambda: self.path.decisions),
                dump_page(self.fleet, self.index, self.streams, self.streams.layout, self.streams.engine_block_tokens),
                config_page(lambda: self._config),
            ]
            admin = admin_app(self.picture.sections(), pages, [token_required(lambda: self._config.settings)])
            wanted.append((admin, settings.admin_listen, settings.admin_port))
        for app, host, port in wanted:
            page = BoundApp(app, host, port)
            try:
                await page.start()
            except OSError as error:
                raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
            self._pages.append(page)

    def _task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(_report)
        task.add_done_callback(self.watch.ended)
        return task


def _report(task: asyncio.Task[None]) -> None:
    """A background task that dies must not die silently."""
    if not task.cancelled() and (error := task.exception()):
        log.critical("task_died task=%s", task.get_name(), exc_info=error)


def _path_settings(config: LoadedConfig) -> Settings:
    return Settings(response_headers=config.settings.response_headers, objectives=config.settings.objectives)
