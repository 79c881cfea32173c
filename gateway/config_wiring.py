"""What the plugins are connected to: profiles, producers, data sources, parsers, and what is added where nothing is named."""

from collections.abc import Sequence
from typing import Any

from deciders.cost_pd_decider import CostPdDecider
from deciders.isl_bounding_pd_decider import IslBoundingPdDecider
from deciders.lookup_table_pd_decider import LookupTablePdDecider
from fleet.plugin import Decider, Discovery, Filter, Picker, Plugin, Producer, ProfileHandler, Scorer
from gateway.burst_producer import BurstPrefixCacheProducer
from gateway.config_document import Document, ProfileEntry, Ref, WeightedRef
from gateway.config_plugins import Plugins
from gateway.config_source import At
from gateway.cycle import Profile
from gateway.data_layer_config import (
    DEFAULT_PARSERS,
    CoreMetricsExtractor,
    DataSource,
    Extractor,
    MetricsDataSource,
    Parser,
)
from gateway.expected_work_queue import ExpectedWorkQueue
from gateway.producers_config import ApproxPrefixCacheProducer, PrecisePrefixCacheProducer, TokenProducer
from gateway.profile_handlers import StagedHandler
from gateway.saturation import SaturationDetector
from scorers.expected_work_scorer import ExpectedWorkScorer
from scorers.inflight_load_producer import InFlightLoadProducer
from scorers.p2p_source_producer import P2PSourceProducer
from scorers.precise_prefix_cache_scorer import PrecisePrefixCacheScorer
from scorers.session_id_producer import SessionIdProducer

DEFAULT_SCORER = "expected-work-scorer"
DEFAULT_PICKER = "max-score-picker"
DEFAULT_HANDLER = "single-profile-handler"
DEFAULT_DETECTOR = "utilization-detector"
DEFAULT_MATCH = ApproxPrefixCacheProducer.type
NO_MATCHES = (TokenProducer, InFlightLoadProducer, SessionIdProducer, P2PSourceProducer)
"""Producers of something else."""
TAKE_THE_DEFAULT = (P2PSourceProducer, ExpectedWorkScorer, CostPdDecider, IslBoundingPdDecider, LookupTablePdDecider)
"""Readers of matches that do not come with a producer of their own: nobody expects another one than the precise one."""
INJECTED_PRODUCERS = (DEFAULT_MATCH, "inflight-load-producer", "token-producer")


def default_scorer(document: Document, plugins: Plugins) -> None:
    """Where neither profiles nor scorers are written, the one that needs no other beside it, and the queue before it."""
    if not document.scheduling_profiles and not plugins.of(Scorer) and not plugins.broken(Scorer):
        plugins.inject(DEFAULT_SCORER, Scorer)
        if not plugins.of(ExpectedWorkQueue) and not plugins.broken(ExpectedWorkQueue):
            plugins.inject(ExpectedWorkQueue.type, ExpectedWorkQueue)


def profiles(document: Document, plugins: Plugins) -> list[Profile]:
    """The profiles with their plugins, weights and pickers; one profile of everything where none is written."""
    entries: Sequence[ProfileEntry | None] = document.scheduling_profiles
    if not entries:
        kinds = (Filter, Scorer, Picker)
        refs = [WeightedRef(plugin_ref=name) for name, it in plugins.instances.items() if isinstance(it, kinds)]
        for name in plugins.of(SaturationDetector):
            plugins.warn((), f"the profile 'default' is made of all plugins, and {name!r} becomes a filter in it")
        entries = [ProfileEntry(name="default", plugins=refs)]
    bound: list[Profile] = []
    for index, entry in enumerate(entries):
        at: At = ("schedulingProfiles", index)
        if entry is None:
            continue
        if not entry.name:
            plugins.decoder.report((*at, "name"), "must not be empty")
        elif any(entry.name == other.name for other in bound):
            plugins.decoder.report((*at, "name"), f"there is already a profile {entry.name!r}")
        bound.append(_profile(entry, plugins, at))
    return bound


