"""`warmroute explain`: where one request would go, and why, without running anything."""

import asyncio
import json
from pathlib import Path

import click
import msgspec

from gateway.commands.common import config_option, json_option, load_or_exit
from gateway.explain import explanation_text
from gateway.fleet_dump import DumpError, read_dump
from gateway.offline import Refused, explain_offline
from gateway.tokenizers import TokenizerError

_file = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command("explain")
@config_option
@click.argument("request_file", metavar="REQUEST.json", type=_file)
@click.option("--state", metavar="DUMP.json", type=_file, help="Fleet and index as GET /state/dump wrote them.")
@click.option("--path", "path", metavar="PATH", help="Of the request; default: by what the body contains.")
@click.option("-H", "--header", "headers", multiple=True, metavar="NAME:VALUE", help="May be given several times.")
@json_option
def command(
    config_file: Path,
    request_file: Path,
    state: Path | None,
    path: str | None,
    headers: tuple[str, ...],
    as_json: bool,
) -> None:
    """Print where the request in REQUEST.json (its body) would go: what every candidate holds, costs and scores, what removed
    it, what the decider said.

    Without --state the fleet is the configured one, idle and with empty caches. Exit status 1: the request is refused or a
    file cannot be used.
    """
    config = load_or_exit(config_file)
    body = request_file.read_bytes()
    try:
        dump = read_dump(state.read_bytes()) if state else None
        told = asyncio.run(explain_offline(config, body, path or _path_of(body), _named(headers), dump))
    except DumpError as error:
        raise click.ClickException(f"{state}: {error}") from error
    except Refused as refused:
        raise click.ClickException(f"{request_file}: the gateway answers {refused}") from refused
    except (TokenizerError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if dump is not None and not dump.complete:
        click.echo("note: the dump does not hold all block keys; ask for more with GET /state/dump?keys=N", err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
        return
    if dump is None:
        click.echo("without --state: an idle fleet with empty caches, whose event streams are unknown", err=True)
    if told["blind"]:
        click.echo(f"routed by load only: {told['blind']} (docs/troubleshooting.md#blind-{told['blind']})")
    click.echo(explanation_text(told))


def _path_of(body: bytes) -> str:
    """/v1/chat/completions, or /v1/completions for a body with a prompt."""
    try:
        fields = json.loads(body)
    except ValueError:
        return "/v1/chat/completions"  # the gateway's own error message says what is wrong
    return "/v1/completions" if isinstance(fields, dict) and "prompt" in fields else "/v1/chat/completions"


def _named(headers: tuple[str, ...]) -> dict[str, str]:
    named = {}
    for header in headers:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.BadParameter(f"expected NAME:VALUE, got {header!r}", param_hint="--header")
        named[name.strip().lower()] = value.strip()
    return named
