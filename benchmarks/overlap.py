"""Measures how much moving one weight slows down the GEMMs that run beside it, for several ways to move it.

::

    torchrun --nproc-per-node 4 -m benchmarks.overlap

The GEMMs are four bf16 products of 4096 x 4096 by 4096 x 14336; beside them one 117 MB weight is gathered, or a
gradient of that size reduced. Columns: milliseconds of the movement alone, and milliseconds that it adds to the GEMMs.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.command_line import require_gpus, require_torchrun
from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.collectives.copy_engine import CopyEngineTransport
from etp.collectives.driver import Copies, CudaDriver
from etp.collectives.symmetric import SymmetricBuffer
from etp.config import EtpConfig
from etp.stack import PitchedCopy, Stack
from etp.streams import InFlight

ROWS, COLUMNS, TOKENS, PRODUCTS = 14336, 4096, 4096, 4


class CopyVariants:
    """Peer copies over several streams, pulled or pushed, in pieces. Constructed collectively."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.driver = CudaDriver()
        self.source = SymmetricBuffer(group, nbytes, device)
        self.target = SymmetricBuffer(group, nbytes, device)
        self.chunk = nbytes // self.size
        self.streams = [torch.cuda.Stream(device, priority=-1) for _ in range(4)]

    def move(self, *, streams: int, pieces: int, push: bool) -> None:
        """Exchange one chunk with each peer."""
        current = torch.cuda.current_stream()
        used = self.streams[:streams] if streams > 1 else [current]
        for stream in used:
            if stream is not current:
                stream.wait_stream(current)
        step = self.chunk // pieces
        jobs = [(peer, piece) for piece in range(pieces) for peer in range(1, self.size)]
        for number, (hop, piece) in enumerate(jobs):
            peer = (self.rank + hop) % self.size
            if push:
                target = self.target.addresses[peer] + self.rank * self.chunk
                source = self.source.addresses[self.rank] + peer * self.chunk
            else:
                target = self.target.addresses[self.rank] + peer * self.chunk
                source = self.source.addresses[peer] + self.rank * self.chunk
            offset = piece * step
            copy = Copies([PitchedCopy(target + offset, step, source + offset, step, step, 1)])
            self.driver.copy(copy, used[number % len(used)].cuda_stream)
        for stream in used:
            if stream is not current:
                current.wait_stream(stream)


def _median_ms(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        dist.barrier()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    slowest = torch.tensor(times[2:], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def _variants(group: dist.ProcessGroup, device: torch.device) -> dict[str, Callable[[], InFlight | None]]:
    size = dist.get_world_size(group)
    shards = Stack([torch.randn(ROWS // size, COLUMNS, device=device).bfloat16()])
    weights = Stack([torch.randn(ROWS, COLUMNS, device=device).bfloat16()])
    sinks = Stack([torch.randn_like(shards[0])])
    c10d = C10dTransport(group, EtpConfig(), device=device)
    rounding = C10dTransport(group, EtpConfig(fp32_accumulation=False), device=device)
    engine = CopyEngineTransport(group, device)
    engine.publish([shards])
    copies = CopyVariants(group, device, weights.nbytes)
    gradients = Stack([torch.randn_like(weights[0])])

    def reduced(transport: Transport) -> InFlight:
        return transport.reduce_scatter(gradients, sinks, size, "", accumulate=True)

    found: dict[str, Callable[[], InFlight | None]] = {
        "gather, NCCL": lambda: c10d.all_gather(weights, shards, ""),
        "gather, copy_engine": lambda: engine.all_gather(weights, shards, ""),
    }
    ways = ((1, 1, False), (1, 1, True), (3, 1, False), (3, 1, True), (2, 4, False), (1, 8, False))
    for streams, pieces, push in ways:
        name = f"{'push' if push else 'pull'}, {streams} stream(s), {pieces} piece(s)"
        found[name] = partial(copies.move, streams=streams, pieces=pieces, push=push)
    found["reduce, NCCL all-to-all, fp32 sum"] = lambda: reduced(c10d)
    found["reduce, NCCL reduce-scatter"] = lambda: reduced(rounding)
    found["reduce, copy_engine"] = lambda: reduced(engine)
    return found


class Beside:
    """Runs movements by themselves, and beside the GEMMs.

    Args:
        device: this rank's GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._a = torch.randn(TOKENS, COLUMNS, device=device).bfloat16()
        self._weights = [torch.randn(COLUMNS, ROWS, device=device).bfloat16() for _ in range(PRODUCTS)]
        self._out = torch.empty(TOKENS, ROWS, device=device, dtype=torch.bfloat16)
        self._side = torch.cuda.Stream(device, priority=-1)

    def compute(self) -> None:
        """The GEMMs."""
        for weight in self._weights:
            torch.mm(self._a, weight, out=self._out)

    def alone(self, move: Callable[[], InFlight | None]) -> None:
        """A movement on the current stream."""
        _enqueue(move)

    def both(self, move: Callable[[], InFlight | None]) -> None:
        """A movement on a side stream, and the GEMMs on the current one; ends with the later of the two."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            _enqueue(move)
        self.compute()
        current.wait_stream(self._side)


def _enqueue(move: Callable[[], InFlight | None]) -> None:
    """Enqueue a movement on the current stream."""
    moving = move()
    if moving is not None:
        moving.join()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each way to move a weight."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=22, help="of which the first two are not counted")
    options = parser.parse_args(arguments)
    if options.repeats < 3:
        parser.error(f"--repeats is {options.repeats}; at least 3, as the first two are not counted")
    require_gpus(parser.error)
    require_torchrun(parser.error, "benchmarks.overlap")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no default process group")
    beside = Beside(device)
    gemms = _median_ms(beside.compute, options.repeats)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} GPUs; the GEMMs alone take {gemms:.3f} ms")
        print("| movement | alone | beside the GEMMs, added |\n|---|---|---|", flush=True)
    for name, move in _variants(group, device).items():
        alone = _median_ms(partial(beside.alone, move), options.repeats)
        both = _median_ms(partial(beside.both, move), options.repeats)
        if dist.get_rank() == 0:
            print(f"| {name} | {alone:.3f} | {both - gemms:+.3f} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
