"""A model server's /metrics page -> numbers. Pure: bytes in, one struct per data-parallel rank out.

A vLLM page has several hundred lines of which six matter, and it is read many times a second, so the lines are chosen by
name before the Prometheus parser sees them.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from fleet.fleet import Adapters


class Spec(msgspec.Struct, frozen=True):
    """Which series to read: a metric's name and labels that must be equal."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def covers(self, sample: Sample) -> bool:
        return sample.name == self.name and all(sample.labels.get(key) == value for key, value in self.labels)


def spec(text: str) -> Spec:
    """`name` or `name{label=value,...}`, values quoted or not. ValueError says what was expected."""
    found = re.fullmatch(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(.*)\})?\s*", text)
    labels = []
    for part in (found[2] or "").split(",") if found else ():
        if not part.strip():
            continue
        pair = re.fullmatch(r"\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(\"[^\"]*\"|[^\"=]*)\s*", part)
        if pair is None:
            found = None
            break
        labels.append((pair[1], pair[2].strip().strip('"')))
    if found is None:
        raise ValueError(f"expected a metric such as vllm:num_requests_waiting or name{{label=value}}, got {text!r}")
    return Spec(found[1], tuple(labels))


class EngineSpecs(msgspec.Struct, frozen=True, kw_only=True):
    """Where one kind of engine puts what the router reads. None: it does not tell."""

    waiting: Spec | None = None
    running: Spec | None = None
    kv_usage: Spec | None = None
    lora: Spec | None = None
    cache_info: Spec | None = None
    """An info series whose labels hold block size and number of blocks."""
    block_size_label: str = "block_size"
    blocks_label: str = "num_gpu_blocks"
    block_size: Spec | None = None
    """A series whose value is the block size, for engines without an info series."""
    blocks: Spec | None = None
    custom: tuple[tuple[str, Spec], ...] = ()
    """Attribute key -> series, for endpoint-attribute-scorer and -filter."""
    rank_label: str = "engine"
    """The label that tells data-parallel ranks apart; a series without it belongs to rank 0."""

    def names(self) -> frozenset[str]:
        """All metric names that are read."""
        single = (self.waiting, self.running, self.kv_usage, self.lora, self.cache_info, self.block_size, self.blocks)
        return frozenset(item.name for item in (*single, *(custom for _, custom in self.custom)) if item)


VLLM = EngineSpecs(
    waiting=Spec("vllm:num_requests_waiting"),
    running=Spec("vllm:num_requests_running"),
    kv_usage=Spec("vllm:kv_cache_usage_perc"),
    lora=Spec("vllm:lora_requests_info"),
    cache_info=Spec("vllm:cache_config_info"),
)
SGLANG = EngineSpecs(
    waiting=Spec("sglang:num_queue_reqs"),
    running=Spec("sglang:num_running_reqs"),
    kv_usage=Spec("sglang:token_usage"),
    cache_info=Spec("sglang:cache_config_info"),
    block_size_label="page_size",
    blocks_label="num_pages",
    rank_label="dp_rank",
)
ENGINES: Mapping[str, EngineSpecs] = {"vllm": VLLM, "sglang": SGLANG}


class EngineMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's numbers; None where the page does not have them."""

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    """Share of the KV cache in use by requests, 0..1."""
    block_tokens: int | None = None
    """Tokens per block as events count them."""
    kv_capacity_tokens: float | None = None
    adapters: Adapters | None = None
    custom: Mapping[str, float] = {}


def parse(page: str, specs: EngineSpecs) -> dict[int, EngineMetrics]:
    """Rank -> metrics. Empty where the page has none of the series. ValueError where a line that is read is malformed."""
    by_rank: dict[int, list[Sample]] = {}
    for sample in _samples(page, specs.names()):
        rank = sample.labels.get(specs.rank_label, "")
        by_rank.setdefault(int(rank) if rank.isdecimal() else 0, []).append(sample)
    return {rank: _metrics(samples, specs) for rank, samples in by_rank.items()}


