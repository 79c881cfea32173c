"""`warmroute serve`: the endpoint picker, in front of somebody's own fleet."""

import asyncio
import signal
import sys
from pathlib import Path

import click
import uvloop

from gateway import logs
from gateway.commands.common import config_option, load_or_exit
from gateway.config import LoadedConfig


@click.command("serve")
@config_option
@click.option("--log-level", type=click.Choice(logs.LEVELS), default="info", show_default=True)
@click.option("--log-json", is_flag=True, help="One JSON object per line.")
def command(config_file: Path, log_level: str, log_json: bool) -> None:
    """Run the endpoint picker until SIGTERM or Ctrl-C. SIGHUP, or a change of FILE, reloads the configuration; an invalid
    one is refused and the old one stays in force.

    Exit status 0 stopped as asked, 1 could not start, 2 invalid configuration.
    """
    logs.configure(log_level, as_json=log_json)
    config = load_or_exit(config_file)
    sys.exit(uvloop.run(_serve(config, config_file)))


async def _serve(config: LoadedConfig, config_file: Path) -> int:
    # Imported late, so that a broken configuration is reported before a second of imports.
    from gateway import interpreter
    from gateway.runtime import Gateway, StartError

    interpreter.share()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    gateway = Gateway(config, config_file)
    loop.add_signal_handler(signal.SIGHUP, gateway.reload)
    try:
        await gateway.start()
    except StartError as error:
        click.echo(f"error: {error}", err=True)
        await gateway.stop()
        return 1
    gateway.when_reloaded = interpreter.settle
    interpreter.settle()
    await stop.wait()
    await gateway.stop()
    return 0
