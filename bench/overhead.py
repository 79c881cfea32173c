"""What the gateway adds: latency and CPU at 1, 8, 128 and 512 KB bodies, against the same Envoy without it.

    python -m bench.overhead [--seconds 3] [--sizes 1 8 128 512] [--transports http2 grpcio] [--json]

Per transport a gateway and an Envoy with two listeners over the same two upstreams: `plain` (round robin) and `routed`
(ext-proc). The upstreams answer a constant completion at once, so what differs is the picker. Bodies are chat requests of
English words; `again` repeats one body (a conversation's history was seen before), `fresh` has new words in every request
(nothing is cached anywhere).

Latency is measured on one connection each, the first plain listener and all routed ones taking turns. CPU is the gateway
process's own user and system time per request, over a closed loop of 16 connections. Figures are ratios of one machine at
one moment: compare within a run.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from gateway.demo_children import Children
from gateway.demo_setup import HOST, MODEL_FILES, envoy_command, gateway_command
from gateway.envoy_binary import find_envoy
from gateway.envoy_config import EnvoyParameters, envoy_yaml

MODEL = "bench"
CONNECTIONS = 16
LATENCY_REQUESTS = 150
TEXT = """the cache of an engine holds keys and values for every token that it has computed and a later request with the
same beginning can use them again so a router that knows which engine holds what sends each request where most is there"""
WORDS = TEXT.split()
UPSTREAM = """
import asyncio, sys
ANSWER = b'{"object":"chat.completion","model":"bench","choices":[{"index":0,"finish_reason":"stop","message":' \\
    b'{"role":"assistant","content":"ok"}}],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}'
REPLY = b"HTTP/1.1 200 OK\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n%s" % (len(ANSWER), ANSWER)
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            lengths = [int(l.split(b":")[1]) for l in head.lower().split(b"\\r\\n") if l.startswith(b"content-length")]
            await reader.readexactly(sum(lengths))
            writer.write(REPLY)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1]), limit=1 << 24)
    await server.serve_forever()
asyncio.run(main())
"""


def body(size: int, seed: int) -> bytes:
    """A chat request of about `size` bytes; equal seeds give equal bodies."""
    rng = random.Random(seed)
    words: list[str] = []
    length = 0
    while length < size - 150:
        words.append(rng.choice(WORDS))
        length += len(words[-1]) + 1
    half = len(words) // 2
    messages = [
        {"role": "user", "content": " ".join(words[:half])},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": " ".join(words[half:])},
    ]
    return json.dumps({"model": MODEL, "messages": messages}).encode()


class Connection:
    """A keep-alive HTTP/1.1 connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> "Connection":
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port, limit=1 << 24)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, payload: bytes) -> float:
        """Seconds until the whole answer is there. RuntimeError for anything but 200."""
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n\r\n"
        )
        started = time.perf_counter()
        self._writer.write(head.encode() + payload)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        content = await self._content(answer.lower())
        took = time.perf_counter() - started
        if b" 200 " not in answer[:15]:
            raise RuntimeError(f"{answer[:40]!r} {content[:200]!r}")
        return took

    async def _content(self, head: bytes) -> bytes:
        if b"transfer-encoding: chunked" in head:  # Envoy drops the length of a body that it streams past the picker
            return await self._reader.readuntil(b"0\r\n\r\n")
        lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")]
        return await self._reader.readexactly(lengths[0] if lengths else 0)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def latency(ports: dict[str, int], payloads: list[bytes]) -> dict[str, Any]:
    """p50 and p99 in ms by name, on one connection each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in ports}
    async with AsyncExitStack() as stack:
        pairs = [(name, await stack.enter_async_context(Connection(port))) for name, port in ports.items()]
        for payload in payloads:
            pairs = [*pairs[1:], pairs[0]]
            for name, connection in pairs:
                times[name].append(await connection.ask(payload) * 1e3)
    warm = {name: values[len(values) // 10 :] for name, values in times.items()}
    return {
        name: {"p50": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98]}
        for name, values in warm.items()
    }


async def load(port: int, payloads: list[bytes], seconds: float, watched: dict[str, int]) -> dict[str, float]:
    """Requests per second and CPU us per request of the watched processes, over a closed loop."""
    done = 0
    ends = time.perf_counter() + seconds

    async def one(offset: int) -> None:
        nonlocal done
        async with Connection(port) as connection:
            number = offset
            while time.perf_counter() < ends:
                await connection.ask(payloads[number % len(payloads)])
                number += CONNECTIONS
                done += 1

    before = {name: cpu_s(pid) for name, pid in watched.items()}
    started = time.perf_counter()
    await asyncio.gather(*(one(offset) for offset in range(CONNECTIONS)))
    took = time.perf_counter() - started
    cpu = {f"{name}_cpu_us": (cpu_s(pid) - before[name]) / done * 1e6 for name, pid in watched.items()}
    return {"requests_per_s": done / took, "requests": done, **cpu}


def free_ports(count: int) -> list[int]:
    import socket

    held = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in held]
    for probe in held:
        probe.close()
    return ports


def picker_config(endpoints: list[int], grpc_port: int, metrics_port: int, transport: str) -> dict[str, Any]:
    """The quickstart's profile over two upstreams that publish nothing."""
    entries = [{"name": f"u{port}", "address": HOST, "port": port, "model": MODEL} for port in endpoints]
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            {"type": "static-discovery", "parameters": {"endpoints": entries}},
            {"type": "token-producer", "parameters": {"local": {"path": str(MODEL_FILES)}}},
            {"type": "precise-prefix-cache-producer"},
            {
                "type": "expected-work-scorer",
                "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
            },
            {"type": "max-score-picker"},
            {"type": "metrics-data-source", "parameters": {"interval": "60s"}},
        ],
        "schedulingProfiles": [
            {
                "name": "default",
                "plugins": [{"pluginRef": "expected-work-scorer"}, {"pluginRef": "max-score-picker"}],
            }
        ],
        "dataLayer": {
            "discovery": {"pluginRef": "static-discovery"},
            "sources": [{"pluginRef": "metrics-data-source"}],
        },
        "warmroute": {
            "listen": HOST,
            "grpcPort": grpc_port,
            "transport": transport,
            "metricsListen": HOST,
            "metricsPort": metrics_port,
            "decideTimeout": "10s",
        },
    }


