"""Who a request is from: what header readers find in its headers, and the fairness id that follows."""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from fleet.plugin import HeaderReader
from gateway import control_headers as control
from scorers.agent_identity import ATTRIBUTE


class Identity(msgspec.Struct, frozen=True):
    attributes: Mapping[str, str]
    """By attribute name; without those that the request does not have."""
    fairness_id: str


def identify(
    headers: Mapping[str, str], readers: Iterable[HeaderReader], failed: Callable[[HeaderReader, Exception], None]
) -> Identity:
    """`failed` is told of a reader that raised: the request goes on without its attribute."""
    attributes: dict[str, str] = {}
    for reader in readers:
        try:
            found = reader.read(headers)
        except Exception as error:  # noqa: BLE001 - anybody's code, and it costs its own data only
            failed(reader, error)
            continue
        if found:
            attributes[reader.attribute] = found
    return Identity(attributes, control.fairness_id(headers, attributes.get(ATTRIBUTE)))
