"""Measures the engine's host time per weight and microbatch: Python and calls into PyTorch, without communication.

    python -m benchmarks.host_work [--profile]
    python -m benchmarks.host_work --calls

A stack of tiny linear layers takes training steps on the CPU, unsharded and sharded; the sharded one has a transport
that moves nothing, so its results mean nothing. What the sharded one takes longer, over the number of weights, is host
work of one forward visit, one backward visit and one reduction. On GPUs an eager step cannot take less than the host
needs to enqueue it (``host_ms`` of ``benchmarks.train_step``), to which the calls of CUDA come as well.

With ``--calls`` it counts instead of measuring: Python calls of ETP and of PyTorch's FSDP2, with a real transport, and
how those of grouped layers grow with the number of experts (:mod:`benchmarks.host_calls`).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import etp
from benchmarks.command_line import positive
from benchmarks.host_calls import print_all
from etp.collectives.base import Transport
from etp.stack import Stack
from etp.streams import InFlight

_SIDE = 64


class MovesNothing(Transport):
    """A transport whose collectives are done at once; weights are published to it, as to ``copy_engine``."""

    publishes = True

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        """See :class:`etp.collectives.base.Transport`."""
        del outputs, shards, label
        return InFlight()

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        """See :class:`etp.collectives.base.Transport`."""
        del wgrads, sinks, divisor, label, accumulate
        return InFlight()


def build(layers: int, *, sharded: bool) -> Callable[[], None]:
    """A stack of layers. Returns one training step of it; gradients are added to ``main_grad``, as under Megatron."""
    model = nn.Sequential(*(nn.Linear(_SIDE, _SIDE, bias=False) for _ in range(layers)))
    if sharded:
        group = dist.group.WORLD
        runtime = etp.shard_module(model, group, config=etp.EtpConfig(reuse_across_forwards=True))
        runtime.routes.transports[group] = MovesNothing()
        for param in model.parameters():
            cast("Any", param).main_grad = torch.zeros(_SIDE, _SIDE)
    x = torch.randn(2, _SIDE, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    return step


def microseconds(step: Callable[[], None], repeats: int) -> float:
    """Median time of a step."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Print microseconds for each weight and microbatch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--repeats", type=positive, default=100)
    parser.add_argument("--profile", action="store_true", help="print where the time of the sharded steps goes")
    parser.add_argument("--calls", action="store_true", help="count calls instead, of ETP and of FSDP2")
    options = parser.parse_args(arguments)
    if options.calls:
        print_all()
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        steps = {sharded: build(options.layers, sharded=sharded) for sharded in (False, True)}
        for step in steps.values():
            for _ in range(10):
                step()
        taken = {sharded: microseconds(step, options.repeats) / options.layers for sharded, step in steps.items()}
        print(f"unsharded {taken[False]:.1f}, sharded {taken[True]:.1f}: {taken[True] - taken[False]:.1f} us a weight")
        if options.profile:
            with cProfile.Profile() as profile:
                microseconds(steps[True], options.repeats)
            pstats.Stats(profile).sort_stats("tottime").print_stats("etp", 30)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
