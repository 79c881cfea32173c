"""`warmroute events`: record an engine's event stream, and play a recording through the ingest path."""

import signal
import sys
import threading
from pathlib import Path

import click

from event_ingest.recording import RecordingError
from event_ingest.replaying import replay_recording, replay_report_text, report_json
from gateway.commands.common import json_option


@click.group("events")
def command() -> None:
    """Record and replay engines' event streams."""


@command.command("replay")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--meta",
    "meta_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Requests with engine-reported cached tokens; default: FILE with .meta.json, where it exists.",
)
@click.option("--block-size", type=click.IntRange(min=1), help="Router block size; default: the engine's own.")
@json_option
def replay(file: Path, meta_file: Path | None, block_size: int | None, as_json: bool) -> None:
    """Play FILE (as `events record` writes it) through the ingest path: what the index holds, what was skipped and
    why, and for every request of the meta file predicted against reported cached tokens."""
    if meta_file is None:
        beside = file.with_name(file.name.removesuffix(".jsonl") + ".meta.json")
        meta_file = beside if beside.is_file() else None
    try:
        report = replay_recording(file, meta_file, block_size)
    except RecordingError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.FileError(error.filename or str(file), error.strerror or str(error)) from error
    click.echo(report_json(report) if as_json else replay_report_text(report))


@command.command("record")
@click.option(
    "--endpoint",
    required=True,
    metavar="ADDR",
    help="The engine's PUB socket, as tcp://10.0.0.1:5557; bind:tcp://0.0.0.0:5557 where the engine connects to us.",
)
@click.option(
    "--replay", "replay_endpoint", metavar="ADDR", help="The engine's replay socket, to begin with its buffer."
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to write.")
@click.option("--topic", default="", help="Subscription prefix; default: everything.")
@click.option("--seconds", type=click.FloatRange(min=0), help="Stop after so long; default: until Ctrl-C.")
def record(endpoint: str, replay_endpoint: str | None, output: Path, topic: str, seconds: float | None) -> None:
    """Record an engine's event stream to a file that `events replay` plays."""
    from event_ingest.recorder import record as record_stream
    from event_ingest.sockets import AddressError

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    shown = -1

    def progress(messages: int) -> None:
        nonlocal shown
        if messages != shown and sys.stderr.isatty():
            click.echo(f"\r{messages} messages", nl=False, err=True)
        shown = messages

    click.echo(f"recording {endpoint} to {output}; Ctrl-C ends it", err=True)
    try:
        with output.open("w") as out:
            total = record_stream(
                endpoint, replay_endpoint, out, topic=topic, duration_s=seconds, stop=stop, progress=progress
            )
    except AddressError as error:
        raise click.BadParameter(str(error), param_hint="--endpoint / --replay") from error
    except OSError as error:
        raise click.FileError(str(output), error.strerror or str(error)) from error
    click.echo(f"{output}: {total} messages", err=True)
    if not total:
        hint = "is the engine started with --kv-events-config, and has it stored a block since?"
        click.echo(f"nothing was heard from {endpoint}: {hint}", err=True)
        sys.exit(1)