def _profile(entry: ProfileEntry, plugins: Plugins, at: At) -> Profile:
    filters: list[Filter] = []
    scorers: list[tuple[Scorer, float]] = []
    picker: Picker | None = None
    refs: Sequence[WeightedRef | None] = entry.plugins
    for index, ref in enumerate(refs):
        here = (*at, "plugins", index)
        found = plugins.find(ref.plugin_ref, Plugin, (*here, "pluginRef"), "a plugin") if ref else None
        if ref is None or found is None:
            continue
        if not isinstance(found, Filter | Scorer | Picker):
            message = f"{ref.plugin_ref!r} is of type {found.type!r}, which is not a filter, scorer or picker"
            plugins.decoder.report((*here, "pluginRef"), message)
            continue
        if ref.weight is not None and not isinstance(found, Scorer):
            plugins.warn((*here, "weight"), f"has no effect: {ref.plugin_ref!r} is not a scorer")
        if isinstance(found, Filter):
            filters.append(found)
        if isinstance(found, Scorer):
            scorers.append((found, 1.0 if ref.weight is None else ref.weight))
        if isinstance(found, Picker):
            if picker is not None:
                message = f"a second picker; {picker.name!r} is already there, keep one"
                plugins.decoder.report((*here, "pluginRef"), message)
            picker = picker or found
    if picker is None:
        declared = plugins.of(Picker)
        picker = next(iter(declared.values()), None) or plugins.inject(DEFAULT_PICKER, Picker)
        plugins.used.add(picker.name)
    return Profile(entry.name, tuple(filters), tuple(scorers), picker)


def handler(bound: Sequence[Profile], plugins: Plugins) -> ProfileHandler | None:
    """The one profile handler, told of its profiles. None after a report."""
    declared = plugins.of(ProfileHandler)
    names = [profile.name for profile in bound]
    if len(declared) > 1:
        first, second, *_ = declared
        plugins.decoder.report(plugins.at[second], f"a second profile handler; {first!r} is already there, keep one")
        return None
    if not declared and plugins.broken(ProfileHandler):
        return None
    if not declared and len(names) > 1:
        plugins.decoder.report(
            ("plugins",),
            f"{len(names)} profiles ({', '.join(names)}) need a profile handler, such as disagg-profile-handler or "
            "header-profile-handler",
        )
        return None
    found = next(iter(declared.values()), None) or plugins.inject(DEFAULT_HANDLER, ProfileHandler)
    if isinstance(found, StagedHandler):
        try:
            found.use_profiles(names)
        except ValueError as error:
            plugins.decoder.report((*plugins.at[found.name], "parameters"), str(error))
    return found


def legacy_precise_scorer(plugins: Plugins, written: Any) -> None:
    """Give llm-d's older all-in-one scorer its producer: the declared one, else one made of the scorer's parameters."""
    legacy = plugins.of(PrecisePrefixCacheScorer)
    for name in list(legacy)[1:]:
        plugins.decoder.report(plugins.at[name], f"a second {PrecisePrefixCacheScorer.type}; keep one")
    for name, scorer in legacy.items():
        at = (*plugins.at[name], "parameters")
        producer = next(iter(plugins.of(PrecisePrefixCacheProducer)), None)
        if producer:
            if scorer.parameters != type(scorer.parameters)():
                plugins.warn(at, f"not used: the configuration has {producer!r}")
        else:
            raw = written[plugins.at[name][1]].get("parameters")
            kind = PrecisePrefixCacheProducer
            parameters = plugins.decoder.decode(raw, kind.Parameters, at, any_case=True)
            producer = kind.type
            plugins.add(kind(producer, parameters or kind.Parameters()), plugins.at[name])
        plugins.instances[name] = PrecisePrefixCacheScorer(name, scorer.parameters, producer)


