"""One decision without a fleet: the request path over what a dump says, or over what the configuration says."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from fleet.books import Books
from fleet.breaker import Breaker
from fleet.fleet import Fleet
from gateway.config import LoadedConfig
from gateway.decision_log import DecisionLog
from gateway.extproc.decision import Head, Rejected
from gateway.fleet_dump import DumpedStreams, FleetDump, restore
from gateway.matching import Matcher
from gateway.metrics import Metrics
from gateway.producer_wiring import index_of, producers_of, weights_of
from gateway.request_path import RequestPath, Settings
from gateway.served_models import ServedModels
from gateway.template_knowledge import TemplateKnowledge
from gateway.tokenizers import Tokenizers
from gateway.tracing import NoTracing
from gateway.understanding import Understanding
from indexer.trust import Reason, Trust, blind

PATIENCE_S = 30.0
"""For the tokenizer: nobody waits here, and the first request of a process is its slowest."""


class Refused(Exception):
    """The request was answered before anything was decided; the message says with what."""


class NoAccuracy:
    def confirmed(
        self, slot: int, keys: Any, prompt_tokens: int, predicted: int, cached: int, decided_at: float
    ) -> None:
        """Nothing is ever sent, so nothing is ever confirmed."""


class NoStreams(DumpedStreams):
    """Without a dump nobody has heard anything."""

    def __init__(self) -> None:
        super().__init__({})

    def block_tokens(self, slot: int) -> int:
        return 0

    def engine_block_tokens(self, slot: int) -> int:
        return 0

    def layout(self, slot: int) -> Any:
        return ()

    def trust(self, slot: int) -> Trust:
        return blind(Reason.NO_EVENTS, 0.0, "no dump was given")


async def explain_offline(
    config: LoadedConfig, body: bytes, path: str, headers: Mapping[str, str], dump: FleetDump | None
) -> dict[str, Any]:
    """What `gateway.explain` says of the decision, and in `blind` why it was made without tokens, if it was.

    Raises Refused, DumpError, TokenizerError, OSError and ValueError (discovery).
    """
    fleet, index = Fleet(), index_of(config)
    if dump is not None:
        streams = restore(dump, fleet, index)
    else:
        streams = NoStreams()
        await _discover(config, fleet)
    metrics = Metrics(CollectorRegistry())
    models = ServedModels(config.settings.models, fleet)
    tokenizers = await Tokenizers.load(config)
    templates = TemplateKnowledge(metrics)
    await templates.learn(config.settings.models, tokenizers.local())
    log = DecisionLog(fleet, streams.trust)
    log.pricing = config.pricing
    tracing = NoTracing()
    request_path = RequestPath(
        fleet=fleet,
        books=Books(fleet),
        breaker=Breaker(fleet),
        models=models,
        matcher=Matcher(
            fleet,
            index,
            streams,
            weights_of(config),
            layout_of=streams.layout,
            engine_block_of=streams.engine_block_tokens,
        ),
        scheduler=config.scheduler(fleet),
        producers=producers_of(config, fleet),
        understanding=Understanding(models, tokenizers.backend, PATIENCE_S, metrics, tracing, fleet.clock),
        accuracy=NoAccuracy(),
        trust=streams.trust,
        metrics=metrics,
        tracing=tracing,
        settings=Settings(objectives=config.settings.objectives),
        rewrites_history=templates.rewrites_history,
        decisions=log,
    )
    head = Head(
        method="POST",
        path=path,
        headers={"content-type": "application/json", **headers},
        request_id=headers.get("x-request-id") or str(uuid.uuid4()),
    )
    try:
        answer = await asyncio.wait_for(request_path.decide(head, body), 2 * PATIENCE_S)
    finally:
        await tokenizers.close()
    kept = log.find(head.request_id)
    if kept is None:
        assert isinstance(answer, Rejected)
        raise Refused(f"{answer.status}: {answer.message}")
    return kept.told() | {"blind": _blind(metrics)}


async def _discover(config: LoadedConfig, fleet: Fleet) -> None:
    if config.discovery is None:
        return
    async for found in config.discovery.changes():
        for endpoint in found.endpoints:
            fleet.add(endpoint)
        return


def _blind(metrics: Metrics) -> str | None:
    for family in metrics.blind.collect():
        for sample in family.samples:
            if sample.name.endswith("_total") and sample.value:
                return str(sample.labels["reason"])
    return None
