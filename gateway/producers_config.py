"""Producers: what fills a request's tokens, matches and load before the cycle, as far as it can be configured.

These classes are parameters. The request path of the gateway reads them and does the work (tokenizing, looking up the
index, keeping the books), because that work waits, and the cycle does not.
Source: llm-d-router, data producers of snapshot ebab68792.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from fleet import plugin
from fleet.endpoint import Endpoint
from fleet.plugin import Producer
from gateway.config_decode import Duration, ModelDirectory, Quantity

# token-producer


class Estimate(plugin.Parameters, frozen=True, kw_only=True):
    """Placeholder counts per image, video and audio clip are read for compatibility: text alone is estimated here."""

    image: Annotated[dict[str, object] | None, Meta(description="Accepted, without effect.")] = None
    video: Annotated[dict[str, object] | None, Meta(description="Accepted, without effect.")] = None
    audio: Annotated[dict[str, object] | None, Meta(description="Accepted, without effect.")] = None


class Render(plugin.Parameters, frozen=True, kw_only=True):
    url: Annotated[str, Meta(description="Base URL of an engine or render server.")] = "http://localhost:8000"
    timeout: Annotated[Duration, Meta(gt=0, description="For text.")] = 5.0
    mm_timeout: Annotated[Duration, Meta(gt=0, description="For requests with images, audio or video.")] = 30.0


class Local(plugin.Parameters, frozen=True, kw_only=True):
    path: Annotated[
        ModelDirectory,
        Meta(
            description="Directory with tokenizer.json (or .xz) and the chat template, or a model in the Hugging Face cache."
        ),
    ]


class TokenProducer(Producer, type="token-producer"):
    """Turn prompts into token ids, as the engine will.

    Backends: `local` tokenizes in this process with the model's own tokenizer and chat template (ours; the fastest and
    the recommended one), `vllm` asks an engine's /render routes, `estimate` counts four bytes as a token and can never
    match what engines announce. Without any of them the directories under `warmroute.models` are used, and `estimate`
    where there are none. All consumers use this producer whatever its name is.
    Source: llm-d-router token-producer; `local` is ours.
    """

    aliases = ("tokenizer",)

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        backend: Annotated[
            Literal["estimate", "vllm", "local"] | None, Meta(description="Follows from what else is given.")
        ] = None
        model_name: Annotated[str | None, Meta(description="Model for rendering; alone it selects `vllm`.")] = None
        local: Annotated[Local | None, Meta(description="Tokenize here, with the files in `path`.")] = None
        vllm: Annotated[Render | None, Meta(description="Ask an engine to render and tokenize.")] = None
        estimate: Annotated[Estimate | None, Meta(description="Guess: four bytes are a token.")] = None
        uds_tokenizer_config: Annotated[
            dict[str, object] | None, Meta(description="Refused: the sidecar tokenizer is gone; use `local`.")
        ] = None

        def __post_init__(self) -> None:
            if self.uds_tokenizer_config is not None:
                raise ValueError("udsTokenizerConfig: the tokenizer sidecar is not supported; use local: {path: DIR}")
            given = [name for name in ("local", "vllm", "estimate") if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"more than one backend: {' and '.join(given)}; keep one")
            if self.backend and given and given != [self.backend]:
                raise ValueError(f"backend is {self.backend!r} but {given[0]!r} is configured; keep one")
            if self.backend == "local" and not self.local:
                raise ValueError("backend 'local' needs local: {path: DIR}")
            if self.kind == "vllm" and not self.model_name:
                raise ValueError("the vllm backend needs modelName")

        @property
        def kind(self) -> Literal["local", "vllm", "estimate", "models"]:
            """The backend; `models` where none is named: `warmroute.models` decides, else an estimate."""
            if self.backend:
                return self.backend
            if self.local:
                return "local"
            if self.vllm or (self.model_name and not self.estimate):
                return "vllm"
            return "estimate" if self.estimate else "models"

    parameters: Parameters


# precise-prefix-cache-producer


class TokenProcessor(plugin.Parameters, frozen=True, kw_only=True):
    older: ClassVar[Mapping[str, str]] = {"block_size": "blockSizeTokens"}

    block_size_tokens: Annotated[
        int | None, Meta(ge=0, description="Tokens per block of the index; the engine's own block size unless given.")
    ] = None
    block_size: Annotated[int | None, Meta(ge=0, description="Older spelling of blockSizeTokens.")] = None
    hash_seed: Annotated[str, Meta(description="Accepted, without effect: keys are recomputed from tokens.")] = ""
    hash_algorithm: Annotated[
        Literal["cbor-fnv", "xxh64"], Meta(description="Accepted, without effect: keys are private to the router.")
    ] = "cbor-fnv"

    def __post_init__(self) -> None:
        if self.block_size and self.block_size_tokens and self.block_size != self.block_size_tokens:
            raise ValueError("blockSize is the older spelling of blockSizeTokens; give one of them")


class InMemory(plugin.Parameters, frozen=True, kw_only=True):
    size: Annotated[Quantity | None, Meta(description="Most keys; `warmroute.index.maxKeys` unless given.")] = None
    pod_cache_size: Annotated[
        int | None, Meta(ge=1, description="Most endpoints per key; `warmroute.index.maxHolders` unless given.")
    ] = None


class CostAware(plugin.Parameters, frozen=True, kw_only=True):
    size: Annotated[Quantity, Meta(description="Byte budget; becomes a number of keys.")] = 2 * 2**30


class BlockIndex(plugin.Parameters, frozen=True, kw_only=True):
    in_memory_config: InMemory | None = None
    cost_aware_memory_config: CostAware | None = None
    redis_config: Annotated[dict[str, object] | None, Meta(description="Refused: the index is in memory.")] = None
    enable_metrics: Annotated[bool, Meta(description="Accepted: the index's metrics are always on.")] = False
    metrics_logging_interval: Annotated[int, Meta(description="Accepted, without effect.")] = 0
    max_prefix_tokens_to_match: Annotated[int, Meta(description="Accepted, without effect.")] = 0

    def __post_init__(self) -> None:
        if self.redis_config is not None:
            raise ValueError("redisConfig: a shared index in Redis is not supported; remove it, the index is in memory")


class Tier(plugin.Parameters, frozen=True, kw_only=True):
    name: str
    weight: Annotated[float, Meta(ge=0, le=1)]


class Indexer(plugin.Parameters, frozen=True, kw_only=True):
    kv_block_index_config: BlockIndex = BlockIndex()
    kv_cache_backend_configs: Annotated[
        tuple[Tier, ...], Meta(description="What a cached token is worth by its tier; unknown tiers count 1.0.")
    ] = ()
    token_processor_config: Annotated[
        TokenProcessor | None, Meta(description="Older place of tokenProcessorConfig.")
    ] = None
    tokenizers_pool_config: Annotated[dict[str, object] | None, Meta(description="Refused: use a token-producer.")] = (
        None
    )

    def __post_init__(self) -> None:
        if self.tokenizers_pool_config is not None:
            raise ValueError("tokenizersPoolConfig: tokenizers belong to a token-producer plugin; move it there")


class PodDiscovery(plugin.Parameters, frozen=True, kw_only=True):
    pod_label_selector: Annotated[str, Meta(description="Accepted, without effect.")] = (
        "llm-d.ai/inference-serving=true"
    )
    pod_namespace: Annotated[str, Meta(description="Accepted, without effect.")] = ""
    socket_port: Annotated[int, Meta(ge=1, le=65535, description="Events of rank 0; rank n is at + n.")] = 5557
    replay_socket_port: Annotated[
        int | None, Meta(ge=1, le=65535, description="Replay of rank 0; without it gaps cannot be repaired.")
    ] = None


class KvEvents(plugin.Parameters, frozen=True, kw_only=True):
    zmq_endpoint: Annotated[str, Meta(description="One socket to bind, which all engines connect to.")] = ""
    topic_filter: Annotated[str, Meta(description="Subscription prefix of that socket.")] = "kv@"
    concurrency: Annotated[int, Meta(ge=1, description="Accepted, without effect.")] = 4
    engine_type: Literal["vllm", "sglang"] = "vllm"
    discover_pods: Annotated[bool, Meta(description="Connect to every endpoint's event socket.")] = True
    pod_discovery_config: PodDiscovery = PodDiscovery()


class PrecisePrefixCacheProducer(Producer, type="precise-prefix-cache-producer"):
    """Say how much of a prompt each endpoint holds, from the engines' own KV-cache events.

    Use it with a token-producer whose tokens are the engine's (`local` or `vllm`). The index works at the engine's block
    size; naming another one costs nothing in accuracy but gives coarser matches.
    Source: llm-d-router precise-prefix-cache-producer.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        token_processor_config: TokenProcessor = TokenProcessor()
        indexer_config: Indexer = Indexer()
        kv_events_config: KvEvents = KvEvents()
        speculative_indexing: Annotated[
            bool,
            Meta(
                description="Blocks of a prompt that was just sent count as held there, for every plugin, until the engine "
                "announces them or speculativeTTL passes. Without it they count only for work (expected-work-scorer)."
            ),
        ] = False
        speculative_ttl: Annotated[Duration, Meta(gt=0, description="How long that is believed without an event.")] = (
            msgspec.field(name="speculativeTTL", default=2.0)
        )

    parameters: Parameters

    @property
    def block_tokens(self) -> int | None:
        """The configured block size in tokens; None: the engine's own."""
        given = self.parameters.token_processor_config
        older = self.parameters.indexer_config.token_processor_config or TokenProcessor()
        return given.block_size_tokens or given.block_size or older.block_size_tokens or older.block_size or None

    @property
    def max_keys(self) -> int | None:
        index = self.parameters.indexer_config.kv_block_index_config
        if index.cost_aware_memory_config:
            return max(1, index.cost_aware_memory_config.size // 200)  # bytes that our index needs per key, about
        return index.in_memory_config.size if index.in_memory_config else None

    @property
    def max_holders(self) -> int | None:
        index = self.parameters.indexer_config.kv_block_index_config
        return index.in_memory_config.pod_cache_size if index.in_memory_config else None

    @property
    def tier_weights(self) -> dict[str, float]:
        """Lower-case tier name -> weight, as far as given."""
        return {tier.name.lower(): tier.weight for tier in self.parameters.indexer_config.kv_cache_backend_configs}

    def stream_of(self, endpoint: Endpoint) -> tuple[str, str | None] | None:
        """(event address, replay address) of an endpoint that names none itself; None where pods are not discovered."""
        events = self.parameters.kv_events_config
        if not events.discover_pods or events.zmq_endpoint:
            return None
        host, ports = endpoint.address.rpartition(":")[0], events.pod_discovery_config
        replay = ports.replay_socket_port
        return (
            f"tcp://{host}:{ports.socket_port + endpoint.rank}",
            f"tcp://{host}:{replay + endpoint.rank}" if replay else None,
        )


class ApproxPrefixCacheProducer(Producer, type="approx-prefix-cache-producer"):
    """Guess how much of a prompt each endpoint holds, from what this router has sent there.

    Use it where engines publish no events. It is added by itself where a plugin asks for matches and nothing produces them.
    With `autoTune` blocks are as large as the first endpoint's, and as many are remembered per endpoint as fit into its cache,
    as last scraped; the parameters count until that is known. Only full blocks match, and only from the prompt's beginning.
    Source: llm-d-router approx-prefix-cache-producer, where a block has at least 64 tokens.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        older: ClassVar[Mapping[str, str]] = {"block_size": "blockSizeTokens"}

        auto_tune: Annotated[bool, Meta(description="Take block size and capacity from the engines' metrics.")] = True
        block_size_tokens: Annotated[int, Meta(ge=1, description="Tokens per block.")] = 16
        block_size: Annotated[int | None, Meta(ge=1, description="Older spelling of blockSizeTokens.")] = None
        max_prefix_tokens_to_match: Annotated[int, Meta(ge=0, description="Longest prefix looked at.")] = 131072
        max_prefix_blocks_to_match: Annotated[
            int, Meta(ge=0, description="The same in blocks; used where the former is 0. Both 0: no limit.")
        ] = 2048
        lru_capacity_per_server: Annotated[int, Meta(ge=1, description="Blocks remembered per endpoint.")] = 31250

    parameters: Parameters

    @property
    def block_tokens(self) -> int:
        return self.parameters.block_size or self.parameters.block_size_tokens

    @property
    def max_tokens(self) -> int | None:
        """The longest prefix to look at, in tokens; None without a limit."""
        return (
            self.parameters.max_prefix_tokens_to_match
            or self.parameters.max_prefix_blocks_to_match * self.block_tokens
            or None
        )
