"""A trainer that pushes over NIXL with various NICs.

python -m tests.integration.refit_nics FOLDER ENGINE NICS ...
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName
from tests.support.plain_engine import PlainEngine, digest
from tests.support.two_hosts import ADDRESSES


def model() -> torch.nn.Module:
    """The weights."""
    torch.manual_seed(1)
    return torch.nn.Linear(2003, 1501)


def content() -> dict[str, str]:
    """What an engine holds of them."""
    return {name: digest(name, tensor.numpy().tobytes()) for name, tensor in model().state_dict().items()}


def sent() -> dict[str, int]:
    """Bytes that each interface of this host has sent."""
    folders = Path("/sys/class/net").iterdir()
    return {folder.name: int((folder / "statistics/tx_bytes").read_text()) for folder in folders if folder.is_dir()}


def push(engine: PlainEngine, nics: str) -> dict[str, Any]:
    """Pushes once.

    Returns:
        Bytes sent over each interface, and what the engine then holds; or why it failed.
    """
    options = RefitOptions(timeout_s=20.0, host=ADDRESSES[0], transport=TransportName.NIXL, nics=nics)
    before = sent()
    session = RefitSession(model(), [engine], config={}, options=options)
    with contextlib.closing(session):
        try:
            session.prepare()
            session.push(1)
        except PartyFailedError as error:
            return {"error": str(error)}
        return {
            "sent": {name: nbytes - before[name] for name, nbytes in sent().items()},
            "content": engine.run("content")[1],
        }


def main() -> None:
    """Pushes with each choice, and writes what it has seen."""
    logging.basicConfig(level=logging.INFO)
    folder, address, *choices = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    engine = PlainEngine("engine", address, 20.0)
    seen = {nics: push(engine, nics) for nics in choices}
    Path(folder, "seen.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
