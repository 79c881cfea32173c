"""`warmroute template`: does a model's chat template let turn 2 reuse what turn 1 left in the cache?"""

from pathlib import Path

import click
import msgspec

from gateway.commands.common import json_option
from tokenization.errors import TokenizationError
from tokenization.local import LocalTokenizer
from tokenization.probe import BLOCK_SIZES, FOLLOW_UPS, QUESTION, probe, probe_report_text


@click.command("template")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--question", default=QUESTION, help="The user's first turn.")
@click.option("--reply", help="The model's reply; default: 128 tokens of a built-in text.")
@click.option("--follow-up", "follow_ups", multiple=True, help="The user's second turn; may be given several times.")
@click.option("--thinking", type=click.Choice(["on", "off"]), default="off", show_default=True, help="Mode to judge.")
@click.option(
    "--block-size", "block_sizes", type=click.IntRange(min=1), multiple=True, help="May be given several times."
)
@json_option
def command(
    directory: Path,
    question: str,
    reply: str | None,
    follow_ups: tuple[str, ...],
    thinking: str,
    block_sizes: tuple[int, ...],
    as_json: bool,
) -> None:
    """Render turn 1 and turn 2 with the tokenizer and chat template in DIR, and print where turn 2 leaves turn 1 and its
    reply, why, how many tokens it leaves uncached per block size, and what nonCachedTokens threshold follows.
    """
    try:
        tokenizer = LocalTokenizer.from_directory(directory)
        report = probe(
            tokenizer,
            question=question,
            reply=reply,
            follow_ups=follow_ups or FOLLOW_UPS,
            thinking=thinking == "on",
            block_sizes=block_sizes or BLOCK_SIZES,
        )
    except TokenizationError as error:
        raise click.ClickException(f"{directory}: {error.message}") from error
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        click.echo(probe_report_text(report))
