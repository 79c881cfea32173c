"""What several commands share: the configuration option, and how a broken configuration is reported."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import click

from gateway.config import LoadedConfig, load
from gateway.config_source import ConfigError, Problem

BROKEN_CONFIGURATION = 2

config_option: Callable[[Any], Any] = click.option(
    "-c",
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="EndpointPickerConfig (YAML).",
)
json_option: Callable[[Any], Any] = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def load_or_exit(config_file: Path) -> LoadedConfig:
    """The configuration; warnings go to stderr. With problems all of them are printed and the process ends with 2."""
    try:
        config = load(config_file)
    except ConfigError as error:
        fail(error.problems)
    except OSError as error:
        raise click.FileError(str(config_file), error.strerror or str(error)) from error
    for warning in config.warnings:
        click.echo(f"warning: {warning}", err=True)
    return config


def fail(problems: Iterable[Problem]) -> NoReturn:
    """Print every problem and end the process."""
    for problem in problems:
        click.echo(f"error: {problem}", err=True)
    sys.exit(BROKEN_CONFIGURATION)
