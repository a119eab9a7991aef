"""Starts the processes of one training on this machine without torchrun, whose agent would end survivors itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.long_run_training import Step
from benchmarks.shared_gpus import sharing_gpus
from benchmarks.spawned import free_port

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).with_name("long_run_training.py")
_POLL_S = 0.02
# Megatron compiles its fused element-wise functions otherwise, for tens of seconds. Attention must add in the same
# order each time. Tensor parallelism demands that kernels start in the order in which they are given to the device.
_REPEATABLE = {"TORCH_COMPILE_DISABLE": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
_ENVIRONMENT = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class TrainingFailedError(Exception):
    """A rank ended with an error, or not in time. The text ends with its last lines of output."""


class Training:
    """One training: its ranks run until :meth:`wait` or the end of the ``with`` block.

    Args:
        name: for messages, and of its folder.
        folder: where this training's folder is made: records, outputs and the cache of data-set indices.
        ranks: number of processes.
        arguments: the training script's.
        gpus: how many GPUs the ranks share; 0 gives each rank one of its own, or none where there are none.
        repeatable: whether two trainings must give the same bits and start soon, or else run as fast as they can.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        ranks: int,
        arguments: Sequence[str],
        gpus: int = 0,
        *,
        repeatable: bool = True,
    ) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        own = ["--record", str(self.folder), "--data-cache-path", str(self.folder / "indices")]
        self._command = [sys.executable, "-W", "ignore", "-m", "megatron_patches", str(SCRIPT), *arguments, *own]
        self._count = ranks
        self._gpus = gpus
        self._environment = _ENVIRONMENT | (_REPEATABLE if repeatable else {})
        self.ranks: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": path}
        shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._count))
        for rank in range(self._count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % self._gpus if self._gpus else rank)}
            if self._gpus:
                own |= sharing_gpus(rank, self._gpus)
            with self._output(rank).open("wb") as output:
                self.ranks.append(
                    subprocess.Popen(  # noqa: S603  # this interpreter, with arguments of the caller's own
                        self._command,
                        cwd=ROOT,
                        env=os.environ | self._environment | shared | own,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()

    def _output(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._output(rank).read_text(errors="replace")

    def steps(self, rank: int) -> list[Step]:
        """What a rank has recorded so far."""
        file = self.folder / f"rank{rank}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [Step(**json.loads(line)) for line in lines if line.endswith("\n")]

    def losses(self) -> dict[int, float]:
        """The loss of each step, from the ranks that know it.

        Raises:
            TrainingFailedError: if ranks disagree, or none knows a loss.
        """
        found: dict[int, float] = {}
        for rank in range(self._count):
            for step in self.steps(rank):
                if step.loss is not None and found.setdefault(step.step, step.loss) != step.loss:
                    raise TrainingFailedError(f"{self.name}: rank {rank} has another loss at step {step.step}")
        if not found:
            raise TrainingFailedError(f"{self.name}: no rank recorded a loss")
        return found

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended well.

        Raises:
            TrainingFailedError: as soon as one has not.
        """
        deadline = time.monotonic() + timeout_s
        while running := [rank for rank, process in enumerate(self.ranks) if process.poll() is None]:
            self._raise_if_failed()
            if time.monotonic() > deadline:
                raise TrainingFailedError(
                    f"{self.name}: ranks {running} did not end within {timeout_s:.0f} s\n{self._tail(running[0])}"
                )
            time.sleep(_POLL_S)
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        for rank, process in enumerate(self.ranks):
            if process.poll():
                raise TrainingFailedError(
                    f"{self.name}: rank {rank} ended with status {process.returncode}\n{self._tail(rank)}"
                )

    def _tail(self, rank: int) -> str:
        return "\n".join(self.output(rank).splitlines()[-25:])

    def kill_at(self, rank: int, step: int, timeout_s: float) -> None:
        """Send SIGKILL to ``rank`` as soon as it has done ``step``.

        Raises:
            TrainingFailedError: if a rank fails before, or the step does not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while not any(done.step >= step for done in self.steps(rank)):
            self._raise_if_failed()
            if time.monotonic() > deadline:
                raise TrainingFailedError(f"{self.name}: rank {rank} did not come to step {step}\n{self._tail(rank)}")
            time.sleep(_POLL_S)
        self.ranks[rank].send_signal(signal.SIGKILL)
        self.ranks[rank].wait()

    def seconds_until_all_end(self, timeout_s: float) -> float:
        """Wait until no rank is left, however they end.

        Raises:
            TrainingFailedError: if one does not end in time.
        """
        began = time.monotonic()
        while running := [rank for rank, process in enumerate(self.ranks) if process.poll() is None]:
            if time.monotonic() - began > timeout_s:
                raise TrainingFailedError(
                    f"{self.name}: ranks {running} still run {timeout_s:.0f} s after another was lost\n"
                    f"{self._tail(running[0])}"
                )
            time.sleep(_POLL_S)
        return time.monotonic() - began
