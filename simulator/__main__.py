"""`python -m simulator`: one simulated vLLM engine as a process. Prints one line when it serves, ends on SIGTERM."""

import asyncio
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import click
import uvloop
import zmq
from aiohttp import web

from simulator.server import EngineServer
from simulator.settings import ServerSettings
from simulator.step_cost import PROFILES
from simulator.wire import WireFormat
from tokenization.local import LocalTokenizer

_PR_SET_PDEATHSIG = 1


@click.command(context_settings={"show_default": True})
@click.option("--name", default="engine", help="Name in the x-sim-engine response header.")
@click.option("--host", default="127.0.0.1")
@click.option("--port", default=8000)
@click.option("--model", default="sim", help="Served model name.")
@click.option("--tokenizer", default="configs/models/qwen3", type=click.Path(path_type=Path), help="Model directory.")
@click.option("--lora", multiple=True, metavar="NAME=PATH", help="A LoRA adapter; may be repeated.")
@click.option("--events-port", type=int, help="Bind the event PUB to this port of --host.")
@click.option("--replay-port", type=int, help="Bind the replay ROUTER to this port of --host.")
@click.option("--events", help="Event address by vLLM's rule: with a * it is bound, otherwise connected to.")
@click.option("--topic", default="")
@click.option("--rank", default=0, help="Data-parallel rank in the event batches.")
@click.option("--buffer-steps", default=10_000, help="Batches kept for replay.")
@click.option("--array-events", is_flag=True, help="Encode events as arrays, as older releases do.")
@click.option("--byte-hashes", is_flag=True, help="Publish whole digests instead of 64-bit integers.")
@click.option("--hash-algorithm", default="sha256")
@click.option("--hash-seed", help="PYTHONHASHSEED of the engine; unset by default.")
@click.option("--block-size", default=16)
@click.option("--blocks", default=4096, help="KV blocks, the null block included.")
@click.option("--no-prefix-caching", is_flag=True)
@click.option("--max-num-seqs", default=256)
@click.option("--max-num-batched-tokens", default=8192)
@click.option("--max-model-len", type=int)
@click.option("--profile", default="8b", type=click.Choice(list(PROFILES)), help="Step-time constants.")
@click.option("--speed", default=1.0, help="Step times are divided by this.")
@click.option("--reply-tokens", default=64, help="Typical length of a reply that is not cut short.")
@click.option("--recompute-failed-loads", is_flag=True, help="Prefill here when a hand-off fails, instead of an error.")
@click.option("--kv-lease", default=30.0, help="Seconds that a prefill leg's blocks are held.")
@click.option("--die-with-parent", is_flag=True, help="End when the parent process ends (Linux).")
def main(
    tokenizer: Path,
    lora: tuple[str, ...],
    host: str,
    events_port: int | None,
    replay_port: int | None,
    events: str | None,
    array_events: bool,
    byte_hashes: bool,
    block_size: int,
    no_prefix_caching: bool,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    recompute_failed_loads: bool,
    kv_lease: float,
    die_with_parent: bool,
    **same: object,
) -> None:
    """Serve one simulated engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if die_with_parent:
        _die_with_parent()
    try:
        settings = ServerSettings(
            host=host,
            loras=dict(_lora(text) for text in lora),
            events=f"tcp://{host}:{events_port}" if events_port else events,
            bind_events=True if events_port else None,
            replay=f"tcp://{host}:{replay_port}" if replay_port else None,
            wire=WireFormat(arrays=array_events, whole_digests=byte_hashes),
            block_tokens=block_size,
            caching=not no_prefix_caching,
            max_running=max_num_seqs,
            token_budget=max_num_batched_tokens,
            load_failure_recompute=recompute_failed_loads,
            lease_s=kv_lease,
            **same,  # type: ignore[arg-type]  # click has converted them
        )
        settings.engine()  # refuse what is wrong with it before the tokenizer takes its seconds
        # The reference encoder: it loads in half the time, and what a router computes is checked against another library.
        server = EngineServer(settings, LocalTokenizer.from_directory(tokenizer, encoder="tokenizers"))
    except (ValueError, OSError) as error:
        sys.exit(f"cannot start the simulated engine: {error}")
    try:
        uvloop.run(_serve(server))
    except (OSError, zmq.ZMQError) as error:
        sys.exit(f"cannot serve on {settings.host}:{settings.port}: {error}")


async def _serve(server: EngineServer) -> None:
    settings = server.settings
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    try:
        await runner.setup()
        await web.TCPSite(runner, settings.host, settings.port).start()
        publisher = server.publisher
        print(
            f"ready name={settings.name} http={settings.host}:{settings.port} "
            f"events={publisher.endpoint if publisher else '-'} "
            f"replay={(publisher.replay_endpoint if publisher else None) or '-'}",
            flush=True,
        )
        await stop.wait()
    finally:
        await runner.cleanup()


def _lora(text: str) -> tuple[str, str]:
    name, found, path = text.partition("=")
    if not found:
        raise ValueError(f"--lora {text!r}: expected NAME=PATH")
    return name, path


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        sys.exit("the parent process is gone")


if __name__ == "__main__":
    main()
