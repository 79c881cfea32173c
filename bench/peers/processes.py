"""CPU time and memory of a process and everything it started, from /proc (Linux)."""

import os
from collections.abc import Mapping
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_ms(parts: Mapping[str, int]) -> dict[str, float]:
    """User and system time so far, milliseconds, by part; resolution 10 ms."""
    return {name: sum(int(f[11]) + int(f[12]) for f in _group(pid)) / _TICKS * 1e3 for name, pid in parts.items()}


def rss_mb(parts: Mapping[str, int]) -> dict[str, float]:
    """Resident memory now, MiB, by part."""
    return {name: sum(int(f[21]) for f in _group(pid)) * _PAGE_MB for name, pid in parts.items()}


def _group(leader: int) -> list[list[str]]:
    """The fields of /proc/PID/stat from the third on, of every process in a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if int(fields[2]) == leader:
                found.append(fields)
    return found