def producers(plugins: Plugins) -> str:
    """Check and complete what plugins read from producers. Returns the name of the default match producer, or ""."""
    unnamed: list[tuple[str, At]] = []
    for name, at, value in plugins.references("producer_name"):
        if value in INJECTED_PRODUCERS and value not in plugins.at:
            plugins.inject(value, Producer, at)
        elif value:
            found = plugins.find(value, Plugin, at, "a producer")
            if found and not isinstance(found, Producer | Extractor):
                plugins.decoder.report(at, f"{value!r} is of type {found.type!r}, which is not a producer")
            elif at[-1] == "prefixMatchInfoProducerName" and isinstance(found, NO_MATCHES):
                plugins.decoder.report(at, f"{value!r} is of type {found.type!r}, which finds no matches")
        elif at[-1] == "prefixMatchInfoProducerName" and not isinstance(plugins.instances[name], InFlightLoadProducer):
            unnamed.append((name, at))
    if DEFAULT_MATCH in plugins.at:
        if plugins.of(PrecisePrefixCacheProducer):
            for name, at in unnamed:
                plugins.warn(at, f"{name!r} names no producer and reads {DEFAULT_MATCH!r}, not the precise one")
        return DEFAULT_MATCH
    precise = next(iter(plugins.of(PrecisePrefixCacheProducer)), None)
    if precise:
        for name, at in unnamed:
            if not isinstance(plugins.instances[name], TAKE_THE_DEFAULT):
                plugins.warn(at, f"not given: {precise!r} is used (llm-d would create an approximate producer instead)")
        return precise
    approximate = next(iter(plugins.of(ApproxPrefixCacheProducer)), None)
    if approximate:
        return approximate
    return plugins.inject(DEFAULT_MATCH, Producer).name if unnamed else ""


def token_producer(plugins: Plugins, has_tokenizers: bool) -> TokenProducer:
    """The one token producer, whatever it is called; one with defaults where there is none."""
    declared = plugins.of(TokenProducer)
    if len(declared) > 1:
        chosen = TokenProducer.type if TokenProducer.type in declared else next(iter(declared))
        plugins.warn(("plugins",), f"{len(declared)} token producers ({', '.join(declared)}); {chosen!r} is used")
        found = declared[chosen]
    else:
        found = next(iter(declared.values()), None) or plugins.inject(TokenProducer.type, TokenProducer)
    kind = found.parameters.kind
    if plugins.broken(TokenProducer):
        return found
    if kind == "estimate" or (kind == "models" and not has_tokenizers):
        for name in plugins.of(PrecisePrefixCacheProducer):
            plugins.warn(
                plugins.at[name],
                f"{name!r} needs the engine's token ids to match anything, and prompts are only estimated; give the "
                "token-producer local: {path: DIR} or a vllm backend, or set warmroute.models",
            )
    return found


def sources(document: Document, plugins: Plugins) -> list[tuple[DataSource, tuple[Plugin, ...]]]:
    """Data sources with their extractors; the engine's metrics are added unless they are there or not wanted."""
    layer = document.data_layer
    wired: list[tuple[DataSource, tuple[Plugin, ...]]] = []
    for index, entry in enumerate(layer.sources):
        at: At = ("dataLayer", "sources", index)
        if entry is None:
            continue
        source = plugins.find(entry.plugin_ref, DataSource, (*at, "pluginRef"), "a data source")
        extractors: list[Plugin] = []
        for position, ref in enumerate(entry.extractors):
            here = (*at, "extractors", position, "pluginRef")
            found = plugins.find(ref.plugin_ref, Plugin, here, "an extractor") if ref else None
            if found and not isinstance(found, Extractor | Producer):
                plugins.decoder.report(here, f"{found.name!r} is of type {found.type!r}, which is not an extractor")
            elif found:
                extractors.append(found)
        if source:
            wired.append((source, tuple(extractors)))
    if layer.inject_defaults and not any(isinstance(source, MetricsDataSource) for source, _ in wired):
        declared = plugins.of(MetricsDataSource)
        metrics = next(iter(declared.values()), None) or plugins.inject(MetricsDataSource.type, MetricsDataSource)
        wired.append((metrics, (plugins.inject(CoreMetricsExtractor.type, CoreMetricsExtractor),)))
    for key, given in (
        ("peerDiscovery", layer.peer_discovery),
        ("crossReplicaSyncerPluginRef", layer.cross_replica_syncer_plugin_ref),
    ):
        if given is not None:
            plugins.decoder.report(("dataLayer", key), "not supported: routers share nothing yet; remove it")
    if layer.cross_replica_sync_interval is not None:
        plugins.warn(("dataLayer", "crossReplicaSyncInterval"), "has no effect: routers share nothing yet")
    return wired


