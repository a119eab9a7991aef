"""Bodies of test_trl_transfer.py: what TRL's trainer does in each process when it syncs weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_patches.refit import OnEngineFailure, RefitOptions
from megatron_patches.refit.trl import EtpWeightTransfer
from tests.multiproc.bodies_publish import build, engine_of, fsdp, train
from tests.support import plain_engine

OPTIONS = RefitOptions(timeout_s=30.0, staging_bytes=1 << 14, on_engine_failure=OnEngineFailure.RAISE)
Content = tuple[int, dict[str, str]]


def streamed(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole parameters, gathered one by one."""
    for name, param in model.named_parameters():
        yield name, param.full_tensor() if isinstance(param, DTensor) else param.detach()


def content(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Digests, as an engine tells its own."""
    return {
        name: plain_engine.digest(name, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, value in tensors.items()
    }


def synced(rank: int, world_size: int, folder: str) -> list[tuple[Content, Content, Content]]:
    """Syncs three times as TRL does, and once more after the end of a training.

    Returns:
        For each sync on the first rank: what the engine served when the transfer had returned, and after the resume,
        and what the model was.
    """
    model = build(fsdp, world_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    found = []
    engine = engine_of(rank, folder)
    transfer = None
    if engine is not None:
        transfer = EtpWeightTransfer([engine], options=OPTIONS, first_version=7)
        transfer.init_weight_transfer()
    for version in (7, 8, 9, 10):
        train(model, optimizer, version)
        whole = {name: tensor.clone() for name, tensor in streamed(model)}
        if transfer is not None:
            transfer.pause()
        dist.barrier()
        if transfer is None:
            list(streamed(model))
        else:
            transfer.send_weights(streamed(model))
            before = engine.run("content")
        dist.barrier()
        train(model, optimizer, 100 + version)  # the weights may change at once
        if transfer is not None:
            transfer.resume()
            found.append((before, engine.run("content"), (transfer.version, content(whole))))
            if version == 9:
                transfer.destroy()
    if transfer is not None:
        transfer.destroy()
        transfer.destroy()
    groups = len(dist.distributed_c10d._world.pg_map)
    assert groups == 1, "destroy() leaves the group behind"
    return found
