"""Measures what a signal between two streams costs: as operations of the streams on memory, and as kernels.

::

    python -m benchmarks.signals                # on one GPU

Reductions of ``copy_engine`` wait for flags that peers raise. The streams' front ends can raise and await them
(``cuStreamBatchMemOp``, as :mod:`etp.collectives.symmetric` does), or kernels can, such as those of PyTorch's symmetric
memory. Two streams of one GPU send each other a flag in turn, on an idle device and beside GEMMs of 4096 x 4096 by
4096 x 14336. Columns: microseconds of one round trip, two signals; of the host for a signal and its wait; and
milliseconds that all signals add to the GEMMs. Between GPUs, the way of the flag is added to either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from benchmarks.command_line import positive, require_gpus
from etp.collectives.driver import CudaDriver, MemoryOperations

ROWS, COLUMNS, TOKENS = 14336, 4096, 4096
_WORD = 4

Signal = Callable[[int], None]
"""Enqueues one half of a signal on the current stream: channel 0 or 1."""


def by_memory_operations(device: torch.device) -> tuple[Signal, Signal]:
    """How to raise, and how to await, flags by operations of the stream."""
    driver, flags = CudaDriver(), torch.zeros(2, dtype=torch.int32, device=device)
    addresses = [flags.data_ptr() + channel * _WORD for channel in range(2)]
    raising = [MemoryOperations(1, raised=[address]) for address in addresses]
    taking = [MemoryOperations(1, taken=[address]) for address in addresses]

    def put(channel: int) -> None:
        driver.enqueue(raising[channel], torch.cuda.current_stream(device).cuda_stream)

    def take(channel: int, keep: torch.Tensor = flags) -> None:
        del keep  # the flags live as long as whoever waits for them
        driver.enqueue(taking[channel], torch.cuda.current_stream(device).cuda_stream)

    return put, take


def by_kernels(device: torch.device) -> tuple[Signal, Signal]:
    """How to raise, and how to await, flags by the kernels of PyTorch's symmetric memory, in a group of one rank."""
    memory = symm_mem.rendezvous(symm_mem.empty(1, device=device), dist.group.WORLD)

    def put(channel: int) -> None:
        memory.put_signal(0, channel)

    def take(channel: int) -> None:
        memory.wait_signal(0, channel)

    return put, take


class PingPong:
    """Two streams that signal each other in turn, and a third one that computes.

    Args:
        device: the GPU.
        trips: round trips in one measurement.
    """

    def __init__(self, device: torch.device, trips: int) -> None:
        self._device, self._trips = device, trips
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(2)]
        self._a = torch.randn(TOKENS, COLUMNS, device=device).bfloat16()
        self._weight = torch.randn(COLUMNS, ROWS, device=device).bfloat16()
        self._out = torch.empty(TOKENS, ROWS, device=device, dtype=torch.bfloat16)

    def trip_us(self, signals: tuple[Signal, Signal] | None, products: int) -> tuple[float, float, float]:
        """One measurement.

        Args:
            signals: how to raise and to await; None for no signals.
            products: number of GEMMs beside them.

        Returns:
            microseconds of a round trip, microseconds of the host for a signal and its wait, milliseconds of the GEMMs.
        """
        torch.cuda.synchronize(self._device)
        begin, end, first, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        begin.record()
        for _ in range(products):
            torch.mm(self._a, self._weight, out=self._out)
        end.record()
        host = 0.0
        if signals is not None:
            started = time.perf_counter()
            self._exchange(signals, first, last)
            host = (time.perf_counter() - started) / (2 * self._trips) * 1e6
        torch.cuda.synchronize(self._device)
        trip = first.elapsed_time(last) / self._trips * 1e3 if signals is not None else 0.0
        return trip, host, begin.elapsed_time(end)

    def _exchange(self, signals: tuple[Signal, Signal], first: torch.cuda.Event, last: torch.cuda.Event) -> None:
        put, take = signals
        one, other = self._streams
        first.record(one)
        for _ in range(self._trips):
            with torch.cuda.stream(one):
                put(0)
            with torch.cuda.stream(other):
                take(0)
                put(1)
            with torch.cuda.stream(one):
                take(1)
        last.record(one)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each way to signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=positive, default=50, help="round trips in one measurement")
    parser.add_argument("--repeats", type=positive, default=20)
    options = parser.parse_args(arguments)
    require_gpus(parser.error)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    game = PingPong(device, options.trips)
    ways = {"memory operations": by_memory_operations(device), "kernels": by_kernels(device)}
    # GEMMs that outlast the signals, whichever way they take.
    products = 4 * options.trips
    gemms = statistics.median(game.trip_us(None, products)[2] for _ in range(options.repeats))
    print(f"{torch.cuda.get_device_name(device)}; {products} GEMMs alone take {gemms:.2f} ms")
    print("| signals | round trip, idle | beside GEMMs | host | added to the GEMMs |\n|---|---|---|---|---|")
    for name, signals in ways.items():
        idle = [game.trip_us(signals, 0) for _ in range(options.repeats + 1)][1:]
        beside = [game.trip_us(signals, products) for _ in range(options.repeats + 1)][1:]
        trip, host = (statistics.median(column) for column in list(zip(*idle, strict=True))[:2])
        slow, added = statistics.median(row[0] for row in beside), statistics.median(row[2] for row in beside) - gemms
        print(f"| {name} | {trip:.1f} us | {slow:.1f} us | {host:.1f} us | {added:+.2f} ms |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
