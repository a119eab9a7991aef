"""Two network namespaces stand for two hosts: what crosses between them is counted, and compared with closed forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import hosts
from benchmarks.hosts import all_to_all, hierarchical, ring
from tests.integration.two_hosts import DTYPES
from tests.support.two_hosts import CABLE, two_hosts

pytestmark = [pytest.mark.integration, pytest.mark.multiproc, pytest.mark.cpu_only("gloo's traffic is counted")]

ROOT = Path(__file__).resolve().parents[2]
HOSTS, PER_HOST = 2, 2
MESH = HOSTS, PER_HOST
RANKS = HOSTS * PER_HOST
# At most: headers of 66 bytes for each 1,448, as many for an acknowledgement of two such packets that come the other
# way, and what is exchanged besides weights and gradients. Usually packets are longer, and it is below 0.01.
OVERHEAD = 66 / 1448 + 33 / 1448 + 0.005


def run(folder: Path) -> list[dict[str, Any]]:
    """What each rank has written."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE, "PYTHONPATH": path}
    env.pop("NCCL_HOSTID", None)
    ranks: list[subprocess.Popen[bytes]] = []
    with two_hosts() as both:
        try:
            for rank in range(RANKS):
                command = [*both[rank // PER_HOST].inside, sys.executable, "-m", "tests.integration.two_hosts"]
                command += [str(rank), str(RANKS), str(folder), CABLE]
                ranks.append(subprocess.Popen(command, env=env, cwd=ROOT))
            assert [rank.wait(timeout=100) for rank in ranks] == [0] * RANKS
        finally:
            for rank_process in ranks:
                rank_process.kill()
                rank_process.wait()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_each_byte_enters_a_host_once(tmp_path: Path) -> None:
    ranks = run(tmp_path)
    for dtype in DTYPES:
        ours, plain = ([rank[f"{name} {dtype}"] for rank in ranks] for name in ("hierarchical", "c10d"))
        for mine, other in zip(ours, plain, strict=True):
            # The same forward pass, and sums in another order.
            tolerance = 1e-6 if dtype == torch.float32 else 1e-2
            assert mine["losses"] == pytest.approx(other["losses"], rel=tolerance)
            assert (mine["gathered"], mine["reduced"]) == (other["gathered"], other["reduced"])
        whole = RANKS / (RANKS - 1)
        gathers, gradients = whole * ours[0]["gathered"], whole * ours[0]["reduced"]
        sums = gradients / dtype.itemsize * hosts.SUM_BYTES / PER_HOST
        two_steps = hierarchical(gathers, *MESH).network + hierarchical(gradients, *MESH, sums).network
        one_step = ring(gathers, *MESH).network + all_to_all(gradients, *MESH).network
        expected, expected_plain = PER_HOST * two_steps, PER_HOST * one_step
        # In words: each byte of a weight that the other host has, once, and so each element's fp32 sum.
        assert expected == (HOSTS - 1) / HOSTS * (gathers + gradients * 4 / dtype.itemsize)
        for host in range(HOSTS):
            for found, closed_form in ((ours, expected), (plain, expected_plain)):
                counts = found[host * PER_HOST]
                assert closed_form <= counts["received"] <= (1 + OVERHEAD) * closed_form
                assert closed_form <= counts["sent"] <= (1 + OVERHEAD) * closed_form
