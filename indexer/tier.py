"""Where a block lives: a small int for every medium that engines announce, fastest first.

| tier | media (case does not matter) |
|---|---|
| GPU 0 | `GPU`, `DEVICE`, and an absent medium: engines that know one tier only do not name it |
| CPU 1 | `CPU`, `CPU_PINNED`, `HOST`, `HOST_PINNED`, `LOCALCPUBACKEND` |
| DISK 2 | `DISK`, `STORAGE`, `EXTERNAL`, `REMOTE`, `LOCALDISKBACKEND`, `REMOTEBACKEND`, `FS`, `OBJ` |

An unknown medium counts as DISK, the tier with the smallest claim, so a new name can make the router underrate a
block but never overrate it. `is_known` lets the caller count such names.
"""

from typing import Final, TypeAlias

Tier: TypeAlias = int

GPU: Final[Tier] = 0
CPU: Final[Tier] = 1
DISK: Final[Tier] = 2

NAMES: Final = ("gpu", "cpu", "disk")

_BY_MEDIUM: Final[dict[str, Tier]] = {
    "gpu": GPU,
    "device": GPU,
    "cpu": CPU,
    "cpu_pinned": CPU,
    "host": CPU,
    "host_pinned": CPU,
    "localcpubackend": CPU,
    "disk": DISK,
    "storage": DISK,
    "external": DISK,
    "remote": DISK,
    "localdiskbackend": DISK,
    "remotebackend": DISK,
    "fs": DISK,
    "obj": DISK,
}


def tier_of(medium: str | None) -> Tier:
    """The tier of a medium as an event names it."""
    if not medium:
        return GPU
    return _BY_MEDIUM.get(medium.lower(), DISK)


def is_known(medium: str | None) -> bool:
    """Whether `tier_of` knows this medium, or only assumes the slowest tier for it."""
    return not medium or medium.lower() in _BY_MEDIUM
