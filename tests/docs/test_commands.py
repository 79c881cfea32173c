"""Every command in README.md and docs/*.md runs: against simulated engines, a gateway and Envoy, in a temporary folder.

A command is a line (or lines joined by a backslash) in a block fenced as `console`. Ports and addresses as documented are
replaced by free ones. A command that cannot run here is in EXCEPTIONS, with the reason; one that stays in the foreground is
started, has to come up, and is ended (FOREGROUND).
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import yaml

from gateway.envoy_binary import EnvoyNotFoundError, find_envoy

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
MODEL = "Qwen/Qwen3-0.6B"
ENGINES = {8001: (5557, 5657), 8002: (5558, 5658)}
DOCUMENTED = (8080, 9901, 9002, 9090, 9091, *ENGINES, *(port for ports in ENGINES.values() for port in ports))
PATIENCE_S = 120.0

EXCEPTIONS = {
    r"^vllm serve ": "needs a GPU (or minutes of CPU) and model weights; tests/vllm drives real engines where they are installed",
    r"^docker ": "needs a Docker engine",
    r"^nats-server": "tests/event_ingest drives a real NATS server",
    r"^helm ": "needs a cluster",
    r"^git clone ": "needs the network",
    r"\.\.\.": "not a whole command: the reader fills it in",
}
"""Pattern -> why such a command is not run."""
FINDINGS = r"(^| )(\S*/)?warmroute doctor "
"""May end with 1: the trial fleet has no Envoy admin port that the doctor expects, and it says so."""
FOREGROUND = r"warmroute serve |-m simulator |envoy -c |warmroute demo .*--keep"


class Command(msgspec.Struct, frozen=True):
    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def commands(page: Path) -> list[Command]:
    """The commands of a page, with a continued line as one. Comments are dropped."""
    found: list[Command] = []
    inside, held, start = False, "", 0
    for number, line in enumerate(page.read_text().splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            inside = text == "```console"
            continue
        if not inside:
            continue
        start = start if held else number
        held += " " + text if held else text
        if held.endswith("\\"):
            held = held[:-1].rstrip()
            continue
        if held and not held.startswith("#"):
            found.append(Command(page.name, start, re.sub(r"\s{2,}#.*$", "", held)))
        held = ""
    return found


ALL = [command for page in PAGES for command in commands(page)]


def free_ports(count: int) -> list[int]:
    held = []
    try:
        for _ in range(count):
            held.append(probe := socket.socket())
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in held]
    finally:
        for probe in held:
            probe.close()


class Site:
    """A folder as a checkout looks to a reader, and the services that its commands talk to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(DOCUMENTED, free_ports(len(DOCUMENTED)), strict=True))
        self._running: list[subprocess.Popen[bytes]] = []
        for name in ("deploy", "simulator", "Makefile", "bench", "requirements", "pyproject.toml"):
            (folder / name).symlink_to(REPOSITORY / name)
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".envoy-venv" / "bin").mkdir(parents=True)
        self._script(folder / ".venv" / "bin" / "python", f'exec {sys.executable} "$@"')
        self._script(
            folder / ".venv" / "bin" / "warmroute",
            f'exec {sys.executable} -c "from gateway.cli import main; main()" "$@"',
        )
        (folder / "configs").mkdir()
        (folder / "configs" / "models").symlink_to(REPOSITORY / "configs" / "models")
        for file in (REPOSITORY / "configs").glob("*.yaml"):
            (folder / "configs" / file.name).write_text(self.moved(file.read_text()))
        quickstart = folder / "configs" / "quickstart.yaml"
        text = quickstart.read_text().replace(
            "warmroute:\n", f"warmroute:\n  adminPort: {self.ports[9091]}\n  explain: true\n"
        )
        front = f"port: {self.ports[8080]}"
        quickstart.write_text(text.replace(front, f"{front}\n    adminPort: {self.ports[9901]}"))
        (folder / "fleet.yaml").write_text(quickstart.read_text().replace("models/qwen3", "configs/models/qwen3"))
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Where would this go?"}]}
        (folder / "request.json").write_text(json.dumps(body))

    @staticmethod
    def _script(path: Path, text: str) -> None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def moved(self, text: str) -> str:
        """Documented ports and addresses as they are here."""
        text = re.sub(r"\b10\.0\.0\.7:(\d+)", r"127.0.0.1:\1", text)
        return re.sub(r"\b(\d{4})\b", lambda found: str(self.ports.get(int(found[1]), found[1])), text)

    def start(self) -> None:
        """Engines, gateway and Envoy, as getting-started.md starts them."""
        envoy = find_envoy()
        self._script(self.folder / ".envoy-venv" / "bin" / "envoy", f'exec {envoy} "$@"')
        for number, (port, (events, replay)) in enumerate(ENGINES.items()):
            options = (
                f"--name engine-{number} --port {port} --model {MODEL} --events-port {events} --replay-port {replay}"
            )
            self.service(f".venv/bin/python -m simulator {self.moved(options)}")
        self.service(".venv/bin/warmroute serve -c configs/quickstart.yaml")
        done = self.run(".venv/bin/warmroute envoy-config -c configs/quickstart.yaml -o running.yaml")
        assert done.returncode == 0, done.stdout
        self.service(".envoy-venv/bin/envoy -c running.yaml --disable-hot-restart -l warning")
        deadline = time.monotonic() + PATIENCE_S
        while not self._routes():
            assert time.monotonic() < deadline, (self.folder / "services.log").read_text()[-3000:]
            time.sleep(0.3)
        shutil.copy(self._dump(), self.folder / "dump.json")

    def service(self, text: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "services.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self.folder,
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def _routes(self) -> bool:
        url = f"http://127.0.0.1:{self.ports[8080]}/v1/chat/completions"
        headers = {"content-type": "application/json", "x-request-id": "REQUEST-ID"}
        request = urllib.request.Request(url, (self.folder / "request.json").read_bytes(), headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return "x-warmroute-endpoint" in answer.headers
        except OSError:
            return False

    def _dump(self) -> Path:
        file = self.folder / "first-dump.json"
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[9091]}/state/dump", timeout=10) as answer:
            file.write_bytes(answer.read())
        return file

    def _environment(self) -> dict[str, str]:
        folders = [self.folder / ".venv" / "bin", self.folder / ".envoy-venv" / "bin", Path(sys.executable).parent]
        return {**os.environ, "PATH": ":".join([*map(str, folders), os.environ["PATH"]]), "PYTHONPATH": str(REPOSITORY)}

    def run(self, text: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", text],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )

    def stop(self) -> None:
        for process in reversed(self._running):
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> int:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("site"))
    try:
        made.start()
        yield made
    except EnvoyNotFoundError as error:
        pytest.skip(str(error))
    finally:
        made.stop()


def test_there_are_commands_and_every_exception_is_used() -> None:
    assert len(ALL) > 30
    unknown = {"nats-server", "helm ", "git clone "}
    for pattern in EXCEPTIONS:
        if not any(word in pattern for word in unknown):
            assert any(re.search(pattern, command.text) for command in ALL), (
                f"no command needs the exception {pattern!r}"
            )


def exception(command: Command) -> str | None:
    return next((reason for pattern, reason in EXCEPTIONS.items() if re.search(pattern, command.text)), None)


@pytest.mark.envoy
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_every_command_of_the_page_runs(site: Site, page: Path) -> None:
    failed = []
    for command in commands(page):
        if exception(command) is not None:
            continue
        problem = attempt(site, command.text)
        if problem is not None:
            failed.append(f"{command}\n{problem}")
    assert not failed, "\n\n".join(failed)


def attempt(site: Site, text: str) -> str | None:
    """Run one command; what went wrong, or None."""
    for pattern, how in SPECIAL.items():
        if re.search(pattern, text):
            return how(site, text)
    done = site.run(site.moved(text))
    allowed = (0, 1) if re.search(FINDINGS, text) else (0,)
    return None if done.returncode in allowed else f"exit status {done.returncode}\n{done.stdout[-2000:]}"


def made_elsewhere(site: Site, text: str) -> str | None:
    """make: what its targets do is what the tests and the demo's tests do; that there is such a target is checked."""
    done = site.run(f"make -n {text.removeprefix('make').split(' ARGS')[0]}")
    return None if done.returncode == 0 else done.stdout


def rendered(site: Site, text: str) -> str | None:
    """kubectl: without a cluster the manifests are rendered and read."""
    target = site.folder / text.split()[-1]
    if " -k " in text:
        if shutil.which("kubectl") is None:
            return None if (target / "kustomization.yaml").is_file() else f"no {target}/kustomization.yaml"
        done = subprocess.run(["kubectl", "kustomize", target], capture_output=True, text=True)
        return done.stderr if done.returncode else _manifests(done.stdout)
    return _manifests(target.read_text())


def _manifests(text: str) -> str | None:
    documents = list(yaml.safe_load_all(text))
    wrong = [it for it in documents if not {"apiVersion", "kind", "metadata"} <= it.keys()]
    return f"not a manifest: {wrong}" if wrong or not documents else None


def recorded(site: Site, text: str) -> str | None:
    """events record: until Ctrl-C; here for a few seconds, with a request that makes events."""
    done = site.run(f"{site.moved(text)} --seconds 3")
    return None if done.returncode == 0 and (site.folder / "engine.jsonl").is_file() else done.stdout


def started(site: Site, text: str) -> str | None:
    """A foreground command: on other ports than the running one's, up within a minute, and down when told."""
    port, copy = free_ports(len(DOCUMENTED)), text
    ports = dict(zip(DOCUMENTED, port, strict=True))

    def other(part: str) -> str:
        # First to the documented ports, which the configuration here no longer has, then to new ones.
        back = {str(here): documented for documented, here in site.ports.items()}
        return re.sub(r"\b(\d{4,5})\b", lambda it: str(ports.get(int(back.get(it[1], it[1])), it[1])), part)

    for name in re.findall(r"-c (\S+\.yaml)", text):
        (site.folder / name).with_suffix(".other.yaml").write_text(other((site.folder / name).read_text()))
        copy = copy.replace(name, name.removesuffix(".yaml") + ".other.yaml")
    copy = other(copy)
    waits_for = (
        ports[9090] if "serve" in text else ports[9901] if "envoy" in text else int(copy.split("--port ")[1].split()[0])
    )
    process = site.service(copy + (" --disable-hot-restart" if "envoy" in text else ""))
    deadline = time.monotonic() + PATIENCE_S
    try:
        while socket.socket().connect_ex(("127.0.0.1", waits_for)) != 0:
            if process.poll() is not None or time.monotonic() > deadline:
                return (
                    f"did not come up (status {process.poll()}):\n{(site.folder / 'services.log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
    finally:
        status = _end(process)
    return None if status in (0, -signal.SIGTERM) else f"ended with {status} after SIGTERM"


def prometheus_tool(site: Site, text: str) -> str | None:
    """promtool: where it is installed."""
    if shutil.which("promtool") is None:
        return None
    done = site.run(text)
    return None if done.returncode == 0 else done.stdout


SPECIAL: dict[str, Callable[[Site, str], str | None]] = {
    r"^make\b": made_elsewhere,
    r"^kubectl ": rendered,
    r"^promtool ": prometheus_tool,
    r"warmroute events record ": recorded,
    FOREGROUND: started,
}
