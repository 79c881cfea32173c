"""Where facts about endpoints come from (sources, extractors) and which request bodies are understood (parsers).

Like the producers these are parameters; fleet's scraper and the gateway's request parsing do the work.
Source: llm-d-router data layer and parsers of snapshot ebab68792.
"""

from typing import Annotated, Literal

from msgspec import Meta

from fleet import plugin
from fleet.plugin import Plugin
from fleet.scrape import spec
from gateway.config_decode import Duration, Path


class DataSource(Plugin):
    """Something that `dataLayer.sources` can name."""


class Extractor(Plugin):
    """Something that a source's `extractors` can name."""


class Parser(Plugin):
    """Something that `requestHandler.parsers` can name."""

    paths: tuple[str, ...] = ()
    """Suffixes of request paths that it understands."""


class _HttpSource(plugin.Parameters, frozen=True, kw_only=True):
    scheme: Annotated[Literal["http", "https"], Meta(description="How to ask.")] = "http"
    port: Annotated[int | None, Meta(ge=1, le=65535, description="The endpoint's own unless given.")] = None
    insecure_skip_verify: Annotated[bool, Meta(description="Do not check the server's certificate.")] = True
    ca_cert_path: Annotated[Path | None, Meta(description="CA to check it with.")] = None
    client_cert_path: Annotated[Path | None, Meta(description="Our certificate, where the engine wants one.")] = None
    client_key_path: Annotated[Path | None, Meta(description="Its key.")] = None
    interval: Annotated[Duration | None, Meta(description="How often; the scraper's default unless given.")] = None


class MetricsDataSource(DataSource, type="metrics-data-source"):
    """Ask every endpoint for its Prometheus metrics.

    Added by itself unless `dataLayer.injectDefaults` is false or a source of this type is listed under any name.
    Source: llm-d-router metrics-data-source.
    """

    class Parameters(_HttpSource, frozen=True, kw_only=True):
        path: Annotated[str, Meta(description="Where the metrics are.")] = "/metrics"

    parameters: Parameters


class CustomMetric(plugin.Parameters, frozen=True, kw_only=True):
    attribute_key: str
    metric_spec: str

    def __post_init__(self) -> None:
        spec(self.metric_spec)


class EngineMetricNames(plugin.Parameters, frozen=True, kw_only=True):
    """Metric specs are `name` or `name{label=value,...}`."""

    name: str
    queued_requests_spec: str | None = None
    running_requests_spec: str | None = None
    kv_usage_spec: str | None = None
    lora_spec: str | None = None
    cache_info_spec: str | None = None
    cache_block_size_label_name: str = "block_size"
    cache_num_blocks_label_name: str = "num_gpu_blocks"
    cache_block_size_spec: str | None = None
    cache_num_blocks_spec: str | None = None
    custom_metrics: tuple[CustomMetric, ...] = ()

    def __post_init__(self) -> None:
        for text in (
            *(self.queued_requests_spec, self.running_requests_spec, self.kv_usage_spec, self.lora_spec),
            *(self.cache_info_spec, self.cache_block_size_spec, self.cache_num_blocks_spec),
        ):
            if text is not None:
                spec(text)


class CoreMetricsExtractor(Extractor, type="core-metrics-extractor"):
    """Read queue length, running requests, cache usage and cache size from an engine's metrics.

    The names of vLLM and SGLang are built in; `engineConfigs` adds engines or redefines them.
    Source: llm-d-router core-metrics-extractor.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        engine_label_key: Annotated[str, Meta(description="Label that names an endpoint's engine.")] = (
            "llm-d.ai/engine-type"
        )
        default_engine: Annotated[str, Meta(description="Engine of endpoints without the label.")] = "vllm"
        engine_configs: Annotated[tuple[EngineMetricNames, ...], Meta(description="Metric names by engine.")] = ()

    parameters: Parameters


class ModelsDataSource(DataSource, type="models-data-source"):
    """Ask every endpoint which models it serves.

    Source: llm-d-router models-data-source.
    """

    class Parameters(_HttpSource, frozen=True, kw_only=True):
        path: Annotated[str, Meta(description="Where the list is.")] = "/v1/models"

    parameters: Parameters


class ModelsDataExtractor(Extractor, type="models-data-extractor"):
    """Read model and adapter names from /v1/models.

    Source: llm-d-router models-data-extractor.
    """


class DcgmDataSource(DataSource, type="dcgm-data-source"):
    """Ask the DCGM exporter beside every endpoint for GPU metrics.

    Source: llm-d-router dcgm-data-source.
    """

    class Parameters(_HttpSource, frozen=True, kw_only=True):
        path: Annotated[str, Meta(description="Where the metrics are.")] = "/metrics"
        port: Annotated[int, Meta(ge=1, le=65535, description="Port of the exporter.")] = 9400
        use_node_address: Annotated[bool, Meta(description="Refused: endpoints here have no node address.")] = False

        def __post_init__(self) -> None:
            if self.use_node_address:
                raise ValueError("useNodeAddress: endpoints have one address here; run the exporter beside the engine")

    parameters: Parameters


class DcgmExtractor(Extractor, type="dcgm-extractor"):
    """Read the attribute `GPUUtilization`, the highest DCGM_FI_DEV_GPU_UTIL of an endpoint as 0..1.

    Source: llm-d-router dcgm-extractor.
    """


class TopologyExtractor(Extractor, type="topology-extractor"):
    """Say which labels name an endpoint's host, rack, zone and region.

    Source: llm-d-router topology-extractor; the labels are the endpoint's own here, not its node's.
    """

    class Parameters(plugin.Parameters, frozen=True, kw_only=True):
        hostname: Annotated[str, Meta(description="Label with the host.")] = "kubernetes.io/hostname"
        rack: Annotated[str, Meta(description="Label with the rack.")] = "topology.kubernetes.io/rack"
        zone: Annotated[str, Meta(description="Label with the zone.")] = "topology.kubernetes.io/zone"
        region: Annotated[str, Meta(description="Label with the region.")] = "topology.kubernetes.io/region"

    parameters: Parameters


class EndpointNotificationSource(DataSource, type="endpoint-notification-source"):
    """Tell extractors, such as the precise producer, when endpoints come and go.

    Here the precise producer always hears of endpoints; the source is accepted so that configurations load unchanged.
    Source: llm-d-router endpoint-notification-source.
    """


class OpenaiParser(Parser, type="openai-parser"):
    """Understand OpenAI's APIs: chat completions, completions, responses, embeddings, conversations, images."""

    paths = (
        *("/chat/completions", "/chat/completions/render", "/completions", "/completions/render", "/responses"),
        *("/conversations", "/embeddings", "/images/generations"),
    )


class AnthropicParser(Parser, type="anthropic-parser"):
    """Understand Anthropic's messages API and its token counting."""

    paths = ("/v1/messages", "/v1/messages/count_tokens")


class VllmhttpParser(Parser, type="vllmhttp-parser"):
    """Understand vLLM's /inference/v1/generate: token ids in, token ids out."""

    paths = ("inference/v1/generate",)


class PassthroughParser(Parser, type="passthrough-parser"):
    """Accept every path and body without looking into it; such requests are routed by load."""

    paths = ("",)


DEFAULT_PARSERS = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "passthrough-parser")
