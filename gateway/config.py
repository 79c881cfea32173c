"""Loading an EndpointPickerConfig: from a file to plugins that are bound, checked and ready to schedule.

`load` returns a LoadedConfig or raises ConfigError with every problem that was found. What llm-d does silently (creating a
producer nobody asked for, ignoring a section) is done here with a warning or not at all; docs/configuration.md lists the
differences.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fleet.fleet import Fleet
from fleet.plugin import Discovery, Plugin, ProfileHandler
from gateway import config_endpoints, header_wiring
from gateway import config_wiring as wiring
from gateway.burst_producer import BurstPrefixCacheProducer
from gateway.config_decode import Decoder
from gateway.config_document import API_VERSION, FEATURE_GATES, KIND, OLD_API_VERSION, Document, Model, Settings
from gateway.config_plugins import Plugins
from gateway.config_source import ConfigError, Problem, Source, did_you_mean, read, read_file
from gateway.cycle import Profile, Scheduler
from gateway.data_layer_config import DataSource, Parser
from gateway.expected_work_queue import ExpectedWorkQueue
from gateway.plugin_modules import load_plugin_modules
from gateway.producers_config import PrecisePrefixCacheProducer, TokenProducer
from gateway.saturation import SaturationDetector
from gateway.work_queue import WorkQueue
from scorers.expected_work_scorer import ExpectedWorkScorer

DEFAULT_DOCUMENT = f"""\
apiVersion: {API_VERSION}
kind: {KIND}
plugins: []
"""
"""What runs without any configuration: one profile with the default scorer, and no endpoints."""

DECISION_MARGIN_S = 8.0
"""What understanding a request may take at worst: an engine that renders prompts takes seconds for its first one."""


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that can be run."""

    file: str
    document: Document
    plugins: dict[str, Plugin]
    """By name, injected ones included; bound to each other."""
    profiles: list[Profile]
    handler: ProfileHandler
    default_match: str
    """Name of the producer that is meant where a plugin names none (Request.default_match); "" where nobody asks."""
    token_producer: TokenProducer
    sources: list[tuple[DataSource, tuple[Plugin, ...]]]
    discovery: Discovery | None
    """None: the configuration says nothing about where endpoints come from."""
    parsers: list[Parser]
    detector: SaturationDetector
    queue: tuple[ExpectedWorkQueue, ExpectedWorkScorer] | None
    """The router queue and the scorer that prices for it; None: nothing waits here."""
    warnings: list[Problem]

    @property
    def settings(self) -> Settings:
        """The section `warmroute:`."""
        return self.document.warmroute

    @property
    def precise(self) -> PrecisePrefixCacheProducer | None:
        """The first precise producer; engines' events are needed only if there is one."""
        return next((p for p in self.plugins.values() if isinstance(p, PrecisePrefixCacheProducer)), None)

    @property
    def bursts(self) -> dict[str, BurstPrefixCacheProducer]:
        """The burst producers by name; their windows run side by side."""
        return {name: it for name, it in self.plugins.items() if isinstance(it, BurstPrefixCacheProducer)}

    def tokenizer_of(self, model: str) -> Path | None:
        """Directory of the model's tokenizer; None where prompts of this model are tokenized elsewhere or not at all."""
        known = self.settings.models.get(model)
        if known and known.tokenizer:
            return Path(known.tokenizer)
        local, name = self.token_producer.parameters.local, self.token_producer.parameters.model_name
        return Path(local.path) if local and name in (None, model) else None

    def scheduler(self, fleet: Fleet, make: type[Scheduler] = Scheduler) -> Scheduler:
        """The cycle over these profiles."""
        fallbacks = self.settings.fallback_endpoints
        return make(fleet, self.profiles, self.handler, self.plugins.values(), fallbacks, self.detector)

    @property
    def pricing(self) -> ExpectedWorkScorer | None:
        """The scorer whose constants say how long a prefill takes; None where no constants are given."""
        scorers = [it for it in self.plugins.values() if isinstance(it, ExpectedWorkScorer)]
        return self.queue[1] if self.queue else next(iter(scorers), None)

    def work_queue(self, fleet: Fleet) -> WorkQueue | None:
        """The router queue, empty; None where nothing waits."""
        return self.queue[0].queue(fleet, self.queue[1]) if self.queue else None

    @property
    def decision_limit_s(self) -> float:
        """Seconds after which a decision has gone wrong: understanding, waiting in a burst's window and in the queue, a
        prefill leg, and some more."""
        waiting = self.queue[0].parameters.max_wait if self.queue else 0.0
        leg = self.settings.handoff.timeout if self.settings.handoff.mode == "gateway" else 0.0
        window = max((producer.window_s for producer in self.bursts.values()), default=0.0)
        return window + waiting + leg + DECISION_MARGIN_S