def discovery(document: Document, plugins: Plugins) -> Discovery | None:
    """Where endpoints come from; None with a warning where nothing says."""
    if ref := document.data_layer.discovery:
        return plugins.find(ref.plugin_ref, Discovery, ("dataLayer", "discovery", "pluginRef"), "a discovery")
    declared = plugins.of(Discovery)
    if len(declared) == 1:
        name, found = next(iter(declared.items()))
        plugins.used.add(name)
        plugins.warn(("dataLayer",), f"no discovery is named: {name!r} is used; write discovery: {{pluginRef: {name}}}")
        return found
    if plugins.broken(Discovery):
        return None
    what = f"one of {', '.join(declared)}" if declared else "a static-discovery or file-discovery plugin"
    plugins.warn(
        ("dataLayer",), f"no discovery, so there are no endpoints: name {what} in dataLayer.discovery.pluginRef"
    )
    return None


def parsers(document: Document, plugins: Plugins) -> list[Parser]:
    """The parsers in their order; the usual four where none are named."""
    refs: list[tuple[At, Ref | None]] = [
        (("requestHandler", "parsers", index), ref) for index, ref in enumerate(document.request_handler.parsers)
    ]
    if document.parser:
        plugins.warn(("parser",), "deprecated: use requestHandler.parsers")
        refs = refs or [(("parser",), document.parser)]
    if not refs:
        return [plugins.inject(type_, Parser) for type_ in DEFAULT_PARSERS]
    found = [plugins.find(ref.plugin_ref, Parser, (*at, "pluginRef"), "a parser") for at, ref in refs if ref]
    return [parser for parser in found if parser]


def detector(document: Document, plugins: Plugins) -> SaturationDetector | None:
    """What says how full the fleet is."""
    at: At = ("flowControl", "saturationDetector", "pluginRef")
    ref = document.flow_control.saturation_detector if document.flow_control else None
    if document.saturation_detector:
        plugins.warn(("saturationDetector",), "deprecated: use flowControl.saturationDetector")
        if ref is None:
            ref, at = document.saturation_detector, ("saturationDetector", "pluginRef")
    if ref:
        return plugins.find(ref.plugin_ref, SaturationDetector, at, "a saturation detector")
    return plugins.inject(DEFAULT_DETECTOR, SaturationDetector)


def queue(plugins: Plugins) -> tuple[ExpectedWorkQueue, ExpectedWorkScorer] | None:
    """The router queue and the scorer that prices for it; None where it is not named, or after a report."""
    declared, scorers = plugins.of(ExpectedWorkQueue), plugins.of(ExpectedWorkScorer)
    if not declared:
        return None
    name, found = next(iter(declared.items()))
    for second in list(declared)[1:]:
        plugins.decoder.report(plugins.at[second], f"a second router queue; {name!r} is already there, keep one")
    if wanted := found.parameters.scorer_name:
        at = (*plugins.at[name], "parameters", "scorerName")
        scorer = plugins.find(wanted, ExpectedWorkScorer, at, "an expected-work-scorer")
        return (found, scorer) if scorer else None
    if len(scorers) != 1:
        what = (
            f"scorerName: one of {', '.join(scorers)}" if scorers else "an expected-work-scorer, which prices prompts"
        )
        if scorers or not plugins.broken(ExpectedWorkScorer):
            plugins.decoder.report(plugins.at[name], f"{name!r} needs {what}")
        return None
    return found, next(iter(scorers.values()))


def unused(plugins: Plugins) -> None:
    """Warn of filters, scorers, deciders and burst producers that nothing refers to, unless what was to do so is broken."""
    if plugins.broken():
        return
    for name, instance in plugins.instances.items():
        if name not in plugins.used and isinstance(instance, Filter | Scorer | Decider):
            plugins.warn(plugins.at[name], f"{name!r} is declared and never used")
    read = {value for name, _, value in plugins.references("match_info_producer_name") if name in plugins.used}
    for name in plugins.of(BurstPrefixCacheProducer):
        if name not in read:
            message = f"nothing reads {name!r}, so it holds no request: name it in a prefix-cache-scorer of a profile"
            plugins.warn(plugins.at[name], f"{message} (prefixMatchInfoProducerName)")
