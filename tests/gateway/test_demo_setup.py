import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.config import load
from gateway.demo_setup import PortTaken, choose_ports, engine_command, envoy_command, write_configs
from gateway.envoy_binary import find_envoy


def test_a_taken_front_port_is_refused_with_the_option_that_helps() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            PortTaken, match=f"port {port} on 127.0.0.1 cannot be used: .*; choose another one with --port"
        ):
            choose_ports(port, 4)


def test_all_ports_are_different(free_port: Callable[[], int]) -> None:
    ports = choose_ports(free_port(), 4)
    engines = [port for engine in ports.engines for port in (engine.http, engine.events, engine.replay)]
    everything = [ports.front, ports.plain, ports.envoy_admin, ports.picker, ports.metrics, *engines]
    assert len(set(everything)) == len(everything) == 17


def test_the_picker_configuration_is_accepted_without_a_warning(tmp_path: Path, free_port: Callable[[], int]) -> None:
    picker, _ = write_configs(choose_ports(free_port(), 4), tmp_path)
    loaded = load(picker)
    assert [str(warning) for warning in loaded.warnings] == []
    assert loaded.precise is not None
    assert loaded.settings.response_headers


def test_an_engine_is_told_its_own_ports(free_port: Callable[[], int]) -> None:
    ports = choose_ports(free_port(), 2)
    command = engine_command(1, ports, blocks=100, reply_tokens=8)
    assert command[command.index("--port") + 1] == str(ports.engines[1].http)
    assert command[command.index("--replay-port") + 1] == str(ports.engines[1].replay)


@pytest.mark.envoy
def test_envoy_accepts_its_configuration(tmp_path: Path, free_port: Callable[[], int]) -> None:
    _, envoy = write_configs(choose_ports(free_port(), 4), tmp_path)
    command = [*envoy_command(find_envoy(), envoy), "--mode", "validate"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