async def run(sizes: list[int], seconds: float, transports: list[str]) -> list[dict[str, Any]]:
    """One row per size, kind of body and transport."""
    upstreams = free_ports(2)
    rows = []
    with TemporaryDirectory() as folder:
        async with Children(Path(folder)) as children:
            for port in upstreams:
                await children.start(f"upstream-{port}", [sys.executable, "-c", UPSTREAM, str(port)])
            sides = {name: await side(children, Path(folder), name, upstreams) for name in transports}
            for kilobytes in sizes:
                for kind in ("again", "fresh"):
                    size = kilobytes * 1024
                    count = 1 if kind == "again" else max(32, min(2000, (64 << 20) // size))
                    payloads = [body(size, seed=kilobytes * 10_000 + n) for n in range(count)]
                    wanted = [payloads[n % count] for n in range(LATENCY_REQUESTS)]
                    plain = next(iter(sides.values())).plain
                    measured = await latency({"plain": plain, **{n: s.routed for n, s in sides.items()}}, wanted)
                    for name, it in sides.items():
                        without = await load(it.plain, payloads, seconds, it.watched)
                        through = await load(it.routed, payloads, seconds, it.watched)
                        ms = {"plain": measured["plain"], "routed": measured[name]}
                        row = {"kb": kilobytes, "bodies": kind, "transport": name, "ms": ms}
                        rows.append({**row, "plain": without, "routed": through})
                        print(text(rows[-1]), flush=True)
    return rows


class Side(NamedTuple):
    """A gateway and its Envoy."""

    plain: int
    routed: int
    watched: dict[str, int]


async def side(children: Children, place: Path, transport: str, upstreams: list[int]) -> Side:
    grpc, metrics, plain, routed, admin = free_ports(5)
    config, envoy_config = place / f"{transport}.yaml", place / f"envoy-{transport}.yaml"
    config.write_text(yaml.safe_dump(picker_config(upstreams, grpc, metrics, transport)))
    parameters = EnvoyParameters(
        listen=f"{HOST}:{routed}",
        plain_listen=f"{HOST}:{plain}",
        endpoints=[f"{HOST}:{port}" for port in upstreams],
        picker=f"{HOST}:{grpc}",
        admin=f"{HOST}:{admin}",
        fail_open=False,
    )
    envoy_config.write_text(envoy_yaml(parameters))
    gateway = await children.start(f"gateway-{transport}", gateway_command(config))
    envoy = await children.start(f"envoy-{transport}", envoy_command(find_envoy(), envoy_config))
    await until_ready(routed)
    return Side(plain, routed, {"gateway": gateway.process.pid, "envoy": envoy.process.pid})


async def until_ready(port: int, timeout_s: float = 60.0) -> None:
    """Until the whole path answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            async with Connection(port) as connection:
                await connection.ask(body(1024, seed=0))
                return
        except (OSError, RuntimeError, asyncio.IncompleteReadError):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.3)


def text(row: dict[str, Any]) -> str:
    before, after, plain, routed = row["ms"]["plain"], row["ms"]["routed"], row["plain"], row["routed"]
    added = after["p50"] - before["p50"]
    return (
        f"{row['kb']:4} KB {row['bodies']:5} {row['transport']:6}  "
        f"p50 {before['p50']:6.2f} -> {after['p50']:6.2f} ms (+{added:.2f})  "
        f"p99 {before['p99']:6.2f} -> {after['p99']:6.2f} ms  "
        f"gateway CPU {routed['gateway_cpu_us']:7.0f} us/request, "
        f"Envoy {plain['envoy_cpu_us']:5.0f} -> {routed['envoy_cpu_us']:5.0f} us  "
        f"{routed['requests_per_s']:6.0f} of {plain['requests_per_s']:6.0f} requests/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 128, 512], help="KB")
    parser.add_argument("--seconds", type=float, default=3.0, help="per load measurement")
    parser.add_argument("--transports", nargs="+", default=["http2", "grpcio"], choices=["http2", "grpcio"])
    parser.add_argument("--json", action="store_true", help="print all rows as JSON at the end")
    options = parser.parse_args()
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores", flush=True)
    rows = asyncio.run(run(options.sizes, options.seconds, options.transports))
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
