"""`python -m bench.peers` as a person starts it, with a router of our own as the peer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.envoy_binary import EnvoyNotFoundError, find_envoy

REPOSITORY = Path(__file__).resolve().parents[2]
ROUND_ROBIN = f"mine={sys.executable} {Path(__file__).with_name('round_robin.py')} {{port}} {{engines}}"


def bench(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "bench.peers", *options]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--other", "mine=router --port {port}"], "expected NAME=COMMAND, where the command has {port} and {engines}"),
        (["--routers", "warmrout"], "no router named warmrout; there are warmroute, vllm-router:kv_aware"),
    ],
)
def test_a_router_that_cannot_be_started_is_refused_before_anything_runs(options: list[str], message: str) -> None:
    refused = bench(*options)
    assert refused.returncode == 1
    assert message in refused.stderr


@pytest.mark.envoy
def test_routers_play_the_same_traffic_side_by_side(tmp_path: Path) -> None:
    try:
        find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    file = tmp_path / "rows.json"
    names = ["conversations", "engine-killed"]
    played = bench(
        *("--other", ROUND_ROBIN, "--scenarios", *names, "--engines", "2", "--size", "0.1", "--speed", "4"),
        *("--logs", str(tmp_path / "logs"), "--json", str(file)),
    )
    assert played.returncode == 0, played.stdout + played.stderr
    assert "smg:cache_aware: left out, --smg was not given" in played.stdout
    report = json.loads(file.read_text())
    rows: dict[tuple[str, str], dict[str, Any]] = {(row["scenario"], row["router"]): row for row in report["rows"]}
    assert set(rows) == {(name, router) for name in names for router in ("warmroute", "mine")}
    for (name, _), row in rows.items():
        assert row["complete"]
        answered = sum(row["served"].values())
        assert row["requests"] == answered + sum(row["errors"].values())
        assert set(row["served"]) == {"engine-0", "engine-1"}
        assert 0 < row["cached_share"] < 1
        assert 0 < row["ttft_ms"]["p50"] <= row["ttft_ms"]["p90"] <= row["ttft_ms"]["p99"]
        assert sum(row["usage"]["cpu_ms"].values()) > 0
        assert min(row["usage"]["rss_mb"].values()) > 1
        assert len(row["phases"]) == (3 if name == "engine-killed" else 1)
    assert set(rows["conversations", "warmroute"]["usage"]["cpu_ms"]) == {"gateway", "Envoy"}
    same = [rows["conversations", router] for router in ("warmroute", "mine")]
    assert [(row["requests"], row["errors"]) for row in same] == [(15, {}), (15, {})]
    assert same[0]["prompt_tokens"] == same[1]["prompt_tokens"]  # the same questions and histories
    served = rows["conversations", "mine"]["served"]
    assert abs(served["engine-0"] - served["engine-1"]) <= 1
