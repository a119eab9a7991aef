"""Bodies of the transports' tests, run on every rank."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from etp.collectives import select_transport
from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.collectives.copy_engine import CopyEngineTransport
from etp.config import EtpConfig
from etp.errors import StaleWeightError
from etp.stack import Stack
from etp.streams import Lane
from tests.support.launch import device


def _pair() -> tuple[Transport, CopyEngineTransport]:
    group = dist.group.WORLD
    assert group is not None
    c10d = C10dTransport(group, EtpConfig(timeout_s=60.0), device=device())
    return c10d, CopyEngineTransport(group, device())


def _anywhere(tensors: list[torch.Tensor]) -> Stack:
    """The tensors' values: all of one block but the last, which lies elsewhere where there are several."""
    if len(tensors) == 1:
        return Stack(tensors)
    return Stack([*torch.stack(tensors[:-1]).unbind(0), tensors[-1]])


def _busy(seconds_hint: int) -> None:
    """Keep this rank's stream busy for a while, so that peers run ahead of it."""
    a = torch.randn(2048, 2048, device=device())
    for _ in range(seconds_hint):
        a = a @ a.clamp(-1, 1) / 64


def transports_agree(rank: int, world_size: int, dtype: torch.dtype, sink_dtype: torch.dtype) -> int:
    """Gathers and reductions of both transports have the same bits, whoever is late. Returns how many were compared."""
    c10d, engine = _pair()
    generator = torch.Generator(device=device()).manual_seed(rank)
    shapes = [[(48, 64)], [(5, 8)], [(1024, 512)], [(16, 24)] * 3, [(3, 40)] * 128]
    groups = [
        _anywhere([torch.randn(s, device=device(), generator=generator).to(dtype) for s in shape]) for shape in shapes
    ]
    # As in Megatron's buffers: from the last to the first.
    groups.append(Stack([*groups[-1]][::-1]))
    compared = 0
    for step in range(12):
        if step % world_size == rank:
            _busy(40)
        if step % 3 == 0:
            for shards in groups:
                for shard in shards:
                    shard.add_(torch.randn(shard.shape, device=device(), generator=generator).to(dtype))
            engine.publish(groups)
        for shards in groups:
            full = [(world_size * s.shape[0], s.shape[1]) for s in shards]
            ours, theirs = (Stack.allocate(len(full), full[0], dtype, device()) for _ in "ab")
            for output in (*ours, *theirs):
                output.fill_(float("nan"))
            Lane(device()).start(partial(engine.all_gather, ours, shards, "gather")).wait()
            c10d.all_gather(theirs, shards, "gather").join()
            wgrads = Stack([torch.randn(f, device=device(), generator=generator).to(dtype) for f in full])
            start = [torch.randn(s.shape, device=device(), generator=generator).to(sink_dtype) for s in shards]
            sinks = [_anywhere([t.clone() for t in start]) for _ in range(2)]
            accumulate = step % 2 == 0
            engine.reduce_scatter(wgrads, sinks[0], world_size, "reduce", accumulate=accumulate).join()
            c10d.reduce_scatter(wgrads, sinks[1], world_size, "reduce", accumulate=accumulate).join()
            results = [*ours, *sinks[0]], [*theirs, *sinks[1]]
            for mine, other in zip(*results, strict=True):
                assert torch.equal(mine, other), (step, mine.shape)
                compared += 1
    torch.cuda.synchronize()
    return compared


def agree_though_each_sees_one_gpu(rank: int, world_size: int, port: int) -> tuple[int, str]:
    """:func:`transports_agree` where every process calls its GPU 0; what ``auto`` takes there. Needs a new process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    assert torch.cuda.device_count() == 1
    chosen = select_transport(EtpConfig(transport="auto"), dist.group.WORLD, device())
    return transports_agree(rank, world_size, torch.bfloat16, torch.float32), type(chosen).__name__


def unpublished_is_refused(rank: int, world_size: int) -> str:
    """A shard in storage that was never published cannot be gathered."""
    _, engine = _pair()
    shard = torch.randn(16, 8, device=device())
    engine.publish([Stack([shard])])
    moved = shard.clone()
    try:
        engine.all_gather(Stack([torch.empty(16 * world_size, 8, device=device())]), Stack([moved]), "all-gather of w")
    except StaleWeightError as error:
        return str(error)
    return ""


def reductions_of_different_weights(rank: int, world_size: int, folder: str) -> None:
    """Two reductions alike, then each rank reduces a weight of its own; ends with the process, and words in a file."""
    logging.getLogger("etp.collectives.watchdog").addHandler(logging.FileHandler(Path(folder) / f"rank{rank}.txt"))
    group = dist.group.WORLD
    assert group is not None
    engine = CopyEngineTransport(group, device(), timeout_s=3.0)
    lane = Lane(device(), engine.expect)
    for step, name in enumerate(("w", "v", f"only_on_{rank}")):
        wgrad = torch.full((4 * world_size, 8), step + 1.0, device=device())
        sink = torch.zeros(4, 8, device=device())
        label = f"reduce-scatter of {name}'s gradient"
        reduce = partial(engine.reduce_scatter, Stack([wgrad]), Stack([sink]), 1, label, accumulate=True)
        lane.start(reduce, label=label).wait()
        if step < 2:
            torch.cuda.synchronize()
            assert bool((sink == world_size * (step + 1.0)).all())
    torch.cuda.synchronize()
    raise AssertionError("the gradients of different weights were added up")
