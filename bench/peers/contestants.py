"""The routers that take part: how each is started, which version it is, which processes it consists of."""

import shlex
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Protocol

import msgspec
import yaml

from gateway.demo_children import Children
from gateway.demo_setup import (
    BLOCK_TOKENS,
    HOST,
    MODEL,
    Ports,
    envoy_command,
    envoy_parameters,
    gateway_command,
    picker_config,
)
from gateway.demo_traffic import Observation
from gateway.envoy_binary import find_envoy
from gateway.envoy_config import envoy_yaml

Command = Callable[[str, str, Ports], list[str]]
"""(executable, policy, ports) -> command line of a router that listens on `ports.front`."""


class Contestant(Protocol):
    """A router."""

    @property
    def name(self) -> str:
        """Its column in the tables."""

    def version(self) -> str: ...

    def serves(self, seen: Observation) -> bool:
        """Was this request answered by the router as it is meant to work?"""

    async def start(self, children: Children, ports: Ports, folder: Path) -> dict[str, int]:
        """Start it; its parts' names and process ids."""


class Warmroute(msgspec.Struct, frozen=True):
    """The gateway and a real Envoy, configured as the demo does it, with prefill priced for engines of this speed."""

    speed: float
    name: str = "warmroute"

    def version(self) -> str:
        envoy = subprocess.run([find_envoy(), "--version"], capture_output=True, text=True, check=True).stdout
        return f"{metadata.version('warmroute')}, Envoy {envoy.partition('version: ')[2].split('/')[1]}"

    def serves(self, seen: Observation) -> bool:
        """Envoy answers before the gateway is up, by round robin; only the gateway adds a prediction."""
        return seen.error is None and seen.predicted_tokens is not None

    async def start(self, children: Children, ports: Ports, folder: Path) -> dict[str, int]:
        config = picker_config(ports)
        for plugin in config["plugins"]:
            if plugin["type"] == "expected-work-scorer":
                plugin["parameters"]["a"] /= self.speed
                plugin["parameters"]["q"] /= self.speed
        picker, envoy = folder / "warmroute.yaml", folder / "envoy.yaml"
        picker.write_text(yaml.safe_dump(config))
        envoy.write_text(envoy_yaml(envoy_parameters(ports)))
        commands = {"gateway": gateway_command(picker), "Envoy": envoy_command(find_envoy(), envoy)}
        return {name: (await children.start(name, command)).process.pid for name, command in commands.items()}


class Peer(msgspec.Struct, frozen=True):
    """Another project's router: one process."""

    name: str
    executable: str
    policy: str
    command: Command
    distribution: str | None = None

    def version(self) -> str:
        """As the package beside the executable says; wrapper scripts answer --version differently or not at all."""
        python = Path(self.executable).parent / "python"
        if self.distribution is None or not python.exists():
            return "unknown"
        code = f"from importlib import metadata; print(metadata.version({self.distribution!r}))"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def serves(self, seen: Observation) -> bool:
        return seen.error is None

    async def start(self, children: Children, ports: Ports, folder: Path) -> dict[str, int]:
        child = await children.start(self.name.replace(":", "-"), self.command(self.executable, self.policy, ports))
        return {"router": child.process.pid}


def urls(ports: Ports) -> list[str]:
    return [f"http://{HOST}:{engine.http}" for engine in ports.engines]


def _common(ports: Ports, policy: str) -> list[str]:
    where = ["--host", HOST, "--port", str(ports.front), "--prometheus-port", str(ports.metrics)]
    return [*where, "--prometheus-host", HOST, "--policy", policy, "--worker-urls", *urls(ports)]


def _vllm_router(executable: str, policy: str, ports: Ports) -> list[str]:
    command = [executable, *_common(ports, policy), "--worker-startup-check-interval", "1", "--log-level", "warning"]
    if policy != "kv_aware":
        return command
    command += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_TOKENS)]
    for url, engine in zip(urls(ports), ports.engines, strict=True):
        command += ["--kv-event-source", f"{url}=tcp://{HOST}:{engine.events}"]
        command += ["--kv-event-replay-source", f"{url}=tcp://{HOST}:{engine.replay}"]
    return command


def _sglang_router(executable: str, policy: str, ports: Ports) -> list[str]:
    return [executable, "launch", *_common(ports, policy), "--log-level", "warn"]


def _smg(executable: str, policy: str, ports: Ports) -> list[str]:
    quiet = ["--disable-tokenizer-autoload", "--log-level", "warn"]  # over HTTP it routes by characters
    return [executable, "launch", *_common(ports, policy), "--backend", "vllm", *quiet]


PEERS: dict[str, tuple[Command, tuple[str, ...]]] = {
    "vllm-router": (_vllm_router, ("kv_aware", "cache_aware", "round_robin")),
    "smg": (_smg, ("cache_aware",)),
    "sglang-router": (_sglang_router, ("cache_aware",)),
}
"""Package name -> how it is started, and the policies that are measured. Everything else is left at its default."""


def other(text: str) -> Peer:
    """A router given as NAME=COMMAND; the command may use {port}, {metrics} and {engines} (URLs, separated by blanks)."""
    name, found, template = text.partition("=")
    if not found or "{port}" not in template or "{engines}" not in template:
        raise ValueError(f"{text!r}: expected NAME=COMMAND, where the command has {{port}} and {{engines}}")

    def command(executable: str, policy: str, ports: Ports) -> list[str]:
        places = {"port": ports.front, "metrics": ports.metrics, "engines": " ".join(urls(ports))}
        return shlex.split(template.format(**places))

    return Peer(name, shlex.split(template)[0], "", command)


def contestants(
    speed: float, executables: dict[str, str | None], others: Sequence[str]
) -> tuple[list[Contestant], list[str]]:
    """Everyone who can take part, and the names of those whose executable was not given."""
    found: list[Contestant] = [Warmroute(speed)]
    missing = []
    for package, (command, policies) in PEERS.items():
        executable = executables.get(package)
        for policy in policies:
            name = f"{package}:{policy}"
            if executable is None:
                missing.append(name)
            else:
                found.append(Peer(name, executable, policy, command, package))
    return [*found, *(other(text) for text in others)], missing