def combined(ranks: Iterable[EngineMetrics]) -> EngineMetrics:
    """Several ranks behind one endpoint, as one engine: requests and capacity add up, usage is the mean."""
    every = list(ranks)
    if len(every) == 1:
        return every[0]

    def known(name: str) -> list[float]:
        return [value for metrics in every if (value := getattr(metrics, name)) is not None]

    usage = known("kv_usage")
    adapters = [metrics.adapters for metrics in every if metrics.adapters is not None]
    return EngineMetrics(
        waiting=sum(known("waiting")) if known("waiting") else None,
        running=sum(known("running")) if known("running") else None,
        kv_usage=sum(usage) / len(usage) if usage else None,
        block_tokens=next((metrics.block_tokens for metrics in every if metrics.block_tokens), None),
        kv_capacity_tokens=sum(known("kv_capacity_tokens")) or None,
        adapters=adapters[0] if adapters else None,
        custom={key: value for metrics in every for key, value in metrics.custom.items()},
    )


def gpu_utilization(page: str) -> dict[str, float]:
    """A DCGM exporter's page as the attribute GPUUtilization: the busiest GPU, 0..1. Empty where the page has none."""
    busiest = _value(list(_samples(page, ["DCGM_FI_DEV_GPU_UTIL"])), Spec("DCGM_FI_DEV_GPU_UTIL"))
    return {} if busiest is None else {"GPUUtilization": busiest / 100.0}


def _samples(page: str, names: Iterable[str]) -> Iterable[Sample]:
    wanted = tuple(names)
    lines = [
        line
        for line in page.splitlines()
        if line.startswith(wanted) and re.split(r"[{\s]", line, maxsplit=1)[0] in wanted
    ]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        yield from family.samples


def _metrics(samples: list[Sample], specs: EngineSpecs) -> EngineMetrics:
    info = _info(samples, specs.cache_info)
    # What events count in: the hash block size where the engine has one of its own, else the block size.
    block = _integer(info.get("hash_block_size")) or _integer(info.get(specs.block_size_label))
    own_block = _integer(info.get(specs.block_size_label))
    blocks = _integer(info.get(specs.blocks_label))
    if block is None and (value := _value(samples, specs.block_size)):
        block = own_block = int(value)
    if blocks is None and (value := _value(samples, specs.blocks)):
        blocks = int(value)
    capacity = _integer(info.get("kv_cache_size_tokens")) or (blocks * own_block if blocks and own_block else None)
    values = {key: _value(samples, item) for key, item in specs.custom}
    return EngineMetrics(
        waiting=_value(samples, specs.waiting),
        running=_value(samples, specs.running),
        kv_usage=_value(samples, specs.kv_usage),
        block_tokens=block,
        kv_capacity_tokens=capacity,
        adapters=_adapters(samples, specs.lora),
        custom={key: value for key, value in values.items() if value is not None},
    )


def _value(samples: list[Sample], wanted: Spec | None) -> float | None:
    # The largest of equal claims: tensor-parallel workers may repeat a number, and a sum would count it twice.
    values = [sample.value for sample in samples if sample.value == sample.value and wanted and wanted.covers(sample)]
    return max(values, default=None)


def _info(samples: list[Sample], wanted: Spec | None) -> Mapping[str, str]:
    return next((sample.labels for sample in samples if wanted and wanted.covers(sample)), {})


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None  # unset ones are the text "None"


def _adapters(samples: list[Sample], wanted: Spec | None) -> Adapters | None:
    # A new set of adapters is a new series, the old ones stay; the value is the time of the last change.
    latest = max(
        (sample for sample in samples if wanted and wanted.covers(sample)), key=lambda item: item.value, default=None
    )
    if latest is None:
        return None

    def names(label: str) -> frozenset[str]:
        return frozenset(name.strip() for name in latest.labels.get(label, "").split(",") if name.strip())

    return Adapters(
        running=names("running_lora_adapters"),
        waiting=names("waiting_lora_adapters"),
        most=_integer(latest.labels.get("max_lora")) or 0,
    )