def load(path: Path | str | None) -> LoadedConfig:
    """The configuration in a file, or the default one for None. Raises ConfigError with all problems."""
    return load_source(read(DEFAULT_DOCUMENT, "default configuration") if path is None else read_file(Path(path)))


def load_text(text: str, file: str = "configuration") -> LoadedConfig:
    """The configuration in a text; relative paths in it start from the folder of `file`. Raises ConfigError."""
    return load_source(read(text, file))


def validate(path: Path | str) -> tuple[list[Problem], list[Problem]]:
    """(problems, warnings) of the configuration in a file; without problems it can be served. What is wrong with the file
    that a file-discovery reads is a warning: something else writes it."""
    try:
        config = load(path)
        return [], [*config.warnings, *config_endpoints.endpoints_file(config.discovery)]
    except ConfigError as error:
        return error.problems, error.warnings


def load_source(source: Source) -> LoadedConfig:
    """A document that has been read, checked in full. Raises ConfigError with all problems."""
    failed = load_plugin_modules()
    decoder = Decoder(source)
    if not isinstance(source.value, dict):
        got = "an empty file" if source.value is None else "a list" if isinstance(source.value, list) else "a value"
        message = f"expected a mapping that begins with 'apiVersion: {API_VERSION}', got {got}"
        raise ConfigError([source.problem((), message)])
    if source.value.get("kind") == "ConfigMap":
        message = "expected 'EndpointPickerConfig', got 'ConfigMap': write what is under its data to a file of its own"
        raise ConfigError([source.problem(("kind",), message)])
    document = decoder.salvage(source.value, Document, ())
    if document is None:  # a required key is missing or hopeless; nothing below would make sense
        raise ConfigError(decoder.problems)

    plugins = Plugins(decoder)
    for name, error in failed.items():
        plugins.warn((), f"the plugin package behind entry point {name!r} could not be imported: {error}")
    _check_head(document, plugins)
    written = source.value["plugins"]
    plugins.declare(document.plugins, written)
    wiring.default_scorer(document, plugins)
    wiring.legacy_precise_scorer(plugins, written)
    default_match = wiring.producers(plugins)
    profiles = wiring.profiles(document, plugins)
    plugins.bind(written)
    header_wiring.header_readers(plugins)
    header_wiring.cache_sources(profiles, plugins)
    handler = wiring.handler(profiles, plugins)
    _check_models(document.warmroute, plugins)
    _check_ports(document.warmroute, plugins)
    config_endpoints.shared_sockets(plugins)
    has_tokenizers = any(model and model.tokenizer for model in document.warmroute.models.values())
    token_producer = wiring.token_producer(plugins, has_tokenizers)
    if token_producer.parameters.local:
        at = (*plugins.at[token_producer.name], "parameters", "local", "path")
        _check_tokenizer(token_producer.parameters.local.path, at, decoder)
    sources = wiring.sources(document, plugins)
    discovery = wiring.discovery(document, plugins)
    parsers = wiring.parsers(document, plugins)
    detector = wiring.detector(document, plugins)
    queue = wiring.queue(plugins)
    wiring.unused(plugins)

    if decoder.problems or handler is None or detector is None:
        raise ConfigError(_in_order(decoder.problems), _in_order(plugins.warnings))
    return LoadedConfig(
        file=source.file,
        document=document,
        plugins=plugins.instances,
        profiles=profiles,
        handler=handler,
        default_match=default_match,
        token_producer=token_producer,
        sources=sources,
        discovery=discovery,
        parsers=parsers,
        detector=detector,
        queue=queue,
        warnings=_in_order(plugins.warnings),
    )


