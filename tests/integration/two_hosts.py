"""One rank of a group that spans two hosts: trains with each transport, and counts what its host receives and sends.

python -m tests.integration.two_hosts RANK WORLD_SIZE FOLDER INTERFACE
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import etp

TRANSPORTS = ("c10d", "hierarchical")
DTYPES = (torch.float32, torch.bfloat16)
STEPS, COUNTED, BATCH = 4, 2, 8
WIDTHS = (499, 1021, 763, 1200)
PATIENCE = timedelta(seconds=60)


def main() -> None:
    """Write what happened to ``rankN.json``."""
    rank, world_size, folder, interface = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=PATIENCE)
    found = {
        f"{transport} {dtype}": trained(transport, dtype, interface, store)
        for dtype in DTYPES
        for transport in TRANSPORTS
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    in_step(store, "end")
    dist.destroy_process_group()


def trained(transport: str, dtype: torch.dtype, interface: str, store: dist.Store) -> dict[str, object]:
    """Losses, and of the last steps, by the runtime's own count and by the interface's: bytes moved."""
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS))).to(dtype)
    config = etp.EtpConfig(transport=transport, timeout_s=60.0)  # type: ignore[arg-type]
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses, before = [], (0, 0)
    for step in range(STEPS):
        if step == STEPS - COUNTED:
            in_step(store, f"{transport} {dtype} before")
            runtime.counters.reset()
            before = moved(interface)
            in_step(store, f"{transport} {dtype} counting")
        x = torch.randn(BATCH, WIDTHS[0], generator=generator).to(dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    in_step(store, f"{transport} {dtype} counted")
    received, sent = (after - start for after, start in zip(moved(interface), before, strict=True))
    return {
        "losses": losses,
        "received": received,
        "sent": sent,
        "gathered": sum(runtime.counters.gather_bytes.values()),
        "reduced": sum(runtime.counters.reduce_bytes.values()),
    }


def in_step(store: dist.Store, what: str) -> None:
    """Wait for all ranks, without the network."""
    if store.add(f"at {what}", 1) == dist.get_world_size():
        store.set(f"all at {what}", "")
    store.wait([f"all at {what}"], PATIENCE)


def moved(interface: str) -> tuple[int, int]:
    """Bytes that this host's interface has received and sent."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = numbers.split()
            return int(fields[0]), int(fields[8])
    raise ValueError(f"no interface {interface}")


if __name__ == "__main__":
    main()
