"""Two network namespaces stand for two hosts: what crosses between them is counted, and compared with closed forms."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import hosts
from benchmarks.hosts import all_to_all, hierarchical, ring
from tests.integration.two_hosts import DTYPES

pytestmark = [pytest.mark.integration, pytest.mark.multiproc, pytest.mark.cpu_only("gloo's traffic is counted")]

ROOT = Path(__file__).resolve().parents[2]
HOSTS, PER_HOST = 2, 2
MESH = HOSTS, PER_HOST
RANKS = HOSTS * PER_HOST
INTERFACE = "veth0"
UNSHARED = ("unshare", "--net", "--uts")
# Headers of packets, their acknowledgements, and what is exchanged besides weights and gradients.
OVERHEAD = 0.01


@contextlib.contextmanager
def two_hosts() -> Iterator[list[int]]:
    """Two namespaces with a link between them; the processes that hold them, by which they are entered."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "hostname") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    trial = subprocess.run([*UNSHARED, "true"], capture_output=True, text=True, check=False)
    if os.geteuid() != 0 or trial.returncode != 0:
        pytest.skip(f"needs the right to make network namespaces: {trial.stderr.strip() or 'not root'}")
    holders: list[subprocess.Popen[str]] = []
    try:
        for host in range(HOSTS):
            script = f"hostname host-{host} && ip link set lo up && echo ready && exec sleep 300"
            command = [*UNSHARED, "sh", "-c", script]
            holders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for holder in holders:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        first, second = (str(holder.pid) for holder in holders)
        link = ["ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE]
        subprocess.run([*link, "netns", second], check=True)
        for number, pid in enumerate((first, second), 1):
            inside = ["nsenter", "--target", pid, "--net", "ip"]
            subprocess.run([*inside, "address", "add", f"10.77.0.{number}/24", "dev", INTERFACE], check=True)
            subprocess.run([*inside, "link", "set", INTERFACE, "up"], check=True)
        yield [holder.pid for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            if holder.stdout is not None:
                holder.stdout.close()


def run(folder: Path) -> list[dict[str, Any]]:
    """What each rank has written."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": path}
    env.pop("NCCL_HOSTID", None)
    ranks: list[subprocess.Popen[bytes]] = []
    with two_hosts() as holders:
        try:
            for rank in range(RANKS):
                inside = ["nsenter", "--target", str(holders[rank // PER_HOST]), "--net", "--uts"]
                command = [*inside, sys.executable, "-m", "tests.integration.two_hosts"]
                command += [str(rank), str(RANKS), str(folder), INTERFACE]
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
