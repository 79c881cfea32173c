"""`warmroute envoy-config`: the Envoy in front, generated from the same configuration."""

import asyncio
from pathlib import Path
from typing import Any

import click

from fleet.endpoint import Endpoint
from fleet.plugin import Discovery
from gateway.commands.common import config_option, load_or_exit
from gateway.config import LoadedConfig
from gateway.envoy_config import EnvoyConfigError, EnvoyParameters, PickerTls, envoy_yaml

LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::", "")


@click.command("envoy-config")
@config_option
@click.option("--mode", type=click.Choice(["BUFFERED", "FULL_DUPLEX_STREAMED"]), help="Overrides warmroute.envoy.mode.")
@click.option("--picker", metavar="HOST:PORT", help="Where Envoy finds the gateway; default: the configured gRPC port.")
@click.option("--plain", metavar="HOST:PORT", help="Also listen here without the picker (round robin), to compare.")
@click.option(
    "--dynamic-hosts", is_flag=True, help="Send to any address the picker names, not only to known endpoints."
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write to a file.")
def command(
    config_file: Path, mode: Any, picker: str | None, plain: str | None, dynamic_hosts: bool, output: Path | None
) -> None:
    """Print the Envoy configuration that goes with a configuration (what each setting is for: docs/envoy.md)."""
    config = load_or_exit(config_file)
    try:
        endpoints = asyncio.run(known_endpoints(config.discovery)) if config.discovery else []
        text = envoy_yaml(parameters(config, endpoints, mode, picker, plain, dynamic_hosts))
    except (EnvoyConfigError, OSError, ValueError) as error:
        raise click.ClickException(f"{config_file}: {error}") from error
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            output.write_text(text)
        except OSError as error:
            raise click.FileError(str(output), error.strerror or str(error)) from error
        click.echo(f"wrote {output}", err=True)


async def known_endpoints(discovery: Discovery) -> list[Endpoint]:
    """The fleet as discovery sees it now."""
    async for found in discovery.changes():
        return found.endpoints
    return []


def parameters(
    config: LoadedConfig,
    endpoints: list[Endpoint],
    mode: Any = None,
    picker: str | None = None,
    plain: str | None = None,
    dynamic_hosts: bool = False,
) -> EnvoyParameters:
    """What the configuration says about Envoy, with the command line's overrides."""
    settings = config.settings
    envoy = settings.envoy
    host = LOOPBACK if settings.listen in EVERYWHERE else settings.listen
    return EnvoyParameters(
        listen=f"{envoy.address}:{envoy.port}",
        endpoints=tuple(dict.fromkeys(endpoint.address for endpoint in endpoints)),
        picker=picker or f"{host}:{settings.grpc_port}",
        mode=mode or envoy.mode,
        fail_open=envoy.fail_open,
        message_timeout_s=config.decision_limit_s + 2.0,  # the gateway's own answer to a late decision comes first
        buffer_limit_bytes=2 * settings.max_body_bytes,
        picker_tls=PickerTls() if settings.tls else None,
        admin=f"{LOOPBACK}:{envoy.admin_port}" if envoy.admin_port else None,
        plain_listen=plain,
        dynamic_hosts=dynamic_hosts,
    )