def _check_head(document: Document, plugins: Plugins) -> None:
    """Version, kind, gates, and flow control, which we do not have."""
    report = plugins.decoder.report
    if document.api_version == OLD_API_VERSION:
        plugins.warn(("apiVersion",), f"{OLD_API_VERSION} is deprecated; write {API_VERSION}")
    elif document.api_version != API_VERSION:
        report(("apiVersion",), f"expected {API_VERSION!r}, got {document.api_version!r}")
    if document.kind != KIND:
        report(("kind",), f"expected {KIND!r}, got {document.kind!r}")
    gates: Sequence[str | None] = document.feature_gates
    for index, gate in enumerate(gates):
        at = ("featureGates", index)
        if gate is None:
            continue  # reported by the decoder
        name, equals, value = gate.partition("=")
        if name not in FEATURE_GATES:
            report(at, f"no feature gate {name!r}{did_you_mean(name, FEATURE_GATES)}")
        elif equals and value not in ("true", "false"):
            report(at, f"expected '{name}=true' or '{name}=false', got {gate!r}")
        elif name == "flowControl" and value != "false":
            report(at, "flow control is not supported: remove the gate; name an expected-work-queue to let requests "
                   "wait here, by priority (warmroute.objectives) and fairly between flows")  # fmt: skip
        elif name != "flowControl":
            plugins.warn(at, "has no effect: every router works on its own")
    flow = document.flow_control
    if flow and msgspec.structs.replace(flow, saturation_detector=None) != type(flow)():
        plugins.warn(("flowControl",), "has no effect without the gate flowControl, except saturationDetector")


def _check_ports(settings: Settings, plugins: Plugins) -> None:
    taken: dict[int, str] = {}
    for name, port in (
        ("grpcPort", settings.grpc_port),
        ("grpcHealthPort", settings.grpc_health_port),
        ("metricsPort", settings.metrics_port),
        ("adminPort", settings.admin_port),
    ):
        if port is not None and (other := taken.setdefault(port, name)) != name:
            plugins.decoder.report(
                ("warmroute", name), f"{port} is already warmroute.{other}; every port needs its own number"
            )


def _check_models(settings: Settings, plugins: Plugins) -> None:
    report, names = plugins.decoder.report, dict.fromkeys(settings.models, "a model's name")
    models: Mapping[str, Model | None] = settings.models
    for name, model in models.items():
        if model is None:
            continue  # reported by the decoder
        at = ("warmroute", "models", name)
        for index, alias in enumerate(model.aliases):
            if alias is not None and alias in names:
                report((*at, "aliases", index), f"{alias!r} is already {names[alias]}")
            names[alias] = f"an alias of {name!r}"
        if model.tokenizer:
            _check_tokenizer(model.tokenizer, (*at, "tokenizer"), plugins.decoder)


def _check_tokenizer(path: str, at: tuple[str | int, ...], decoder: Decoder) -> None:
    if Path(path).is_file():
        decoder.report(at, f"{path} is a file; expected the directory that holds it")
    elif not Path(path).is_dir():
        decoder.report(at, f"no directory {path}, and no such model in the local Hugging Face cache")
    elif not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer.json.xz")):
        decoder.report(at, f"{path} holds no tokenizer.json or tokenizer.json.xz")


def _in_order(problems: list[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
