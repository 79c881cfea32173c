"""The processes of a demo: started with their own log files, watched, and never left behind.

Each child leads a process group of its own, so that Ctrl-C reaches only the parent, which then stops the children in
order. On Linux the kernel also kills a child whose parent is gone, however the parent ended.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

_PR_SET_PDEATHSIG = 1
_STOP_S = 3.0
_LOG_LINES = 15


class ChildDied(Exception):
    """A child ended by itself; the message names it, its exit code and the end of its log."""


class Child(msgspec.Struct, frozen=True):
    """A running process."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    def obituary(self) -> str:
        """How it ended, with the last lines of its log."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        end = "\n".join(f"    {line}" for line in lines) or "    (it wrote nothing)"
        return f"{self.name} {how}; the end of {self.log}:\n{end}"


class Children:
    """Use as an async context manager: leaving it stops everything, last started first."""

    def __init__(self, logs: Path) -> None:
        """`logs`: folder of the log files; made if it is missing."""
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._children: list[Child] = []

    async def __aenter__(self) -> "Children":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """Start a process that writes to `NAME.log`. Raises ChildDied when it cannot be started at all."""
        path = self._logs / f"{name}.log"
        with path.open("wb") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(),
                )
            except OSError as error:
                raise ChildDied(f"{name} could not be started: {command[0]}: {error.strerror}") from error
        child = Child(name, process, path)
        self._children.append(child)
        return child

    async def first_death(self) -> None:
        """Wait until a child ends by itself; raises ChildDied then."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        raise ChildDied(waits[done.pop()].obituary())

    def check(self) -> None:
        """Raises ChildDied if any child has ended."""
        for child in self._children:
            if child.process.returncode is not None:
                raise ChildDied(child.obituary())

    async def stop(self) -> None:
        """End the whole process group of each child, in turn: SIGTERM, and SIGKILL when that takes too long."""
        children, self._children = self._children[::-1], []
        try:
            for child in children:
                _signal_group(child, signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.process.wait(), _STOP_S)
        finally:
            for child in children:
                _signal_group(child, signal.SIGKILL)
            for child in children:
                await child.process.wait()


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _die_with_parent() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arrange
