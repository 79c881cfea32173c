"""What can be said about a configuration's endpoints before anything is started."""

from pathlib import Path

from fleet.discovery import FileDiscovery, StaticDiscovery
from fleet.endpoints_document import parse
from fleet.plugin import Discovery
from gateway.config_plugins import Plugins
from gateway.config_source import Problem


def shared_sockets(plugins: Plugins) -> None:
    """Warn of addresses that two endpoints have: what one engine announces would be booked on both."""
    for name, discovery in plugins.of(StaticDiscovery).items():
        taken: dict[str, str] = {}
        for endpoint in discovery.endpoints():
            for key, address in (("events", endpoint.events), ("replay", endpoint.replay)):
                if address is None:
                    continue
                mine = f"{endpoint.name}'s {key}"
                if (other := taken.setdefault(address.removeprefix("bind:"), mine)) == mine:
                    continue
                entries = discovery.parameters.endpoints
                index = next(
                    at
                    for at, it in enumerate(entries)
                    if it.namespace == endpoint.namespace
                    and endpoint.name in (it.name, f"{it.name}-rank-{endpoint.rank}")
                )
                at = (*plugins.at[name], "parameters", "endpoints", index, key)
                plugins.warn(
                    at, f"{address} is {other} too; every engine and rank publishes and replays on ports of its own"
                )


def endpoints_file(discovery: Discovery | None) -> list[Problem]:
    """What is wrong now with the file that a file-discovery reads."""
    if not isinstance(discovery, FileDiscovery):
        return []
    path = discovery.parameters.path
    try:
        found = parse(Path(path).read_bytes(), path).problems
    except OSError as error:
        return [Problem(path, (), f"cannot be read: {error.strerror}; `serve` does not start without it")]
    except ValueError as error:
        found = [str(error)]
    return [Problem(path, (), problem.removeprefix(f"{path}: ")) for problem in found]
