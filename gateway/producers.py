"""Which producers the configuration has, by what they find."""

from collections.abc import Mapping

import msgspec

from fleet.plugin import HeaderReader
from gateway.approximate import ApproximateCache
from gateway.burst_room import BurstRoom


class Producers(msgspec.Struct, frozen=True, kw_only=True):
    """Which producer instances want which kind of match, by name."""

    precise: tuple[str, ...] = ()
    approximate: Mapping[str, ApproximateCache] = {}
    bursts: Mapping[str, BurstRoom] = {}
    """Only those whose match something reads."""
    default: str = ""
    booked: str = ""
    """Whose match says what a request costs in the books; "" for the default one's."""
    readers: tuple[HeaderReader, ...] = ()
    """What reads attributes from a request's headers, in the order of the configuration."""

    def block_sizes(self) -> set[int]:
        """Tokens per block at which keys are needed beside the fleet's own."""
        return {it.block_tokens for them in (self.approximate, self.bursts) for it in them.values()}

    def close(self) -> None:
        """Nobody waits for these producers any more."""
        for room in self.bursts.values():
            room.close()
