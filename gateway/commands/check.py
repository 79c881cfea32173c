"""`warmroute check`: validate without starting."""

import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from gateway.commands.common import BROKEN_CONFIGURATION, config_option, json_option
from gateway.config import validate
from gateway.config_source import Problem


@click.command("check")
@config_option
@json_option
def command(config_file: Path, as_json: bool) -> None:
    """Validate a configuration: every problem and warning, with its place; what is wrong with the file of a file-discovery
    is a warning, since something else writes it. Exit status 0 valid, 2 not valid."""
    problems, warnings = validate(config_file)
    if as_json:
        report = {"ok": not problems, "problems": _rows(problems), "warnings": _rows(warnings)}
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        for problem in problems:
            click.echo(f"error: {problem}")
        for warning in warnings:
            click.echo(f"warning: {warning}")
        if not problems:
            click.echo(f"{config_file}: ok")
    sys.exit(BROKEN_CONFIGURATION if problems else 0)


def _rows(problems: list[Problem]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(problem) for problem in problems]
