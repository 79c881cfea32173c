"""`warmroute demo`: the whole path on one machine, in under two minutes."""

import sys
from pathlib import Path

import click

from gateway.commands.common import json_option
from gateway.demo import DemoOptions, run_demo


@click.command("demo")
@click.option("--keep", is_flag=True, help="Leave everything running at the end and print a curl line to try.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="Envoy's port.")
@click.option(
    "--requests", type=click.IntRange(min=8), default=240, show_default=True, help="Sent twice, once each way."
)
@click.option("--engines", type=click.IntRange(2, 16), default=4, show_default=True)
@click.option("--blocks", type=click.IntRange(min=64), default=2200, show_default=True, help="KV blocks per engine.")
@click.option("--seed", default=7, show_default=True, help="Of the traffic.")
@click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="For logs and configurations; a demo follows the files in it, so two need two.  [default: demo-logs/PORT]",
)
@json_option
def command(
    keep: bool, port: int, requests: int, engines: int, blocks: int, seed: int, logs: Path | None, as_json: bool
) -> None:
    """Run four simulated engines, the gateway and a real Envoy on this machine, send the same multi-turn chats by round
    robin and through Warmroute, and print both results side by side."""
    logs = logs or Path("demo-logs") / str(port)
    options = DemoOptions(
        keep=keep, json=as_json, port=port, requests=requests, engines=engines, blocks=blocks, seed=seed, logs=logs
    )
    sys.exit(run_demo(options))
