"""Bodies of the transports' tests, run on every rank."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from etp.collectives import select_transport
from etp.collectives.base import GradSink, Transport
from etp.collectives.c10d import C10dTransport
from etp.collectives.copy_engine import CopyEngineTransport
from etp.config import EtpConfig
from etp.errors import StaleWeightError
from etp.streams import Lane
from tests.support.launch import device


def _pair() -> tuple[Transport, CopyEngineTransport]:
    group = dist.group.WORLD
    assert group is not None
    c10d = C10dTransport(group, fp32_accumulation=True, timeout_s=60.0, device=device())
    return c10d, CopyEngineTransport(group, device())


def _busy(seconds_hint: int) -> None:
    """Keep this rank's stream busy for a while, so that peers run ahead of it."""
    a = torch.randn(2048, 2048, device=device())
    for _ in range(seconds_hint):
        a = a @ a.clamp(-1, 1) / 64


def transports_agree(rank: int, world_size: int, dtype: torch.dtype, sink_dtype: torch.dtype) -> int:
    """Gathers and reductions of both transports have the same bits, whoever is late. Returns how many were compared."""
    c10d, engine = _pair()
    generator = torch.Generator(device=device()).manual_seed(rank)
    shapes = [[(48, 64)], [(5, 8)], [(1024, 512)], [(16, 24), (32, 24), (16, 8)]]
    groups = [[torch.randn(s, device=device(), generator=generator).to(dtype) for s in shape] for shape in shapes]
    compared = 0
    for step in range(12):
        if step % world_size == rank:
            _busy(40)
        if step % 3 == 0:
            for shards in groups:
                for shard in shards:
                    shard.add_(torch.randn(shard.shape, device=device(), generator=generator).to(dtype))
            engine.publish([shard for shards in groups for shard in shards])
        for shards in groups:
            full = [(world_size * s.shape[0], s.shape[1]) for s in shards]
            ours, theirs = ([torch.full(f, float("nan"), device=device(), dtype=dtype) for f in full] for _ in "ab")
            engine.all_gather(ours, shards, "gather").join()
            c10d.all_gather(theirs, shards, "gather").join()
            wgrads = [torch.randn(f, device=device(), generator=generator).to(dtype) for f in full]
            start = [torch.randn(s.shape, device=device(), generator=generator).to(sink_dtype) for s in shards]
            sinks = [[GradSink(t.clone(), accumulate=step % 2 == 0) for t in start] for _ in range(2)]
            engine.reduce_scatter(wgrads, sinks[0], world_size, "reduce").join()
            c10d.reduce_scatter(wgrads, sinks[1], world_size, "reduce").join()
            results = [*ours, *(s.tensor for s in sinks[0])], [*theirs, *(s.tensor for s in sinks[1])]
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
    engine.publish([shard])
    moved = shard.clone()
    try:
        engine.all_gather([torch.empty(16 * world_size, 8, device=device())], [moved], "all-gather of w")
    except StaleWeightError as error:
        return str(error)
    return ""


def reductions_of_different_weights(rank: int, world_size: int, folder: str) -> None:
    """Two reductions alike, then each rank reduces a weight of its own; ends with the process, and words in a file."""
    logging.getLogger("etp.collectives.watchdog").addHandler(logging.FileHandler(Path(folder) / f"rank{rank}.txt"))
    group = dist.group.WORLD
    assert group is not None
    engine = CopyEngineTransport(group, device(), timeout_s=3.0)
    lane = Lane(device())
    for step, name in enumerate(("w", "v", f"only_on_{rank}")):
        wgrad = torch.full((4 * world_size, 8), step + 1.0, device=device())
        sink = GradSink(torch.zeros(4, 8, device=device()), accumulate=True)
        label = f"reduce-scatter of {name}'s gradient"
        lane.start(partial(engine.reduce_scatter, [wgrad], [sink], 1, label)).wait()
        if step < 2:
            torch.cuda.synchronize()
            assert bool((sink.tensor == world_size * (step + 1.0)).all())
    torch.cuda.synchronize()
    raise AssertionError("the gradients of different weights were added up")
