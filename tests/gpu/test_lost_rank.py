"""A rank that is lost in a Megatron training on GPUs: its peer ends in time and says what it waited for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.gpu.devices import needs_gpus, needs_te
from tests.integration.cases import GPU, UNFUSED_ACCUMULATION
from tests.integration.test_lost_peer import LOST, SURVIVOR, await_loss, training
from tests.support.prepared import MEGATRON

pytestmark = [needs_te(), needs_gpus(2)]

# Longer than loading kernels takes in the first step.
TIMEOUT_S = 15
# Of Megatron's own groups, which know no other timeout. They must not come first.
GROUP_TIMEOUT_MIN = 1
MARGIN_S = 30.0
OVERDUE = r"(reduce-scatter|all-gather|the publication|the end) of .* did not finish within 15 s: a peer has"
# Ranks that share a GPU talk over sockets, and NCCL learns at once that the other end is closed. Either its
# error or our own watchdog's message comes first.
CLOSED = r"EtpCommunicationError: (reduce-scatter|all-gather) of .* failed on rank 0 .*remote process exited"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "where", "how"),
    [
        ("copy_engine", "forward", "KILL"),
        ("copy_engine", "backward", "KILL"),
        ("copy_engine", "forward", "STOP"),
        ("c10d", "forward", "KILL"),
        ("c10d", "backward", "KILL"),
    ],
)
def test_the_peer_of_a_lost_rank_says_what_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, where: str, how: str
) -> None:
    for name, value in MEGATRON.items():
        monkeypatch.setenv(name, value)
    flags = f"{GPU} {UNFUSED_ACCUMULATION} --etp-transport {transport} --etp-timeout {TIMEOUT_S}"
    flags += f" --distributed-timeout-minutes {GROUP_TIMEOUT_MIN}"
    flags += f" --fail-step 2 --fail-in {where} --fail-signal {how}"
    gpus = torch.cuda.device_count()
    with training(tmp_path, *flags.split(), gpus=gpus) as ranks:
        await_loss(ranks[LOST])
        status = ranks[SURVIVOR].wait(timeout=TIMEOUT_S + MARGIN_S)
    output = (tmp_path / f"rank{SURVIVOR}.txt").read_text()
    assert status != 0, output
    expected = f"{CLOSED}|{OVERDUE}" if transport == "c10d" and gpus < 2 else OVERDUE
    assert re.search(expected, output), output
