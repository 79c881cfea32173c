"""`warmroute top`: the fleet on a terminal, as the running gateway sees it."""

import asyncio
import sys
import time
from pathlib import Path

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.live import Live

from gateway.admin_access import BEARER, token_of
from gateway.commands.common import json_option, load_or_exit
from gateway.http_errors import reason
from gateway.top import Frame, drawn, from_metrics, from_state

WIDE = 132
"""Columns of output that goes to no terminal."""


class Source(msgspec.Struct, frozen=True):
    """Where frames come from."""

    url: str
    headers: dict[str, str] = {}


@click.command("top")
@click.option("--admin", metavar="HOST:PORT", help="The gateway's admin port.  [default: 127.0.0.1:9091]")
@click.option(
    "--token-file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Holds the admin port's token, where it has one.",
)
@click.option("--metrics", metavar="HOST:PORT", help="Its metrics port instead: no single decisions.")
@click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take the ports from the gateway's configuration.",
)
@click.option(
    "--interval", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between frames."
)
@click.option("--once", is_flag=True, help="Print one frame and end.")
@json_option
def command(
    admin: str | None,
    token_file: Path | None,
    metrics: str | None,
    config_file: Path | None,
    interval: float,
    once: bool,
    as_json: bool,
) -> None:
    """Show a running gateway's endpoints (role, trust, load, match share, event lag) and its last decisions with their
    reasons. Needs warmroute.adminPort, or does with /metrics and shows less. With --json one frame is printed per line."""
    if sum(given is not None for given in (admin, metrics, config_file)) > 1:
        raise click.UsageError("give one of --admin, --metrics and --config")
    token = token_file.read_text().strip() if token_file is not None else None
    if config_file is not None:
        settings = load_or_exit(config_file).settings
        token = token or token_of(settings)
        if settings.admin_port is not None:
            admin = f"{_reachable(settings.admin_listen)}:{settings.admin_port}"
        else:
            metrics = f"{_reachable(settings.metrics_listen)}:{settings.metrics_port}"
    source = Source(
        f"http://{metrics}/metrics" if metrics else f"http://{admin or '127.0.0.1:9091'}/state",
        {"Authorization": f"{BEARER}{token}"} if token and not metrics else {},
    )
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    try:
        if once or as_json:
            _print(source, interval, once, as_json, console)
        else:
            _live(source, interval, console)
    except KeyboardInterrupt:
        pass


def _reachable(listen: str) -> str:
    return "127.0.0.1" if listen in ("0.0.0.0", "::", "") else listen


def _print(source: Source, interval: float, once: bool, as_json: bool, console: Console) -> None:
    while True:
        frame = _frame_or_exit(source)
        if as_json:
            click.echo(msgspec.json.encode(frame))
        else:
            console.print(drawn(frame))
        if once:
            return
        time.sleep(interval)


def _live(source: Source, interval: float, console: Console) -> None:
    frame = _frame_or_exit(source)  # what is wrong from the beginning ends it; later the last frame stays
    with Live(drawn(frame), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                live.update(drawn(asyncio.run(_frame(source))), refresh=True)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                live.update(f"{source.url}: {reason(error) or 'no answer'}; trying again", refresh=True)


def _frame_or_exit(source: Source) -> Frame:
    url = source.url
    try:
        return asyncio.run(_frame(source))
    except (aiohttp.ClientError, OSError) as error:
        click.echo(f"error: {url}: {reason(error) or 'no answer'}; {_hint(url)}", err=True)
    except ValueError as error:
        click.echo(f"error: {url}: {error}", err=True)
    sys.exit(1)


def _hint(url: str) -> str:
    """What would be right where nobody, or somebody else, answers."""
    if url.endswith("/state"):
        return "give --admin the gateway's warmroute.adminPort, or --metrics its metricsPort, or -c its configuration"
    return "give --metrics the warmroute.metricsPort of a gateway that runs, or -c its configuration"


async def _frame(source: Source) -> Frame:
    """Raises aiohttp.ClientError, OSError, ValueError."""
    url = source.url
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5), headers=source.headers) as session,
        session.get(url, raise_for_status=True) as answer,
    ):
        body = await answer.read()
    if url.endswith("/metrics"):
        if b"\nwarmroute_" not in body:
            raise ValueError(f"this is not a gateway's metrics page; {_hint(url)}")
        return from_metrics(body.decode(), url)
    try:
        return from_state(msgspec.json.decode(body), url)
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not the admin port of a gateway of this release: {error!r}") from error
