"""The Kubernetes manifests as far as they can be checked without a cluster, and the sidecar against a small API server."""

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.endpoints_document import parse
from gateway.config import load
from gateway.envoy_binary import EnvoyNotFoundError, find_envoy

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
MODELS = FOLDER.parents[1] / "configs" / "models"


def documents(name: str) -> dict[tuple[str, str], Any]:
    return {(it["kind"], it["metadata"]["name"]): it for it in yaml.safe_load_all((FOLDER / name).read_text())}


def test_the_pickers_configuration_is_valid_with_the_images_paths_replaced(tmp_path: Path) -> None:
    text = (FOLDER / "picker-config.yaml").read_text().replace("/etc/warmroute/models", str(MODELS))
    (tmp_path / "picker.yaml").write_text(text)
    settings = load(tmp_path / "picker.yaml").settings
    container = picker()["containers"][0]
    assert {it["name"]: it["containerPort"] for it in container["ports"]} == {
        "grpc": settings.grpc_port,
        "metrics": settings.metrics_port,
    }
    assert container["readinessProbe"]["grpc"]["port"] == settings.grpc_port


def picker() -> Any:
    return documents("picker.yaml")["Deployment", "warmroute"]["spec"]["template"]["spec"]


def test_what_the_picker_mounts_and_runs_is_what_the_config_map_has() -> None:
    generated = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["configMapGenerator"][0]
    files = {entry.partition("=")[0] for entry in generated["files"]}
    spec = picker()
    volumes = {it["name"]: it for it in spec["volumes"]}
    assert volumes["config"]["configMap"]["name"] == generated["name"]
    for container in [*spec["initContainers"], *spec["containers"]]:
        mounts = {it["mountPath"]: it["name"] for it in container["volumeMounts"]}
        assert mounts["/etc/picker"] == "config"
        used = [word for word in [*container.get("command", []), *container.get("args", [])] if "/etc/picker/" in word]
        assert used
        assert {Path(word).name for word in used} <= files


def test_services_pools_and_routes_point_at_what_is_there() -> None:
    service = documents("picker.yaml")["Service", "warmroute"]
    assert (
        service["spec"]["selector"].items()
        <= documents("picker.yaml")["Deployment", "warmroute"]["spec"]["template"]["metadata"]["labels"].items()
    )
    pool = documents("gateway-api.yaml")["InferencePool", "vllm"]["spec"]
    assert pool["endpointPickerRef"]["name"] == service["metadata"]["name"]
    assert pool["endpointPickerRef"]["port"]["number"] in {it["port"] for it in service["spec"]["ports"]}
    engines = documents("vllm.yaml")["Deployment", "vllm"]["spec"]["template"]
    assert pool["selector"]["matchLabels"].items() <= engines["metadata"]["labels"].items()
    events = next(arg for arg in engines["spec"]["containers"][0]["args"] if arg.startswith("--kv-events-config="))
    assert json.loads(events.partition("=")[2])["replay_endpoint"] == "tcp://*:5657"


def test_envoys_configuration_is_what_the_command_writes_and_envoy_takes_it(tmp_path: Path) -> None:
    text = (FOLDER / "picker-config.yaml").read_text().replace("/etc/warmroute/models", str(MODELS))
    (tmp_path / "picker.yaml").write_text(text.replace("/run/warmroute/", ""))
    (tmp_path / "endpoints.json").write_text('{"endpoints": []}')
    written = run("-c", "from gateway.cli import main; main()", "envoy-config", "-c", tmp_path / "picker.yaml",
                  "--picker", "warmroute:9002", "--dynamic-hosts")  # fmt: skip
    assert written == (FOLDER / "envoy" / "envoy.yaml").read_text()
    try:
        envoy = find_envoy()
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    command = [envoy, "--mode", "validate", "-c", FOLDER / "envoy" / "envoy.yaml", "-l", "error"]
    subprocess.run(command, check=True, timeout=120)


def run(*arguments: str | Path, **environment: str) -> str:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, env=environment or None
    ).stdout


# The sidecar


def pod(name: str, **changed: Any) -> dict[str, Any]:
    meta = {"name": name, "namespace": "models", "labels": {"app": "vllm", "llm-d.ai/role": "decode"}, **changed}
    return {"metadata": meta, "status": {"podIP": "10.0.0.1", "phase": "Running"}}


@pytest.fixture
def cluster(free_port: Callable[[], int]) -> Iterator[tuple[str, list[dict[str, Any]], list[str]]]:
    """The pods of a namespace, as an API server lists them: its address, the pods, and what it was asked."""
    pods: list[dict[str, Any]] = []
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"items": pods}).encode())

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", pods, asked
    server.shutdown()


def test_the_sidecar_writes_what_discovery_reads(
    cluster: tuple[str, list[dict[str, Any]], list[str]], tmp_path: Path
) -> None:
    api, pods, asked = cluster
    pods += [pod("vllm-b", deletionTimestamp="2030-01-01T00:00:00Z"), pod("vllm-a"), pod("vllm-c"), pod("vllm-d")]
    pods[2]["status"] = {"phase": "Pending"}
    pods[3]["status"]["phase"] = "Failed"
    pods[1]["status"]["podIP"] = "10.0.0.2"
    out = tmp_path / "endpoints.json"
    run(FOLDER / "follow_pods.py", "--once", API=api, OUT=str(out), NAMESPACE="models", SELECTOR="app=vllm")
    assert asked == ["/api/v1/namespaces/models/pods?labelSelector=app%3Dvllm"]
    found = parse(out.read_text(), "endpoints.json")
    endpoints = {it.name: it for it in found.endpoints}
    assert set(endpoints) == {"vllm-a", "vllm-b"}
    first = endpoints["vllm-a"]
    assert (first.address, first.events, first.replay) == (
        "10.0.0.2:8000",
        "tcp://10.0.0.2:5557",
        "tcp://10.0.0.2:5657",
    )
    assert first.role is not None
    assert "draining" not in first.labels
    assert endpoints["vllm-b"].labels["draining"] == "true"


def test_an_api_server_that_is_down_leaves_the_file_as_it_was(free_port: Callable[[], int], tmp_path: Path) -> None:
    out = tmp_path / "endpoints.json"
    out.write_text("as it was")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run(FOLDER / "follow_pods.py", "--once", API=f"http://127.0.0.1:{free_port()}", OUT=str(out))
    assert "pods_unreadable" in caught.value.stderr
    assert out.read_text() == "as it was"
