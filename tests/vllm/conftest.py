"""Real vLLM engines behind a real gateway and a real Envoy. Opt-in: `make test-vllm` builds what this needs."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml
import zmq
import zmq.asyncio

from gateway.demo_setup import Ports, choose_ports, envoy_command, envoy_parameters, gateway_command, picker_config
from gateway.envoy_binary import find_envoy
from gateway.envoy_config import envoy_yaml

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
TOKENIZER = REPOSITORY / "configs" / "models" / "qwen3"
PYTHON = "WARMROUTE_VLLM_PYTHON"
BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes
START_S = 300.0
ENVIRONMENT = {
    "PYTHONHASHSEED": "42",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(1800))
            if PYTHON not in os.environ:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs real engines: run `make test-vllm` ({PYTHON} is not set)")
                )


class Served(NamedTuple):
    """What an engine serves."""

    model: Path
    name: str
    blocks: int = 160
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = {}


class Engine:
    """One vLLM server process, which may be killed and started again on the same ports."""

    def __init__(self, number: int, ports: Ports, served: Served, logs: Path) -> None:
        own = ports.engines[number]
        self.address = f"127.0.0.1:{own.http}"
        self.url = f"http://{self.address}"
        self.log = logs / f"engine-{number}.log"
        self.last_seq = -1
        """The newest batch that this process has published, as a subscription of the test's own heard it."""
        self._listening: asyncio.Task[None] | None = None
        self._events = f"tcp://127.0.0.1:{own.events}"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{own.events}",
            "replay_endpoint": f"tcp://*:{own.replay}",
        }
        options: dict[str, Any] = {
            "--model": served.model,
            "--served-model-name": served.name,
            "--host": "127.0.0.1",
            "--port": own.http,
            "--dtype": "bfloat16",
            "--block-size": BLOCK_TOKENS,
            "--num-gpu-blocks-override": served.blocks,
            "--max-model-len": 4096,
            "--max-num-seqs": 8,
            "--max-num-batched-tokens": 512,
            "--kv-events-config": json.dumps(events),
        }
        self._command = [
            # Engines with a GPU do not take the router's processor time away, for seconds at a time.
            *("nice", "-n", "10", os.environ[PYTHON], "-m", "vllm.entrypoints.openai.api_server"),
            *(str(part) for option in options.items() for part in option),
            *("--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details", *served.options),
        ]
        self._environment = {**os.environ, **ENVIRONMENT, **served.environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._listening = asyncio.create_task(self._note_sequences())

    def kill(self) -> None:
        """As the machine would: no goodbye."""
        # With the process goes its subscription: a batch of the dead process that is read late must not pass for one of the
        # process that comes after it.
        if self._listening is not None:
            self._listening.cancel()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.last_seq = -1

    async def healthy(self, session: aiohttp.ClientSession) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                pytest.fail(f"the engine ended: {self.log.read_text()[-3000:]}")
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
        pytest.fail(f"not healthy within {START_S:g} s: {self.log.read_text()[-3000:]}")

    async def _note_sequences(self) -> None:
        events = zmq.asyncio.Context.instance().socket(zmq.SUB)
        events.subscribe(b"")
        events.connect(self._events)
        try:
            while True:
                frames = await events.recv_multipart()
                self.last_seq = int.from_bytes(frames[-2], "big")
        finally:
            events.close(0)


class Fleet:
    """Engines, gateway, Envoy and a client session."""

    def __init__(
        self, folder: Path, *serving: Served, configure: Callable[[dict[str, Any]], None] = lambda config: None
    ) -> None:
        """`configure` changes the gateway's configuration before it is written."""
        self.folder = folder
        self.ports = choose_ports(free_port(), len(serving))
        self.admin = free_port()
        self._configure = configure
        self.engines = [Engine(number, self.ports, served, folder) for number, served in enumerate(serving)]
        self.started_s = 0.0
        self.session: aiohttp.ClientSession
        self._stack = AsyncExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports.front}"

    async def __aenter__(self) -> "Fleet":
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self.session = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
        )
        began = time.monotonic()
        for engine in self.engines:
            self._stack.callback(engine.kill)
            engine.start()
        for engine in self.engines:
            await engine.healthy(self.session)
        self.started_s = time.monotonic() - began

        config = picker_config(self.ports)
        for endpoint in config["plugins"][0]["parameters"]["endpoints"]:
            endpoint.pop("model")  # the engines say it themselves
        config["warmroute"].update(
            adminPort=self.admin, decideTimeout="10s", models={}, events={"hashAlgorithm": "sha256", "hashSeed": "42"}
        )
        self._configure(config)
        picker, envoy = self.folder / "warmroute.yaml", self.folder / "envoy.yaml"
        picker.write_text(yaml.safe_dump(config, sort_keys=False))
        envoy.write_text(envoy_yaml(envoy_parameters(self.ports)))
        self._spawn("gateway", gateway_command(picker))
        self._spawn("envoy", envoy_command(find_envoy(), envoy))
        await self._until(self._ready, "the gateway is ready, and both streams are exact")

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(command, cwd=REPOSITORY, stdout=out, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    async def _ready(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            states = await self.streams()
            if not all(state["state"] == "exact" for state in states.values()):
                return False
            async with self.session.get(f"{self.url}/v1/models") as response:
                return response.status == 200
        return False

    async def _until(self, condition: Callable[[], Any], what: str, state: object = "", seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if await condition():
                return
            await asyncio.sleep(0.05)
        gateway = (self.folder / "gateway.log").read_text()[-3000:]
        pytest.fail(f"not within {seconds:g} s: {what} {state}\n{gateway}")

    async def streams(self) -> dict[str, dict[str, Any]]:
        """What the gateway says of every stream, by endpoint."""
        async with self.session.get(f"http://127.0.0.1:{self.admin}/state/streams") as response:
            return {state["endpoint"]: state for state in await response.json()}

    async def settle(self) -> None:
        """Wait until the gateway has applied what the engines have published. Engines announce a block after the step."""
        await asyncio.sleep(0.1)
        behind: dict[str, str] = {}

        async def applied() -> bool:
            states = await self.streams()
            behind.clear()
            for engine in self.engines:
                if (applied := states[engine.address]["sequence"]) < engine.last_seq:
                    behind[engine.address] = f"applied to {applied}, published to {engine.last_seq}"
            return not behind

        await self._until(applied, "every batch is applied", behind)

    async def exact(self, engine: Engine) -> None:
        async def is_exact() -> bool:
            return bool((await self.streams())[engine.address]["state"] == "exact")

        await self._until(is_exact, f"the stream of {engine.address} is exact")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `llama`, `gemma` and `adapter` (see make_model.py)."""
    target = tmp_path_factory.mktemp("models")
    command = [os.environ[PYTHON], str(HERE / "make_model.py"), str(TOKENIZER), str(target)]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT}, stderr=subprocess.DEVNULL)
    return target


@pytest.fixture
async def real(tmp_path: Path, models: Path) -> AsyncIterator[Fleet]:
    """Two engines of one model, of 159 usable blocks each, behind gateway and Envoy."""
    async with Fleet(tmp_path, Served(models / "llama", "tiny"), Served(models / "llama", "tiny")) as fleet:
        yield fleet


@pytest.fixture
async def mixed(tmp_path: Path, models: Path) -> AsyncIterator[Fleet]:
    """Two models: one with a LoRA adapter, one with sliding-window attention."""
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"ad1={models / 'adapter'}")
    with_adapter = Served(models / "llama", "tiny", blocks=400, options=lora)
    async with Fleet(tmp_path, with_adapter, Served(models / "gemma", "hybrid", blocks=400)) as fleet:
        yield fleet
