"""`warmroute plugins`: what plugin types there are, and one of them in full."""

import click
import msgspec

from gateway import plugin_docs
from gateway.commands.common import fail, json_option
from gateway.config_source import ConfigError


@click.command("plugins")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List plugin types, or show one: what it does, its parameters and their defaults."""
    try:
        pages = [plugin_docs.find(name)] if name else plugin_docs.pages()
    except ConfigError as error:
        fail(error.problems)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(pages), indent=2))
    else:
        click.echo(plugin_docs.text(pages[0]) if name else plugin_docs.listing(), nl=False)
