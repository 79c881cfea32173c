"""`warmroute doctor`: which wire is broken, and what to write where."""

import asyncio
import sys
from pathlib import Path

import click
import msgspec

from gateway import logs
from gateway.commands.common import BROKEN_CONFIGURATION, config_option, json_option, load_or_exit


@click.command("doctor")
@config_option
@json_option
@click.option(
    "--envoy",
    "envoy_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Envoy's configuration (or a saved /config_dump); default: ask the configured admin port.",
)
@click.option("--no-requests", is_flag=True, help="Send engines no prompts; finds less.")
def command(config_file: Path, as_json: bool, envoy_file: Path | None, no_requests: bool) -> None:
    """Examine a live fleet: engines, their event streams, tokenizers and templates, the gateway (running or not) and Envoy.
    Prints what was checked and, for each finding, what was seen and what to write where. Takes less than 30 seconds.

    Engines are asked for one token twice (a prompt of about a hundred tokens), so that there are events to be heard.

    Exit status 0 clean, 1 findings, 2 could not run.
    """
    from gateway.doctor.envoy_probe import EnvoyFileError
    from gateway.doctor.examination import examine
    from gateway.doctor.report import report_text

    logs.configure("error", as_json=False)
    config = load_or_exit(config_file)
    try:
        report = asyncio.run(examine(config, envoy_file, requests=not no_requests))
    except (EnvoyFileError, OSError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(BROKEN_CONFIGURATION)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        click.echo(report_text(report), nl=False)
    sys.exit(1 if report.findings else 0)
