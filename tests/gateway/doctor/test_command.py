"""`warmroute doctor` as people call it."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


async def doctor(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout, stderr of a process of its own."""
    command: Sequence[str] = (sys.executable, "-c", "from gateway.cli import main; main()", "doctor", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


def written(world: Any, folder: Path) -> str:
    file = folder / "fleet.yaml"
    file.write_text(yaml.safe_dump(world.document()))
    return str(file)


async def test_an_invalid_configuration_cannot_be_examined(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: nonsense}]\n")
    status, out, errors = await doctor("-c", str(file))
    assert (status, out) == (2, "")
    assert "nonsense" in errors


async def test_an_envoy_file_that_is_none_is_refused(world: Any, tmp_path: Path) -> None:
    await world.engine()
    envoy = tmp_path / "envoy.yaml"
    envoy.write_text("clusters: []\n")
    status, _, errors = await doctor("-c", written(world, tmp_path), "--envoy", str(envoy))
    assert (status, errors.splitlines()[-1]) == (
        2,
        f"error: {envoy}: no static_resources; expected an Envoy bootstrap file or a saved /config_dump",
    )


async def test_findings_are_printed_with_evidence_and_fix(world: Any, tmp_path: Path) -> None:
    engine = await world.engine()
    right, engine.entry["events"] = engine.entry["events"], world.free_port()
    status, out, _ = await doctor("-c", written(world, tmp_path))
    assert status == 1
    assert "FOUND    every stream is connected to its own engine" in out
    assert "\nerror: wrong-event-port: engine-0\n  seen  tcp://127.0.0.1:" in out
    assert f"\n  fix   write events: {right} at endpoint 'engine-0' (" in out
    assert "\n  more  docs/troubleshooting.md#wrong-event-port\n" in out
    skipped = out.count(";", out.index("\nskipped"), out.index("\nerror:"))
    assert skipped > 1, "no gateway and no Envoy were asked for"
    assert re.search(r"\n1 finding, but \d+ checks were skipped\n$", out), "a clean bill of half of it is none"


async def test_a_healthy_fleet_ends_with_zero_and_json_for_machines(world: Any, tmp_path: Path) -> None:
    await world.engine()
    status, out, errors = await doctor("-c", written(world, tmp_path), "--json")
    report = json.loads(out)
    assert (status, report["findings"], errors) == (0, [], "")
    assert {"id": "event-wires", "title": "every stream is connected to its own engine", "ok": True, "skipped": ""} in (
        report["checks"]
    )
    skipped = next(checked for checked in report["checks"] if checked["id"] == "trust")
    assert skipped["ok"] is None
    assert "the gateway is not running" in skipped["skipped"]


async def test_findings_in_json_have_all_fields(world: Any, tmp_path: Path) -> None:
    await world.engine(events=None, replay=None)
    status, out, _ = await doctor("-c", written(world, tmp_path), "--json", "--no-requests")
    (finding,) = json.loads(out)["findings"]
    assert (status, finding["id"], finding["severity"], finding["where"]) == (
        1,
        "events-not-enabled",
        "error",
        "engine-0",
    )
    assert set(finding) == {"id", "severity", "where", "evidence", "fix"}
