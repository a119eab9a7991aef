"""A rank of a trainer that pushes from one host to another.

python -m tests.integration.refit_two_hosts FOLDER RANK
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.refit.control.messages import State
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer.session import OnEngineFailure, RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName
from tests.support.plain_engine import PlainEngine, digest
from tests.support.two_hosts import ADDRESSES

RANKS = 2


def listening(process: int) -> set[tuple[str, int]]:
    """Addresses and ports at which anything listens in the network namespace of a process."""
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                host, port = local.split(":")
                found.add((".".join(str(byte) for byte in reversed(bytes.fromhex(host))), int(port, 16)))
    return found


def model(version: int) -> torch.nn.Module:
    """Of a version."""
    torch.manual_seed(version)
    return torch.nn.Sequential(torch.nn.Linear(301, 997), torch.nn.Linear(997, 1203))


def content(version: int) -> tuple[int, dict[str, str]]:
    """What an engine holds of a version."""
    tensors = model(version).state_dict().items()
    return version, {name: digest(name, tensor.contiguous().numpy().tobytes()) for name, tensor in tensors}


def until(what: Callable[[], bool]) -> None:
    """Waits for it."""
    deadline = time.monotonic() + 30.0
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def push(folder: Path, rank: int) -> dict[str, Any]:
    """Pushes with the default address, and with the one of the cable; then an engine on this host joins late.

    Returns:
        What was seen.
    """
    trained = model(1)
    far, near = (PlainEngine(name, str(folder / f"{name}.sock"), 20.0) for name in ("far", "near"))
    seen: dict[str, Any] = {}
    session = RefitSession(trained, [far], config={}, options=RefitOptions(timeout_s=20.0))
    with contextlib.closing(session):
        try:
            session.prepare()
        except PartyFailedError as error:
            seen["refused"] = str(error)
    options = RefitOptions(
        timeout_s=20.0,
        host=ADDRESSES[0],
        transport=TransportName.TCP,
        fan_out=True,
        on_engine_failure=OnEngineFailure.DROP,
        staging_bytes=1 << 20,
    )
    session = RefitSession(trained, [far], config={}, options=options)
    with contextlib.closing(session):
        session.prepare()
        session.push(1)
        if rank == 0:
            seen["far"] = far.run("content")
            session.attach(near)
            until(lambda: near.run("content")[0] == 1)
            seen["near"] = near.run("content")
        dist.barrier()
        trained.load_state_dict(model(2).state_dict())
        session.push(2)
        until(lambda: session.state()["near"].state is State.READY)
        dist.barrier()
        session.push(3)
        if rank == 0:
            seen["at last"] = [engine.run("content")[0] for engine in (far, near)]
        dist.barrier()
    return seen


def main() -> None:
    """Is one rank, and writes what it has seen."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    dist.barrier()
    seen = push(folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
