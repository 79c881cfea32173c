"""The command line. A command's module is imported when it runs, so that `--help` and `check` start at once."""

import importlib
import sys
from difflib import get_close_matches
from importlib.metadata import version
from typing import Any

import click

COMMANDS = {
    "serve": ("gateway.commands.serve", "Run the endpoint picker."),
    "check": ("gateway.commands.check", "Validate a configuration without starting anything."),
    "explain": ("gateway.commands.explain", "Say where one request would go, and why."),
    "envoy-config": ("gateway.commands.envoy", "Print the Envoy configuration that goes with a configuration."),
    "demo": ("gateway.commands.demo", "Run the whole path on this machine: engines, gateway, Envoy, traffic."),
    "doctor": ("gateway.commands.doctor", "Find out which wire of a live fleet is broken, and how to mend it."),
    "top": ("gateway.commands.top", "Show a running gateway's endpoints, streams and decisions, live."),
    "events": ("gateway.commands.events", "Record and replay engines' event streams."),
    "hash": ("gateway.commands.hash", "Print engine hashes and block keys of token ids."),
    "template": ("gateway.commands.template", "Find out whether a chat template lets a second turn reuse the first."),
    "plugins": ("gateway.commands.plugins", "List plugin types, their parameters and defaults."),
    "docs": ("gateway.commands.docs", "Write the generated documentation pages."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' one-line help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and (near := get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, help_) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(version("warmroute"), prog_name="warmroute")
def cli() -> None:
    """Warmroute: a cache-aware endpoint picker for fleets of vLLM engines."""


def main() -> None:
    """Entry point. Exit status: 0 done, 1 the command found or met a problem, 2 wrong usage or configuration."""
    arguments: dict[str, Any] = {"prog_name": "warmroute"}
    sys.exit(cli.main(**arguments))
