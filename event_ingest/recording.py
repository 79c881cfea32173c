"""Recordings of event streams, and playing them through the ingest path.

A recording is a text file, one message per line: `{"t": receive time, s, "port": port of the stream, "frames": [base64, ..]}`.
Messages of a subscription have three frames (topic, sequence number, payload); what a replay socket answered begins with an
empty frame (`b"", topic, sequence number, payload`, or without the topic) and ends with a marker.

Beside it there may be a meta file: `requests` in the order in which they finished, each with `t0` (send time, s),
`prompt_token_ids`, the engine's `cached_tokens` (or `usage.prompt_tokens_details.cached_tokens`), and where there are images
`features` as the engine's /render answers them; entries with an `action` or an administrative `response` are no requests.
`engine.args` and `engine.env` tell model name, hash algorithm and seed.
"""

import base64
import binascii
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from event_ingest.stream import END_MARKER


class RecordingError(ValueError):
    """A file that is no recording, or no meta file: says where and what would be right."""


class Message(msgspec.Struct, frozen=True):
    """One recorded multipart message."""

    t: float
    port: int
    frames: tuple[bytes, ...]

    @property
    def is_replay(self) -> bool:
        """Whether it came from a replay socket: an empty delimiter first, and more than a subscription's message."""
        return self.is_end or (len(self.frames) == 4 and self.frames[0] == b"")

    @property
    def is_end(self) -> bool:
        return len(self.frames) >= 2 and self.frames[-2] == END_MARKER


class _Line(msgspec.Struct):
    t: float
    port: int
    frames: list[str]


_LINE = msgspec.json.Decoder(_Line)


def write_line(message: Message) -> str:
    """One line of a recording, newline included."""
    frames = [base64.b64encode(frame).decode() for frame in message.frames]
    return json.dumps({"t": message.t, "port": message.port, "frames": frames}) + "\n"


def read(path: Path) -> Iterator[Message]:
    """The messages of a recording, in order. Raises RecordingError that names the line, OSError."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _message(line, f"{path}: line {number}")


def _message(line: bytes, where: str) -> Message:
    try:
        parsed = _LINE.decode(line)
        frames = tuple(base64.b64decode(frame, validate=True) for frame in parsed.frames)
    except (msgspec.MsgspecError, binascii.Error, ValueError) as error:
        form = '{"t": seconds, "port": number, "frames": [base64, ...]}'
        raise RecordingError(f"{where}: {error}; expected {form}") from error
    return Message(parsed.t, parsed.port, frames)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a meta file, as far as prediction needs it."""

    number: int
    """Position in the meta file, administrative entries included."""
    path: str = ""
    t0: float | None = None
    tokens: tuple[int, ...] = ()
    """Prompt token ids; empty where the file does not have them."""
    model: str = ""
    lora: str | None = None
    salt: str | None = None
    media: tuple[tuple[str, int], ...] = ()
    """Name and first token of every image and the like."""
    rank: int | None = None
    """The data-parallel rank it was pinned to; None where that is unknown."""
    cached_tokens: int | None = None
    resets_before: int = 0
    """Cache resets that the meta file lists before it."""
    problem: str = ""
    """Why it cannot be judged; empty where it can."""


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a meta file tells about the engine and the requests it served."""

    model: str = ""
    algorithm: str | None = None
    seed: str | None = None
    lora_paths: Mapping[str, str] = {}
    requests: tuple[Request, ...] = ()


def read_meta(path: Path) -> Meta:
    """Raises RecordingError, OSError."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecordingError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("requests"), list):
        raise RecordingError(f"{path}: expected an object with a list under `requests`")
    engine = value.get("engine") or {}
    args = [str(argument) for argument in engine.get("args") or ()]
    loras = {str(name): str(path) for name, path in (value.get("lora_paths") or {}).items()}
    model = _argument(args, "--served-model-name") or _argument(args, "--model") or ""
    return Meta(
        model=model,
        algorithm=_argument(args, "--prefix-caching-hash-algo") or ("sha256" if args else None),
        seed=(engine.get("env") or {}).get("PYTHONHASHSEED"),
        lora_paths=loras,
        requests=tuple(_requests(value["requests"], model, loras, path)),
    )


def _argument(args: list[str], name: str) -> str | None:
    for position, argument in enumerate(args):
        if argument == name and position + 1 < len(args):
            return args[position + 1]
        if argument.startswith(name + "="):
            return argument[len(name) + 1 :]
    return None


def _requests(entries: Iterable[Any], model: str, loras: Mapping[str, str], path: Path) -> Iterator[Request]:
    resets = 0
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise RecordingError(f"{path}: requests[{number}] is {type(entry).__name__}, expected an object")
        if "reset" in str(entry.get("action", "")) or "reset" in str(entry.get("path", "")):
            resets += 1
        elif "action" not in entry or "t0" in entry:
            yield _request(number, entry, model, loras, resets)


def _request(number: int, entry: Mapping[str, Any], model: str, loras: Mapping[str, str], resets: int) -> Request:
    body = entry.get("body") or {}
    headers = {str(name).lower(): value for name, value in (entry.get("headers") or {}).items()}
    details = (entry.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = entry.get("cached_tokens", details.get("cached_tokens"))
    tokens = entry.get("prompt_token_ids") or ()
    named = str(body.get("model") or model)
    rank = headers.get("x-data-parallel-rank")
    problem = ""
    if not tokens or not all(isinstance(token, int) for token in tokens):
        tokens, problem = (), "no prompt token ids"
    elif not isinstance(entry.get("t0"), int | float):
        problem = "no time of sending"
    elif not isinstance(cached, int):
        cached, problem = None, "the engine's cached_tokens are not in the meta file"
    return Request(
        number=number,
        path=str(entry.get("path", "")),
        t0=float(entry["t0"]) if isinstance(entry.get("t0"), int | float) else None,
        tokens=tuple(tokens),
        model=model if named in loras else named,
        lora=named if named in loras else None,
        salt=body.get("cache_salt"),
        media=_media(entry.get("features") or {}),
        rank=int(rank) if rank is not None and str(rank).isdigit() else None,
        cached_tokens=cached if isinstance(cached, int) else None,
        resets_before=resets,
        problem=problem,
    )


def _media(features: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    places = features.get("mm_placeholders") or {}
    names = features.get("mm_hashes") or {}
    return tuple(
        (str(name), int(place["offset"]))
        for modality in places
        for name, place in zip(names.get(modality, ()), places[modality], strict=True)
    )
