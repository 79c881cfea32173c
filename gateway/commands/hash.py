"""`warmroute hash`: engine hashes and router keys of token ids, to compare with what an engine publishes."""

import sys
from typing import Any

import click
import msgspec

from gateway.commands.common import json_option
from indexer import block_key, engine_hash, llmd_hash
from indexer.engine_hash import Algorithm, UnknownSeedError
from indexer.extra_keys import ExtraKeys


@click.command("hash")
@click.argument("tokens", nargs=-1, required=True)
@click.option("--block-size", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option(
    "--algorithm", type=click.Choice([*(it.value for it in Algorithm), "all"]), default="all", show_default=True
)
@click.option("--seed", help="PYTHONHASHSEED of the engine; default: unset.")
@click.option("--model", default="", help="Model name: seeds llm-d's keys and the router's own.")
@click.option("--salt", help="cache_salt of the request.")
@click.option("--lora", nargs=2, metavar="NAME PATH", help="LoRA adapter, as the engine knows it.")
@json_option
def command(
    tokens: tuple[str, ...],
    block_size: int,
    algorithm: str,
    seed: str | None,
    model: str,
    salt: str | None,
    lora: tuple[str, str] | None,
    as_json: bool,
) -> None:
    """Print the block hashes of TOKENS (ids, separated by spaces or commas; `-` reads them from standard input).

    Hashes are what vLLM publishes: the low 64 bits of the digest.
    """
    ids = _ids(sys.stdin.read().split() if tokens == ("-",) else list(tokens))
    blocks = len(ids) // block_size
    if not blocks:
        raise click.UsageError(
            f"{len(ids)} token ids do not fill one block of {block_size}, and only full blocks have a hash: give at least "
            f"{block_size} ids, or the engine's --block-size"
        )
    result: dict[str, Any] = {"block_size": block_size, "blocks": blocks, "left_over": len(ids) % block_size}
    extras = [ExtraKeys(lora=lora, salt=salt if number == 0 else None) for number in range(blocks)]
    chosen = tuple(Algorithm) if algorithm == "all" else (Algorithm(algorithm),)
    for name in chosen:
        try:
            digests = engine_hash.block_hashes(name, engine_hash.none_hash(name, seed), ids, block_size, extras)
        except UnknownSeedError:
            result[name] = None
            continue
        result[name] = [{"wire": engine_hash.wire(digest), "digest": digest.hex()} for digest in digests]
    adapter = lora[0] if lora else None
    for kind in llmd_hash.Algorithm:
        root = llmd_hash.root_key(kind, adapter or model, seed or "")
        llmd_extras = [[salt], *[None] * (blocks - 1)] if salt and blocks else None
        result[f"llm-d {kind}"] = llmd_hash.block_keys(kind, root, ids, block_size, llmd_extras)
    result["warmroute"] = block_key.block_keys(block_key.root_key(model, lora=adapter, salt=salt), ids, block_size)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=2))
        return
    for label, values in result.items():
        if values is None:
            click.echo(f"{label:16} cannot be computed: without PYTHONHASHSEED its seed is random per process")
        elif isinstance(values, list):
            for number, value in enumerate(values):
                shown = f"{value['wire']:<20} {value['digest']}" if isinstance(value, dict) else str(value)
                click.echo(f"{label:16} block {number:<4} {shown}")
    if result["left_over"]:
        click.echo(f"{result['left_over']} tokens at the end do not fill a block", err=True)


def _ids(words: list[str]) -> list[int]:
    ids = []
    for word in " ".join(words).replace(",", " ").split():
        if not word.isdecimal() or int(word) > 2**32 - 1:
            raise click.BadParameter(f"expected token ids from 0 to 2^32-1, got {word!r}", param_hint="TOKENS")
        ids.append(int(word))
    return ids
