"""What a streamed reply costs on its way past the gateway: CPU per piece, read and not read.

    python -m bench.bench_replies [--connections 64] [--pieces 300] [--gap 0.02] [--json]

Two upstreams stream replies of so many pieces, one every `gap` seconds, over so many connections at once; a gateway and an
Envoy in front of them. `plain` passes Envoy alone, `read` shows every piece to the gateway (`replyPiecesPerSecond: null`),
`unread` none (`0`). CPU is what the processes used, per piece. Idle work of the gateway (scraping, housekeeping) is in it:
`plain` shows how much.
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from bench.overhead import HOST, Connection, body, cpu_s, free_ports, picker_config, until_ready
from gateway.demo_children import Children
from gateway.demo_setup import envoy_command, gateway_command
from gateway.envoy_binary import find_envoy
from gateway.envoy_config import EnvoyParameters, envoy_yaml

ROUNDS = 3
UPSTREAM = """
import asyncio, json, sys
port, pieces, gap = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
def event(**fields):
    line = b"data: " + json.dumps({"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", **fields}).encode()
    return b"%x\\r\\n%s\\r\\n" % (len(line) + 2, line + b"\\n\\n")
WORD = event(choices=[{"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}])
USAGE = event(choices=[], usage={"prompt_tokens": 10, "completion_tokens": pieces, "total_tokens": 10 + pieces})
HEAD = b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            lengths = [int(l.split(b":")[1]) for l in head.lower().split(b"\\r\\n") if l.startswith(b"content-length")]
            await reader.readexactly(sum(lengths))
            writer.write(HEAD)
            for _ in range(pieces):
                writer.write(WORD)
                await asyncio.sleep(gap)
            writer.write(USAGE + b"0\\r\\n\\r\\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    await server.serve_forever()
asyncio.run(main())
"""


async def gateway(
    children: Children, place: Path, name: str, budget: float | None, upstreams: list[int]
) -> tuple[int, int]:
    """Its port and its process."""
    grpc, metrics = free_ports(2)
    config = picker_config(upstreams, grpc, metrics, "http2")
    config["warmroute"]["replyPiecesPerSecond"] = budget
    file = place / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config))
    child = await children.start(f"gateway-{name}", gateway_command(file))
    return grpc, child.process.pid


async def envoy(children: Children, place: Path, name: str, grpc: int, upstreams: list[int]) -> tuple[int, int, int]:
    """Its routed port, its plain port, its process."""
    routed, plain, admin = free_ports(3)
    parameters = EnvoyParameters(
        listen=f"{HOST}:{routed}",
        plain_listen=f"{HOST}:{plain}",
        endpoints=[f"{HOST}:{port}" for port in upstreams],
        picker=f"{HOST}:{grpc}",
        admin=f"{HOST}:{admin}",
        fail_open=False,
    )
    file = place / f"envoy-{name}.yaml"
    file.write_text(envoy_yaml(parameters))
    child = await children.start(f"envoy-{name}", envoy_command(find_envoy(), file))
    await until_ready(routed)
    return routed, plain, child.process.pid


async def stream(port: int, connections: int, pieces: int, watched: dict[str, int]) -> dict[str, float]:
    question = body(1024, seed=1)[:-1] + b', "stream": true}'

    async def one() -> None:
        async with Connection(port) as connection:
            for _ in range(ROUNDS):
                await connection.ask(question)

    before = {name: cpu_s(pid) for name, pid in watched.items()}
    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(connections)))
    count, took = connections * ROUNDS * (pieces + 1), time.perf_counter() - started
    cpu = {f"{name}_us": (cpu_s(pid) - before[name]) / count * 1e6 for name, pid in watched.items()}
    return {"pieces_per_s": count / took, "reply_s": took / ROUNDS, **cpu}


async def run(connections: int, pieces: int, gap: float) -> dict[str, dict[str, float]]:
    upstreams = free_ports(2)
    rows: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder:
        place = Path(folder)
        async with Children(place) as children:
            for port in upstreams:
                command = [sys.executable, "-c", UPSTREAM, str(port), str(pieces), str(gap)]
                await children.start(f"upstream-{port}", command)
            for name, budget in (("read", None), ("unread", 0.0)):
                grpc, gateway_pid = await gateway(children, place, name, budget, upstreams)
                routed, plain, envoy_pid = await envoy(children, place, name, grpc, upstreams)
                watched = {"gateway": gateway_pid, "envoy": envoy_pid}
                if not rows:
                    rows["plain"] = await stream(plain, connections, pieces, watched)
                rows[name] = await stream(routed, connections, pieces, watched)
                print(f"{name} measured", file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--pieces", type=int, default=300)
    parser.add_argument("--gap", type=float, default=0.02)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments.connections, arguments.pieces, arguments.gap))
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("| replies | pieces a second | seconds a reply | gateway CPU per piece | Envoy CPU per piece |")
    print("|---|---|---|---|---|")
    for name, row in rows.items():
        cells = (
            f"{row['pieces_per_s']:.0f}",
            f"{row['reply_s']:.2f}",
            f"{row['gateway_us']:.0f} us",
            f"{row['envoy_us']:.0f} us",
        )
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
