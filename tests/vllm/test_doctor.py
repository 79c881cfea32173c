"""The doctor in front of real engines: what it knows of vLLM's pages and events is so."""

from pathlib import Path
from typing import Any

from gateway.config import load
from gateway.doctor.examination import examine, gather
from gateway.doctor.findings import Report


async def report_on(fleet: Any) -> Report:
    folder: Path = fleet.folder
    return await examine(load(folder / "warmroute.yaml"), folder / "envoy.yaml")


async def test_real_engines_behind_a_gateway_get_a_clean_bill(real: Any) -> None:
    report = await report_on(real)
    # The template is Qwen3's, which drops think blocks: the one thing that is so.
    assert [finding.id for finding in report.findings] == ["template-rewrites-history"]
    facts = await gather(load(real.folder / "warmroute.yaml"))
    for probe in facts.probes:
        assert list(probe.engine_ids) == list(probe.router_ids)
        assert probe.cached[0] is not None
    assert all(engine.sources and engine.sources[0].enabled for engine in facts.engines.values())


async def test_adapters_and_hybrid_engines_get_a_clean_bill(mixed: Any) -> None:
    report = await report_on(mixed)
    assert {finding.id for finding in report.findings} <= {"template-rewrites-history"}
