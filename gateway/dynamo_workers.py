"""Maps from Dynamo's worker ids to where the workers are: as people write them, and from the folder of its file discovery."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20


class WorkerMapError(ValueError):
    """A map of workers that cannot be read; the message says what and where."""


def worker_id(text: object) -> int:
    """An instance id as people write it: a number, decimal or 0x. Raises ValueError."""
    if isinstance(text, bool) or not isinstance(text, int | str):
        raise ValueError(f"a worker id is a number, got {text!r}")
    number = text if isinstance(text, int) else int(text, 0)
    if not 0 <= number < 1 << 64:
        raise ValueError(f"a worker id has 64 bits, got {text!r}")
    return number


def read_workers(text: str, where: str) -> dict[int, str]:
    """A map from worker id to `ip:port`, as JSON or YAML. Raises WorkerMapError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise WorkerMapError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise WorkerMapError(f"{where}: expected a map from worker id to ip:port, got {type(value).__name__}")
    return workers_of(value, where)


def workers_of(value: Mapping[Any, Any], where: str) -> dict[int, str]:
    """The same, of a map that is parsed already."""
    found: dict[int, str] = {}
    for key, address in value.items():
        try:
            number = worker_id(key)
        except ValueError as error:
            raise WorkerMapError(f"{where}: {key}: {error}") from error
        if not isinstance(address, str) or not address.rpartition(":")[2].isdigit():
            raise WorkerMapError(f"{where}: {key}: expected ip:port, got {address!r}")
        found[number] = address
    return found


def discovered(folder: Path, namespace: str) -> dict[int, str]:
    """Worker id -> IP, from the folder of Dynamo's file discovery; unreadable entries are skipped."""
    found: dict[int, str] = {}
    for file in sorted((folder / "v1" / "instances").glob("*/*/*/*")):
        try:
            entry = json.loads(file.read_bytes()[:MOST_BYTES])
            target = next(iter(entry["transport"].values()))
            if namespace and entry["namespace"] != namespace and not entry["namespace"].startswith(f"{namespace}-"):
                continue
            found[worker_id(entry["instance_id"])] = str(target).partition("/")[0].rpartition(":")[0]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
            log.debug("dynamo_instance_skipped file=%s error=%r", file, error)
    return found
