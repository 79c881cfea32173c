"""What the producers' parameters mean for the index, its weights and the approximate caches."""

from fleet.fleet import Fleet
from fleet.plugin import HeaderReader
from gateway.approximate import ApproximateCache
from gateway.config import LoadedConfig
from gateway.producers import Producers
from gateway.producers_config import ApproxPrefixCacheProducer, BurstPrefixCacheProducer, PrecisePrefixCacheProducer
from indexer.index import Index
from indexer.matched import DEFAULT_WEIGHTS
from indexer.predicted import Predicted
from indexer.tier import NAMES

BURST_CAPACITY = 31250
"""Blocks per endpoint that a burst producer remembers: llm-d's default for its approximate sibling."""


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
    """The producer instances by what they produce."""
    precise: list[str] = []
    approximate: dict[str, ApproximateCache] = {}
    for name, plugin in config.plugins.items():
        if isinstance(plugin, PrecisePrefixCacheProducer):
            precise.append(name)
        elif isinstance(plugin, ApproxPrefixCacheProducer):
            capacity = plugin.parameters.lru_capacity_per_server
            approximate[name] = ApproximateCache(fleet, plugin.block_tokens, capacity, plugin.max_tokens)
        elif isinstance(plugin, BurstPrefixCacheProducer):
            limits = plugin.parameters
            most = limits.max_prefix_tokens_to_match or None
            approximate[name] = ApproximateCache(fleet, limits.block_size_tokens, BURST_CAPACITY, most)
    readers = tuple(plugin for plugin in config.plugins.values() if isinstance(plugin, HeaderReader))
    return Producers(precise=tuple(precise), approximate=approximate, default=config.default_match, readers=readers)
