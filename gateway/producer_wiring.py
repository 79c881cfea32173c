"""What the producers' parameters mean for the index, its weights, the approximate caches and the burst windows."""

from fleet.fleet import Fleet
from fleet.plugin import HeaderReader
from gateway.approximate import ApproximateCache
from gateway.burst_room import BurstRoom
from gateway.config import LoadedConfig
from gateway.metrics import Metrics
from gateway.producers import Producers
from gateway.producers_config import ApproxPrefixCacheProducer, PrecisePrefixCacheProducer
from indexer.index import Index
from indexer.matched import DEFAULT_WEIGHTS
from indexer.predicted import Predicted
from indexer.tier import NAMES
from scorers.inflight_load_producer import InFlightLoadProducer


def index_of(config: LoadedConfig) -> Index:
    """An index of the configured size: the precise producer's own settings first, then `warmroute.index`."""
    settings, precise = config.settings.index, config.precise
    max_keys = (precise.max_keys if precise else None) or settings.max_keys
    max_holders = (precise.max_holders if precise else None) or settings.max_holders
    return Index(max_keys=max(64, max_keys), max_holders=max_holders)


def weights_of(config: LoadedConfig) -> tuple[float, ...]:
    """What a cached token is worth per tier, fastest first."""
    given = {**config.settings.index.tier_weights, **(config.precise.tier_weights if config.precise else {})}
    return tuple(given.get(name.lower(), default) for name, default in zip(NAMES, DEFAULT_WEIGHTS, strict=False))


def predicted_of(config: LoadedConfig) -> Predicted | None:
    """Where to remember what was just sent, for `speculativeIndexing`; None where it is off."""
    if config.precise is None or not config.precise.parameters.speculative_indexing:
        return None
    return Predicted(ttl_s=config.precise.parameters.speculative_ttl)


def producers_of(config: LoadedConfig, fleet: Fleet) -> Producers:
    """The producer instances by what they produce; burst windows are extra (`bursts_of`), since they make requests wait."""
    precise: list[str] = []
    approximate: dict[str, ApproximateCache] = {}
    for name, plugin in config.plugins.items():
        if isinstance(plugin, PrecisePrefixCacheProducer):
            precise.append(name)
        elif isinstance(plugin, ApproxPrefixCacheProducer):
            given = plugin.parameters
            approximate[name] = ApproximateCache(
                fleet,
                plugin.block_tokens,
                given.lru_capacity_per_server,
                plugin.max_tokens,
                follows_engines=given.auto_tune,
            )
    readers = tuple(plugin for plugin in config.plugins.values() if isinstance(plugin, HeaderReader))
    return Producers(
        precise=tuple(precise),
        approximate=approximate,
        default=config.default_match,
        booked=_booked(config),
        readers=readers,
    )


def _booked(config: LoadedConfig) -> str:
    """Whoever reads the books' tokens as work names the match that they are counted by: the scorer that prices, else llm-d's
    in-flight load."""
    counts = [plugin for plugin in config.plugins.values() if isinstance(plugin, InFlightLoadProducer)]
    named = [it.parameters.prefix_match_info_producer_name for it in (config.pricing, *counts) if it is not None]
    return next((name for name in named if name), "")


def bursts_of(config: LoadedConfig, fleet: Fleet, metrics: Metrics) -> dict[str, BurstRoom]:
    """An empty window for every burst producer whose match some profile reads."""
    rooms: dict[str, BurstRoom] = {}
    for name, producer in config.bursts.items():
        readers = frozenset(
            plugin.name
            for profile in config.profiles
            for plugin in (*profile.filters, *(scorer for scorer, _ in profile.scorers))
            if getattr(plugin.parameters, "prefix_match_info_producer_name", None) == name
        )
        if readers:
            rooms[name] = BurstRoom(
                name,
                fleet,
                metrics,
                rules=producer.rules,
                window_s=producer.window_s,
                most=producer.most,
                max_blocks=producer.max_blocks,
                readers=readers,
            )
    return rooms
