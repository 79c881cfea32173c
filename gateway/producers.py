"""Which producers the configuration has, by what they find."""

from collections.abc import Mapping

import msgspec

from fleet.plugin import HeaderReader
from gateway.approximate import ApproximateCache


class Producers(msgspec.Struct, frozen=True, kw_only=True):
    """Which producer instances want which kind of match, by name."""

    precise: tuple[str, ...] = ()
    approximate: Mapping[str, ApproximateCache] = {}
    default: str = ""
    readers: tuple[HeaderReader, ...] = ()
    """What reads attributes from a request's headers, in the order of the configuration."""
