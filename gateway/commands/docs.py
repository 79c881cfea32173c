"""`warmroute docs`: the pages that are generated from the code, written or checked."""

import sys
from collections.abc import Callable
from pathlib import Path

import click

from gateway import cli_docs, metric_docs, plugin_docs

PAGES: dict[str, Callable[[], str]] = {
    "metrics.md": metric_docs.page,
    "plugins.md": plugin_docs.page,
    "cli.md": cli_docs.page,
}


@click.command("docs")
@click.option("--write", type=click.Path(path_type=Path, file_okay=False), help="Write the pages into this folder.")
@click.option(
    "--check", type=click.Path(path_type=Path, file_okay=False), help="Exit with 1 where a page is not current."
)
def command(write: Path | None, check: Path | None) -> None:
    """Write or check the generated documentation pages (metrics, plugins, command line)."""
    if (write is None) == (check is None):
        raise click.UsageError("give --write DIR or --check DIR")
    stale = []
    for name, page in PAGES.items():
        path = (write or check or Path()) / name
        text = page()
        if write:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            stale.append(str(path))
    for name in stale:
        click.echo(f"{name} is not current; run: warmroute docs --write {check}", err=True)
    sys.exit(1 if stale else 0)
