"""Reports the progress of the commands of ``python -m megatron_patches.refit``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import TaskID


class Progress:
    """Receives every phase, and the bytes done in it; by itself, shows nothing."""

    def phase(self, name: str, nbytes: int) -> None:
        """A phase begins, in which this rank handles ``nbytes`` bytes; 0 if not applicable."""

    def advance(self, nbytes: int) -> None:
        """``nbytes`` more bytes of the phase are done."""


def shown_progress(shows: bool, *, mostly_quick: bool = False) -> AbstractContextManager[Progress]:
    """Bars on a terminal, lines in a log, or something that takes the same calls and shows nothing.

    Args:
        shows: whether to show anything.
        mostly_quick: whether a log shows something only of what takes long.
    """
    if not shows:
        return nullcontext(Progress())
    if sys.stderr.isatty():
        return TerminalProgress()
    return LateProgress(sys.stderr) if mostly_quick else nullcontext(LoggedProgress(sys.stderr))


class Phases:
    """Times phases, and reports them.

    Args:
        progress: receives each phase.

    Attributes:
        seconds: duration of each phase that has ended.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str, nbytes: int = 0) -> Iterator[None]:
        """Runs one phase, in which this rank handles ``nbytes`` bytes; 0 if not applicable."""
        self._progress.phase(name, nbytes)
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


class LoggedProgress(Progress):
    """A line when a phase begins, and one for every half a minute that it takes; for one rank only.

    Args:
        out: the log.
        prefix: what each line begins with.
        seconds: least time between two lines of a phase.
    """

    def __init__(self, out: TextIO, prefix: str = "", seconds: float = 30.0) -> None:
        self._out, self._prefix, self._seconds = out, prefix, seconds
        self._name, self._done, self._total = "", 0, 0
        self._last = time.monotonic()

    def phase(self, name: str, nbytes: int) -> None:
        """Writes the phase's name, and the bytes if there are any."""
        self._name, self._done, self._total = name, 0, nbytes
        self._write(f"{name}, {nbytes / 1e6:.1f} MB on this rank" if nbytes else name)

    def advance(self, nbytes: int) -> None:
        """Writes how far the phase is, unless it has done so recently."""
        self._done += nbytes
        if time.monotonic() - self._last >= self._seconds:
            self._write(f"{self._name}, {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB")

    def _write(self, text: str) -> None:
        self._last = time.monotonic()
        self._out.write(f"{self._prefix}{text}\n")
        self._out.flush()


class LateProgress(Progress):
    """Nothing at first, then at intervals a line that names the phase; written by a thread, for phases without steps.

    Args:
        out: the log.
        first_s: seconds until the first line.
        every_s: seconds between two lines.
    """

    def __init__(self, out: TextIO, first_s: float = 5.0, every_s: float = 10.0) -> None:
        self._out, self._first_s, self._every_s = out, first_s, every_s
        self._name, self._since = "start", time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refit-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def phase(self, name: str, nbytes: int) -> None:  # noqa: ARG002 - no rank's share
        """Notes the phase."""
        self._name, self._since = name, time.monotonic()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._ended.wait(wait_s):
            wait_s = self._every_s
            self._out.write(f"{self._name}, for {time.monotonic() - self._since:.0f} s\n")
            self._out.flush()


class TerminalProgress(Progress):
    """Progress bars on standard error, one per phase; for one rank only."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description:<12}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[amount]}"),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is None:
            return
        if kind is None:
            self._finish()
        self._bars.stop()

    def phase(self, name: str, nbytes: int) -> None:
        """Completes the previous bar and starts a new one."""
        self._finish()
        self._bars.start()  # only now, so that an earlier error prints one line without an empty one
        amount = f"{nbytes / 1e6:.1f} MB on this rank" if nbytes else ""
        self._task = self._bars.add_task(name, total=nbytes or None, amount=amount)

    def advance(self, nbytes: int) -> None:
        """Moves the current bar."""
        if self._task is not None:
            self._bars.advance(self._task, nbytes)

    def _finish(self) -> None:
        if self._task is not None:
            done = self._bars.tasks[-1].total or 1
            self._bars.update(self._task, total=done, completed=done)
