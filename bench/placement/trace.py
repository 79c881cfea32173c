"""A Mooncake trace as prompts and arrival times.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one id per 512 tokens of the
prompt; equal ids mean equal prompts up to there, and the last id may stand for part of a block. Timestamps may be coarse (the
conversation trace has one value per 3 s): a request comes at any time before the next distinct one, drawn by seed.
"""

import random
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

BLOCK_TOKENS = 512
Half = Literal["first", "second", "whole"]
NAMES = {
    "conversation": ("mooncake_conversation.jsonl", "conversation_trace.jsonl"),
    "synthetic": ("mooncake_synthetic.jsonl", "synthetic_trace.jsonl"),
}
"""Trace -> file names, each also with .zst."""
SOURCE = "GitHub kvcache-ai/Mooncake, folder FAST25-release/traces"


class TraceError(Exception):
    """The trace cannot be read; says what is wrong and what would be right."""


class Prompt(msgspec.Struct, frozen=True):
    """One request of the trace."""

    at: float
    """Seconds from the start."""
    tokens: int
    reply: int
    blocks: tuple[int, ...]
    """Ids of all blocks, the last one maybe of less than 512 tokens."""

    @property
    def full(self) -> tuple[int, ...]:
        """Ids of the full blocks."""
        return self.blocks[: self.tokens // BLOCK_TOKENS]


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read(folder: Path, trace: str) -> list[Prompt]:
    """All requests of a trace, in order of time. Raises TraceError."""
    names = [name + ending for name in NAMES[trace] for ending in (".zst", "")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        missing = f"no {trace} trace in {folder}: looked for {', '.join(names)}"
        raise TraceError(f"{missing}. It is {NAMES[trace][1]} of {SOURCE}")
    return sorted(parse(_text(path), str(path)), key=lambda prompt: prompt.at)


def _text(path: Path) -> bytes:
    if path.suffix != ".zst":
        return path.read_bytes()
    program = shutil.which("zstd")
    if program is None:
        raise TraceError(f"{path}: needs the program zstd, or the file without compression beside it")
    done = subprocess.run([program, "-dcq", str(path)], capture_output=True, check=False)
    if done.returncode:
        raise TraceError(f"{path}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def parse(text: bytes, name: str) -> Iterator[Prompt]:
    """The lines of a trace. Raises TraceError that names the first bad one."""
    decode = msgspec.json.Decoder(_Line).decode
    for number, raw in enumerate(text.splitlines(), 1):
        try:
            line = decode(raw)
        except msgspec.DecodeError as error:
            raise TraceError(f"{name}:{number}: {error}") from error
        blocks = -(-line.input_length // BLOCK_TOKENS)
        if line.input_length < 1 or line.output_length < 1 or len(line.hash_ids) != blocks:
            got = f"{line.input_length}, {line.output_length} and {len(line.hash_ids)}"
            expected = "expected input_length and output_length of at least 1, and an id per 512 tokens of input"
            raise TraceError(f"{name}:{number}: {expected}, got {got}")
        yield Prompt(line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)


def arrivals(prompts: list[Prompt], half: Half, speed: float, seed: int) -> list[Prompt]:
    """The half (by number of requests) that is asked for, spread over its intervals, `speed` times as fast, from time 0."""
    middle = len(prompts) // 2
    chosen = {"first": prompts[:middle], "second": prompts[middle:], "whole": prompts}[half]
    times = sorted({prompt.at for prompt in chosen})
    widths = {at: after - at for at, after in pairwise(times)}
    rng = random.Random(seed)
    spread = [
        msgspec.structs.replace(it, at=(it.at - times[0] + rng.random() * widths.get(it.at, 0.0)) / speed)
        for it in chosen
    ]
    return sorted(spread, key=lambda prompt: prompt.at)
