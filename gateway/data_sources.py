"""From `dataLayer.sources` to what the scraper asks, how often, and how it reads the answers."""

import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fleet.plugin import Plugin
from fleet.scrape import ENGINES, EngineSpecs, Spec, spec
from fleet.scraper import ScrapeSettings, Source
from gateway.data_layer_config import (
    CoreMetricsExtractor,
    DataSource,
    DcgmDataSource,
    EngineMetricNames,
    MetricsDataSource,
    ModelsDataSource,
)

DCGM = Spec("DCGM_FI_DEV_GPU_UTIL")
METRICS_INTERVAL_S = 0.1
MODELS_INTERVAL_S = 10.0
DCGM_INTERVAL_S = 1.0


def scrape_settings(sources: Sequence[tuple[DataSource, tuple[Plugin, ...]]]) -> ScrapeSettings:
    """Without a models source /v1/models is asked all the same: it says which endpoint serves what."""
    metrics: Source | None = None
    models = Source(path="/v1/models", interval_s=MODELS_INTERVAL_S)
    attributes: list[tuple[Source, Callable[[str], Mapping[str, float]]]] = []
    engines: dict[str, EngineSpecs] = dict(ENGINES)
    label, default = "llm-d.ai/engine-type", "vllm"
    for source, extractors in sources:
        if isinstance(source, MetricsDataSource):
            metrics = _source(source.parameters, METRICS_INTERVAL_S)
        elif isinstance(source, ModelsDataSource):
            models = _source(source.parameters, MODELS_INTERVAL_S)
        elif isinstance(source, DcgmDataSource):
            attributes.append((_source(source.parameters, DCGM_INTERVAL_S), _gpu_utilization))
        for extractor in extractors:
            if isinstance(extractor, CoreMetricsExtractor):
                label, default = extractor.parameters.engine_label_key, extractor.parameters.default_engine
                engines |= {names.name: _specs(names) for names in extractor.parameters.engine_configs}
    return ScrapeSettings(
        metrics=metrics,
        models=models,
        attributes=tuple(attributes),
        engines=engines,
        engine_label=label,
        default_engine=default,
    )


def _source(parameters: Any, interval_s: float) -> Source:
    tls = None
    if parameters.scheme == "https" and not parameters.insecure_skip_verify:
        tls = ssl.create_default_context(cafile=parameters.ca_cert_path)
    if parameters.scheme == "https" and parameters.client_cert_path:
        if tls is None:
            tls = ssl.create_default_context()
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        tls.load_cert_chain(parameters.client_cert_path, parameters.client_key_path)
    return Source(
        path=parameters.path,
        interval_s=parameters.interval or interval_s,
        scheme=parameters.scheme,
        port=parameters.port,
        tls=tls,
    )


def _specs(names: EngineMetricNames) -> EngineSpecs:
    def given(text: str | None) -> Spec | None:
        return spec(text) if text else None

    return EngineSpecs(
        waiting=given(names.queued_requests_spec),
        running=given(names.running_requests_spec),
        kv_usage=given(names.kv_usage_spec),
        lora=given(names.lora_spec),
        cache_info=given(names.cache_info_spec),
        block_size_label=names.cache_block_size_label_name,
        blocks_label=names.cache_num_blocks_label_name,
        block_size=given(names.cache_block_size_spec),
        blocks=given(names.cache_num_blocks_spec),
        custom=tuple((metric.attribute_key, spec(metric.metric_spec)) for metric in names.custom_metrics),
    )


def _gpu_utilization(page: str) -> Mapping[str, float]:
    """The busiest GPU of an endpoint, 0..1."""
    values = [
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(DCGM.name + "{") and " " in line
    ]
    return {"GPUUtilization": max(values) / 100.0} if values else {}
