"""A rank that is lost in the middle of a Megatron training: its peer ends in time and says what it waited for."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.shared_gpus import sharing_gpus
from tests.integration.cases import LLAMA, ONE_MICROBATCH, SCHEDULE
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.cpu_only("tests/gpu/test_lost_rank.py expects what is said on GPUs"),
]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("pretrain_failing.py")
START_TIMEOUT_S = 120.0
ETP_TIMEOUT_S = 4
# Between the error and the end of the process lie a traceback and the end of the interpreter, on a busy machine.
# Without --etp-timeout the process groups' own time-out ends the wait, after ten minutes.
MARGIN_S = 40.0
LOST = 1
SURVIVOR = 0


@contextlib.contextmanager
def training(tmp_path: Path, *flags: str, gpus: int = 2) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks of one training, without torchrun, whose agent would end the survivor itself.

    Args:
        tmp_path: folder for what they print, in ``rank0.txt`` and ``rank1.txt``.
        flags: more flags of the training.
        gpus: how many GPUs there are; with one, the ranks share it.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shared |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-m", "megatron_patches", str(SCRIPT)]
    command += f"{LLAMA} {SCHEDULE} {ONE_MICROBATCH} --etp-size 2 --fail-rank {LOST}".split()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2):
            with (tmp_path / f"rank{rank}.txt").open("wb") as output:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank % gpus)}
                if gpus < 2:
                    own |= sharing_gpus(rank, gpus)
                environment = {**os.environ, **shared, **own}
                ranks.append(
                    subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, stdout=output, stderr=output)
                )
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def await_loss(process: subprocess.Popen[bytes]) -> None:
    """Wait until a signal has ended or stopped a process, and leave its status to be asked for again."""
    deadline = time.monotonic() + START_TIMEOUT_S
    asked = os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    while (found := os.waitid(os.P_PID, process.pid, asked)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no rank failed within {START_TIMEOUT_S:.0f} s")
        time.sleep(0.05)
    if found.si_code == os.CLD_EXITED:
        raise ChildProcessError(f"the rank that was to be lost has ended by itself, with status {found.si_status}")


@pytest.mark.parametrize(
    ("where", "how", "collective", "reason"),
    [
        ("forward", "KILL", r"all-gather of [\w.]+\.weight", "A peer has most likely ended"),
        (
            "backward",
            "KILL",
            r"(all-gather of [\w.]+\.weight|reduce-scatter of [\w.]+\.weight's gradient)",
            "A peer has most likely ended",
        ),
        ("forward", "STOP", r"all-gather of [\w.]+\.weight", "A peer did not come in time"),
    ],
    ids=["killed in forward", "killed in backward", "stopped in forward"],
)
def test_the_peer_of_a_lost_rank_names_what_it_waited_for(
    tmp_path: Path, where: str, how: str, collective: str, reason: str
) -> None:
    flags = f"--etp-timeout {ETP_TIMEOUT_S} --fail-step 2 --fail-in {where} --fail-signal {how}".split()
    with training(tmp_path, *flags) as ranks:
        await_loss(ranks[LOST])
        status = ranks[SURVIVOR].wait(timeout=ETP_TIMEOUT_S + MARGIN_S)
    output = (tmp_path / f"rank{SURVIVOR}.txt").read_text()
    assert status == 1, output
    message = next((line for line in reversed(output.splitlines()) if "EtpCommunicationError: " in line), output)
    expected = rf"EtpCommunicationError: {collective} failed on rank 0 \(shard group: ranks \[0, 1\]\): "
    assert re.search(expected, message)
    assert reason in message
