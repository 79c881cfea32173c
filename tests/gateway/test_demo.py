"""`warmroute demo` as a person starts it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(logs: Path, port: int, *options: str, **environment: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", "from gateway.cli import main; main()", "demo", "--port", str(port)]
    return subprocess.Popen(
        [*command, "--logs", str(logs), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def children_of(pid: int) -> dict[int, str]:
    """Process ids and command lines of everything that a process started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue  # it ended while we looked
            if parent == pid:
                found[int(entry.name)] = command
    return found


def wait_for(true: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"did not become true within {seconds} s"
        time.sleep(0.1)


def test_a_taken_port_is_exit_code_2_and_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        demo = start(tmp_path / "logs", port, WARMROUTE_ENVOY="/bin/true")
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert f"demo: port {port} on 127.0.0.1 cannot be used" in output
    assert not (tmp_path / "logs").exists()


def test_a_missing_envoy_is_exit_code_2_and_says_how_to_get_one(tmp_path: Path, free_port: Callable[[], int]) -> None:
    demo = start(tmp_path, free_port(), WARMROUTE_ENVOY="/nonexistent/envoy")
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert "WARMROUTE_ENVOY=/nonexistent/envoy" in output


def test_a_child_that_dies_is_named_with_its_exit_code_and_log(tmp_path: Path, free_port: Callable[[], int]) -> None:
    broken = tmp_path / "envoy"
    broken.write_text("#!/bin/sh\necho 'cannot bind: no luck today'\nexit 3\n")
    broken.chmod(0o755)
    demo = start(tmp_path / "logs", free_port(), WARMROUTE_ENVOY=str(broken))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "demo: envoy exited with 3" in output
    assert "cannot bind: no luck today" in output


@linux
@pytest.mark.envoy
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_running(
    tmp_path: Path, free_port: Callable[[], int], number: signal.Signals, code: int
) -> None:
    demo = start(tmp_path, free_port())
    wait_for(lambda: len(children_of(demo.pid)) == 6)
    children = children_of(demo.pid)
    demo.send_signal(number)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == code
    assert f"stopped by {number.name}, everything is down" in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


@linux
@pytest.mark.envoy
def test_an_engine_that_is_killed_during_traffic_ends_the_demo(tmp_path: Path, free_port: Callable[[], int]) -> None:
    demo = start(tmp_path, free_port(), "--requests", "100")
    wait_for(lambda: any("engine-2" in command for command in children_of(demo.pid).values()))
    (victim,) = [pid for pid, command in children_of(demo.pid).items() if "engine-2" in command]
    wait_for(lambda: "ready" in (tmp_path / "engine-2.log").read_text())
    os.kill(victim, signal.SIGKILL)
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "demo: engine-2 was killed by SIGKILL" in output
    assert "ready name=engine-2" in output


@pytest.mark.envoy
def test_the_whole_demo_reports_both_ways_as_json(tmp_path: Path, free_port: Callable[[], int]) -> None:
    demo = start(tmp_path, free_port(), "--requests", "24", "--json")
    output, progress = demo.communicate(timeout=180)
    assert demo.returncode == 0, progress
    report = json.loads(output)
    assert "starting 4 engines" in progress
    assert report["round_robin"]["requests"] == report["warmroute"]["requests"] == 24
    assert report["round_robin"]["failed"] == report["warmroute"]["failed"] == 0
    assert report["warmroute"]["hit_ratio"] > report["round_robin"]["hit_ratio"]
    prediction = report["prediction"]
    assert prediction["unknown"] == 0
    assert prediction["exact"] >= 23, prediction
    assert len(report["warmroute"]["requests_by_engine"]) == 4
    assert report["overhead"]["decision_ms"]["p50"] > 0


@linux
@pytest.mark.envoy
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_a_kept_demo_answers_the_printed_request_until_it_is_stopped(
    tmp_path: Path, free_port: Callable[[], int]
) -> None:
    demo = start(tmp_path, free_port(), "--requests", "16", "--keep")
    assert demo.stdout is not None
    curl = next(line.strip() for line in demo.stdout if line.startswith("  curl -i"))
    answer = subprocess.run(["sh", "-c", f"{curl} -sS"], capture_output=True, text=True, timeout=30, check=True).stdout
    assert "HTTP/1.1 200" in answer
    assert "x-warmroute-endpoint: " in answer
    assert '"role":"assistant"' in answer.replace('": "', '":"')
    children = children_of(demo.pid)
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=60)
    assert demo.returncode == 0
    assert len(children) == 6
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
