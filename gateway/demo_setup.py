"""What a demo consists of: ports, the picker's configuration, Envoy's, and the command line of every process."""

import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from gateway.envoy_config import EnvoyParameters, envoy_yaml

HOST = "127.0.0.1"
MODEL = "qwen3-demo"
MODEL_FILES = Path(__file__).resolve().parent.parent / "configs" / "models" / "qwen3"

# The engines behave like a 70B model on eight H100: what is saved by a cached token is large beside what a laptop adds.
PROFILE = "70b-tp8"
PREFILL_S_PER_TOKEN = 3.5e-5
PREFILL_S_PER_PAIR = 5.5e-10
BLOCK_TOKENS = 16


class PortTaken(Exception):
    """Somebody listens on a port that the demo needs; the message says which and how to choose another."""


class EnginePorts(msgspec.Struct, frozen=True):
    http: int
    events: int
    replay: int


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """All on 127.0.0.1."""

    front: int
    plain: int
    envoy_admin: int
    picker: int
    metrics: int
    engines: tuple[EnginePorts, ...]


def choose_ports(front: int, engines: int) -> Ports:
    """`front` as asked, all others free ones. Raises PortTaken."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, front))
    except OSError as error:
        raise PortTaken(
            f"port {front} on {HOST} cannot be used: {error.strerror}; choose another one with --port"
        ) from error
    held = []
    try:
        for _ in range(4 + 3 * engines):
            probe = socket.socket()
            held.append(probe)
            probe.bind((HOST, 0))
        free = iter([int(probe.getsockname()[1]) for probe in held])
        return Ports(
            front=front,
            plain=next(free),
            envoy_admin=next(free),
            picker=next(free),
            metrics=next(free),
            engines=tuple(EnginePorts(next(free), next(free), next(free)) for _ in range(engines)),
        )
    finally:
        for probe in held:
            probe.close()


def picker_config(ports: Ports) -> dict[str, Any]:
    """The EndpointPickerConfig of the demo: expected work from precise matches, and the queue before it."""
    endpoints = [
        {
            "name": f"engine-{number}",
            "address": HOST,
            "port": engine.http,
            "events": engine.events,
            "replay": engine.replay,
            "model": MODEL,
        }
        for number, engine in enumerate(ports.engines)
    ]
    work = {
        "a": PREFILL_S_PER_TOKEN,
        "q": PREFILL_S_PER_PAIR,
        "prefixMatchInfoProducerName": "precise-prefix-cache-producer",
    }
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "static-discovery", "parameters": {"endpoints": endpoints}},
            {"type": "token-producer", "parameters": {"local": {"path": str(MODEL_FILES)}}},
            {"type": "precise-prefix-cache-producer"},
            {"type": "expected-work-scorer", "parameters": work},
            {"type": "expected-work-queue"},
            {"type": "max-score-picker"},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [{"pluginRef": "expected-work-scorer"}, {"pluginRef": "max-score-picker"}],
            }
        ],
        "dataLayer": {"discovery": {"pluginRef": "static-discovery"}},
        "warmroute": {
            "listen": HOST,
            "grpcPort": ports.picker,
            "metricsListen": HOST,
            "metricsPort": ports.metrics,
            "responseHeaders": True,
            "drainTimeout": "1s",
            "models": {MODEL: {"tokenizer": str(MODEL_FILES)}},
        },
    }


def envoy_parameters(ports: Ports) -> EnvoyParameters:
    """One listener through the picker, a second one that goes round robin over the same engines."""
    return EnvoyParameters(
        listen=f"{HOST}:{ports.front}",
        plain_listen=f"{HOST}:{ports.plain}",
        endpoints=[f"{HOST}:{engine.http}" for engine in ports.engines],
        picker=f"{HOST}:{ports.picker}",
        admin=f"{HOST}:{ports.envoy_admin}",
        message_timeout_s=45.0,  # above the queue's maxWait
    )


def write_configs(ports: Ports, folder: Path) -> tuple[Path, Path]:
    """Write both configurations into `folder`; their paths, the picker's first."""
    folder.mkdir(parents=True, exist_ok=True)
    picker, envoy = folder / "warmroute.yaml", folder / "envoy.yaml"
    picker.write_text(yaml.safe_dump(picker_config(ports), sort_keys=False, width=120))
    envoy.write_text(envoy_yaml(envoy_parameters(ports)))
    return picker, envoy


def engine_command(number: int, ports: Ports, blocks: int, reply_tokens: int) -> list[str]:
    """A simulated engine of `blocks` KV blocks whose replies have about `reply_tokens` tokens."""
    own = ports.engines[number]
    options = {
        "--name": f"engine-{number}",
        "--port": own.http,
        "--events-port": own.events,
        "--replay-port": own.replay,
        "--topic": f"kv@{HOST}:{own.http}@{MODEL}",
        "--model": MODEL,
        "--tokenizer": MODEL_FILES,
        "--profile": PROFILE,
        "--block-size": BLOCK_TOKENS,
        "--blocks": blocks,
        "--reply-tokens": reply_tokens,
    }
    return [sys.executable, "-m", "simulator", *(str(part) for option in options.items() for part in option)]


def gateway_command(config: Path) -> list[str]:
    """`warmroute serve`, with this very interpreter."""
    return [sys.executable, "-c", "from gateway.cli import main; main()", "serve", "-c", str(config)]


def envoy_command(binary: Path, config: Path) -> list[str]:
    """Envoy without hot restart, so that several demos may run on one machine."""
    quiet = ["--disable-hot-restart", "--log-level", "warning", "--concurrency", "2"]
    return [str(binary), "-c", str(config), *quiet]
