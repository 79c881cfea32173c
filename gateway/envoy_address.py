"""Addresses as people write them and as Envoy's configuration wants them."""

import ipaddress
from typing import Any


class EnvoyConfigError(ValueError):
    """Parameters that no working configuration can be made of."""


def socket_address(address: str) -> dict[str, Any]:
    """Envoy's Address message."""
    host, port = split(address)
    return {"socket_address": {"address": host, "port_value": port}}


def split(address: str) -> tuple[str, int]:
    """Host (without brackets) and port. Raises EnvoyConfigError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise EnvoyConfigError(f"{address!r} is not an address; right would be '10.0.0.1:8000' or '[::1]:8000'")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_numeric(host: str) -> bool:
    """True for an IP address, False for a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
