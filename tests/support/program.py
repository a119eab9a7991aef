"""Programs run as ``python`` and ``torchrun`` run them, in processes that have already imported what takes long."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import TCPStore

from tests.support.prepared import patched_megatron, template_of, variables_of
from tests.support.template import Process

ROOT = Path(__file__).resolve().parents[2]


def run_program(
    *command: str,
    ranks: int = 0,
    prepared: Callable[[], None] = patched_megatron,
    folder: Path = ROOT,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """What ``python -W ignore COMMAND`` does, or torchrun's ``ranks`` processes do.

    The processes are copies of a template, which saves torchrun's start, and for each rank the seconds that imports
    take. They end without what ``atexit`` has registered. Where templates cannot be copied, Python starts them.

    Args:
        command: ``-m`` and a module's name, or the path of a script; then its arguments.
        ranks: how many processes; 0 for one that is not told of any rank.
        prepared: what the processes have run before, one of :mod:`tests.support.prepared`.
        folder: where they run.
        variables: environment variables, on top of this process's and of those that belong to ``prepared``.
        timeout_s: limit of the whole run.

    Returns:
        The status of the first process that failed, which ends all others, as under torchrun; and what all wrote, by
        rank.

    Raises:
        subprocess.TimeoutExpired: if a process has not ended in time; all are killed.
    """
    # Not in rank 0, as torchrun has it too: that may end while others still begin.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks else None
    processes: list[Process] = []
    with tempfile.TemporaryDirectory() as outputs:
        files = [(Path(outputs, f"{rank}.out"), Path(outputs, f"{rank}.err")) for rank in range(max(ranks, 1))]
        try:
            for rank, both in enumerate(files):
                own = _rank_variables(rank, ranks, store.port) if store is not None else {}
                processes.append(_start(command, prepared, folder, {**own, **(variables or {})}, *both))
            status = _wait(processes, timeout_s)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=60.0)
        output, errors = ("".join(file.read_text() for file in of_ranks) for of_ranks in zip(*files, strict=True))
    return subprocess.CompletedProcess(command, status, output, errors)


def _rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return agent | {name: str(number) for name, number in numbers.items()}


def _start(
    command: Sequence[str],
    prepared: Callable[[], None],
    folder: Path,
    variables: Mapping[str, str],
    output: Path,
    errors: Path,
) -> Process:
    template, variables = template_of(prepared), {**variables_of(prepared), **variables}
    if template is not None:
        arguments = (tuple(command), str(folder), str(errors))
        return template.start(_be, arguments, variables=variables, output=output, leads_session=True)
    with output.open("w") as out, errors.open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def _be(command: Sequence[str], folder: str, errors: str) -> None:
    """Be the program, in a copy of a template."""
    file = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 2)
    os.close(file)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    if command[0] == "-m":
        sys.path.insert(0, folder)
        sys.argv[:] = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        sys.argv[:] = command
        runpy.run_path(command[0], run_name="__main__")


def _wait(processes: Sequence[Process], timeout_s: float) -> int:
    """Status of the first process that fails; 0 once all have ended well."""
    deadline = time.monotonic() + timeout_s
    while (codes := [process.poll() for process in processes]).count(0) < len(codes):
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired("a program's processes", timeout_s)
        time.sleep(0.02)
    return 0
