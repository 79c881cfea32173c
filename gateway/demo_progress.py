"""What a running demo shows: a bar on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from gateway.demo_traffic import Observation

_LINE_EVERY_S = 5.0


class PhaseProgress:
    """Counts the observations of one phase."""

    def __init__(self, label: str, expected: int) -> None:
        self.label = label
        self.expected = expected
        self._done = 0
        self._prompt = 0
        self._cached = 0

    def add(self, observation: Observation) -> None:
        self._done += 1
        self._prompt += observation.prompt_tokens
        self._cached += observation.cached_tokens
        self.show(f"{self._cached / self._prompt:.0%} from cache" if self._prompt else "")

    def show(self, detail: str) -> None:
        """Overridden by how it is displayed."""

    @property
    def done(self) -> int:
        return self._done


class _Bar(PhaseProgress):
    def __init__(self, label: str, expected: int, progress: Progress) -> None:
        super().__init__(label, expected)
        self._progress = progress
        self._task = progress.add_task(label, total=expected, detail="")

    def show(self, detail: str) -> None:
        self._progress.update(self._task, completed=self.done, detail=detail)


class _Lines(PhaseProgress):
    def __init__(self, label: str, expected: int, console: Console) -> None:
        super().__init__(label, expected)
        self._console = console
        self._next = time.monotonic() + _LINE_EVERY_S

    def show(self, detail: str) -> None:
        if time.monotonic() >= self._next or self.done == self.expected:
            self._next = time.monotonic() + _LINE_EVERY_S
            self._console.print(f"{self.label}: {self.done}/{self.expected} requests, {detail}")


class Display:
    """Messages and phases on one console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, label: str, expected: int) -> Iterator[PhaseProgress]:
        """Show `expected` requests as they are answered."""
        if not self._console.is_terminal:
            yield _Lines(label, expected, self._console)
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console) as progress:
            yield _Bar(label, expected, progress)
