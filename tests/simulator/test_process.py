"""`python -m simulator` as a process."""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3"


def start(*options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "simulator", "--tokenizer", str(MODEL), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lora", "ad1"), "--lora 'ad1': expected NAME=PATH"),
        (("--speed", "0"), "speed 0.0: must be above 0"),
        (("--blocks", "10", "--max-model-len", "1000"), "10 blocks of 16 tokens hold only 144 tokens"),
        (("--hash-algorithm", "md5"), "no hash algorithm named 'md5'"),
        (("--tokenizer", "/nonexistent"), "/nonexistent"),
    ],
)
def test_settings_that_no_engine_could_start_with_are_refused(options: tuple[str, ...], message: str) -> None:
    process = start(*options)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, message in errors, "Traceback" in errors) == (1, True, False), errors


def test_a_taken_port_ends_the_process_and_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("--port", str(port))
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"cannot serve on 127.0.0.1:{port}" in errors


def test_it_prints_one_ready_line_and_ends_on_sigterm(free_port: Callable[[], int]) -> None:
    port, events, replay = free_port(), free_port(), free_port()
    process = start("--port", f"{port}", "--events-port", f"{events}", "--replay-port", f"{replay}", "--name", "e1")
    assert process.stdout is not None
    assert process.stdout.readline() == (
        f"ready name=e1 http=127.0.0.1:{port} events=tcp://127.0.0.1:{events} replay=tcp://127.0.0.1:{replay}\n"
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "")
