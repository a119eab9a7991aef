"""Runs configurations one after the other, each as a training of a few steps, and keeps the outcome of each in a file.

The file has a line of JSON for each run, written when the run has ended: a sweep that is started again with the same
file skips what it has. A configuration that runs out of memory, fails or takes too long is a result too, and ends only
itself.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

import msgspec

from benchmarks.long_run_ranks import Training, TrainingFailedError
from benchmarks.long_run_training import Step
from benchmarks.train_shapes import GIB

STEPS = 6
_BEGINNING = '{"command":'  # of an outcome in the file
_SKIPPED = 2  # which allocate, learn the order of gathers, and compile
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY")
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?(\S*(?:Error|Exception|error)\b.*)", re.MULTILINE)


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    OUT_OF_MEMORY = "out of memory"
    FAILED = "failed"
    TIMEOUT = "timeout"


class Outcome(msgspec.Struct, frozen=True):
    """What came of a run.

    Attributes:
        command: the command line that repeats it; a run is known by it.
        device: name of the GPU, or "cpu".
        status: how it ended.
        seconds: median of a step after the first ones, on the slowest rank; None unless it ended well.
        gib: most that a rank needed within a step, of PyTorch's allocator and symmetric memory; None on a CPU.
        reason: one line about a failure.
    """

    command: str
    device: str
    status: Status
    seconds: float | None = None
    gib: float | None = None
    reason: str = ""


class StateFile:
    """The outcomes of a sweep, one line each.

    Args:
        path: of the file; it need not exist.

    Raises:
        ValueError: if the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the state of the sweep, {path}, cannot be read: {error}") from error
        whole, newline, rest = text.rpartition("\n")
        if not rest.startswith(_BEGINNING[: len(rest)]):
            raise ValueError(f"{path} is not the state of a sweep (its last line is no outcome); name another file")
        try:
            self.outcomes = [msgspec.json.decode(line, type=Outcome) for line in whole.splitlines()]
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is not the state of a sweep ({error}); name another file") from error
        if rest:
            path.write_text(whole + newline, encoding="utf-8")  # a line that a crash has cut

    def known(self, command: str, device: str) -> Outcome | None:
        """The outcome of a command on a device, if it has been run."""
        found = (outcome for outcome in self.outcomes if (outcome.command, outcome.device) == (command, device))
        return next(found, None)

    def add(self, outcome: Outcome) -> None:
        """Append an outcome; it is in the file on return."""
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
        self.outcomes.append(outcome)


def run(command: str, arguments: Sequence[str], ranks: int, device: str, timeout_s: float) -> Outcome:
    """Trains a few steps on this machine.

    Args:
        command: what a user would paste.
        arguments: Megatron's, for :mod:`benchmarks.long_run_training`.
        ranks: processes, each with a GPU of its own, if there are GPUs.
        device: where it runs.
        timeout_s: after which it is ended.
    """
    with tempfile.TemporaryDirectory(prefix="sweep") as folder:
        training = Training("run", Path(folder), ranks, arguments, repeatable=device == "cpu")
        try:
            with training:
                training.wait(timeout_s)
        except TrainingFailedError as error:
            outputs = "\n".join(training.output(rank) for rank in range(ranks))
            status, reason = why(outputs, str(error))
            return Outcome(command, device, status, reason=reason)
        return measured(command, device, [training.steps(rank) for rank in range(ranks)])


def measured(command: str, device: str, steps: Sequence[Sequence[Step]]) -> Outcome:
    """The outcome of a run that ended well, from the records of its ranks."""
    times = [statistics.median(step.seconds for step in of_rank[_SKIPPED:]) for of_rank in steps]
    most = max(step.peak + step.symmetric for of_rank in steps for step in of_rank[_SKIPPED:])
    return Outcome(command, device, Status.OK, max(times), most / GIB or None)


def why(outputs: str, error: str) -> tuple[Status, str]:
    """How a run failed, from what its ranks have printed and from :class:`TrainingFailedError`."""
    if _OUT_OF_MEMORY.search(outputs):
        return Status.OUT_OF_MEMORY, "a rank ran out of memory"
    if "did not end within" in error:
        return Status.TIMEOUT, error.splitlines()[0].removeprefix("run: ")
    lines = _ERROR.findall(outputs) or [error.splitlines()[0].removeprefix("run: ")]
    return Status.FAILED, lines[-1].strip()
