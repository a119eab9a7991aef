"""Measures what bounds a refit between GPUs: the kernels that pack, digest and swap, and copies between GPUs.

    python -m benchmarks.refit_parts

Prints bytes a second: of 24 matrices of 100 MB, digested, packed and unpacked, for several shapes of a tile; of new
weights of Qwen3-8B's shapes that change places with old ones, for several shapes of a block; of the same matrices
quantized to block FP8; of changed elements that are found and put back; and, with two GPUs, of 4 GiB copied in pieces
of several sizes over one or more streams of either GPU, and of thousands of runs as of a mixture of experts, begun by
one call or many, and of 2 MiB in rows. ``--only runs`` prints a part.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from unittest import mock

import numpy as np
import torch

from benchmarks.command_line import require_gpus
from megatron_patches.refit.layout.boxes import Box, View
from megatron_patches.refit.memory import device_kernels, device_tables
from megatron_patches.refit.memory.device_port import DevicePort
from megatron_patches.refit.memory.ports import Batch, Piece
from megatron_patches.refit.transports.cuda_runtime import CudaRuntime
from megatron_patches.refit.transports.direct_copies import Rows
from megatron_patches.refit.vllm import exchange_kernel
from megatron_patches.refit.vllm.exchange_kernel import MemorySwap

MATRICES, ROWS, COLUMNS = 24, 12288, 4096
TILES = (
    (4096, 1024, 8, 8),
    (4096, 1024, 8, 4),
    (4096, 1024, 16, 8),
    (2048, 1024, 16, 4),
    (4096, 1024, 32, 8),
    (8192, 2048, 8, 8),
    (2048, 512, 16, 4),
    (4096, 512, 16, 8),
    (2048, 2048, 32, 8),
    (4096, 2048, 32, 8),
)
"""Elements and columns of a tile, groups of rows that it has, warps."""
LAYER = (6144 * 4096, 4096 * 4096, 24576 * 4096, 4096 * 12288, 4096, 4096, 128, 128)
SWAPPED = (151936 * 4096, *LAYER * 36, 4096, 151936 * 4096)
"""Elements of each tensor of Qwen3-8B as vLLM holds it."""
BLOCKS = tuple(product((512, 1024, 2048, 4096, 8192), (4, 8)))
"""Elements of 8 bytes that a program swaps, and its warps."""
COPIED = 4 << 30
RUNS, RUNS_PER_CALL = 1365, (1, 7, 42)
PITCHED, ROW_BYTES = 2 << 20, (256, 512, 1024, 2048, 4096, 8192, 16384)


def tiles() -> None:
    """Times the kernel for each shape of a tile."""
    box = Box("w", (0, 0), (ROWS, COLUMNS))
    size = (ROWS * COLUMNS,)
    held = {f"s{i}": torch.randint(-(2**15), 2**15, size, dtype=torch.int16, device="cuda") for i in range(MATRICES)}
    view = {name: View(name, 0, box.shape, (COLUMNS, 1)) for name in held}
    pieces = [Piece(view[name], "bfloat16", box, box.shape, i * box.volume * 2) for i, name in enumerate(held)]
    batch, nbytes = Batch(tuple(pieces)), MATRICES * box.volume * 2
    payload = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    for elements, columns, groups, warps in TILES:
        with (
            mock.patch.object(device_tables, "_ELEMENTS", elements),
            mock.patch.object(device_tables, "_MOST_COLUMNS", columns),
            mock.patch.object(device_tables, "LOOPS", groups),
            mock.patch.object(device_kernels, "_WARPS", warps),
        ):
            port = DevicePort(held, "this GPU")
            ways: dict[str, Callable[[], object]] = {
                "digest": lambda port=port: port.digest(batch).result(),  # type: ignore[misc]
                "pack": lambda port=port: port.pack(batch, payload).result(),  # type: ignore[misc]
                "unpack": lambda port=port: port.unpack(batch, payload).result(),  # type: ignore[misc]
            }
            found = {name: f"{nbytes / seconds(way) / 1e9:.0f}" for name, way in ways.items()}
        print(f"elements {elements} columns {columns} groups {groups} warps {warps}: {found} GB/s", flush=True)


def swaps() -> None:
    """Times the kernel that swaps a version in, for each shape of a block, and a copy of the new weights."""
    generator = torch.Generator("cuda").manual_seed(0)

    def weights() -> list[torch.Tensor]:
        each = [torch.empty(size, dtype=torch.bfloat16, device="cuda") for size in SWAPPED]
        return [one.view(torch.int16).random_(generator=generator).view(torch.bfloat16) for one in each]

    old, new = weights(), weights()
    nbytes = sum(one.nbytes for one in new)
    stretches = [(one.data_ptr(), other.data_ptr(), one.nbytes) for one, other in zip(old, new, strict=True)]
    taken = seconds(lambda: torch._foreach_copy_(old, new))
    print(f"copied: {nbytes / taken / 1e9:.0f} GB/s, {taken * 1e3:.1f} ms", flush=True)
    for block, warps in BLOCKS:
        with (
            mock.patch.dict(exchange_kernel._BLOCK, {exchange_kernel._WIDE: block}),
            mock.patch.object(exchange_kernel, "_WARPS", warps),
        ):
            exchange = MemorySwap(stretches, old[0].device)

            def swap_and_back(exchange: MemorySwap = exchange) -> None:
                exchange.run(keeps_old=True)
                exchange.undo()

            def overwrite(exchange: MemorySwap = exchange) -> None:
                for launch in exchange._launches:
                    launch.start(swaps=False)

            ways = {"swapped": seconds(swap_and_back) / 2, "overwritten": seconds(overwrite)}
        for way, taken in ways.items():
            print(
                f"block {block} warps {warps} {way}: {nbytes / taken / 1e9:.0f} GB/s, {taken * 1e3:.1f} ms", flush=True
            )


def quantizing() -> None:
    """Times the kernels of a push in block FP8: those that quantize, whole blocks and parts, and digests of bytes."""
    from etp.formats import kernels
    from megatron_patches.refit.layout.weight_format import BLOCK
    from megatron_patches.refit.source.block_parts import BlockPart, KernelParts

    size = ROWS * COLUMNS
    held = {f"s{i}": torch.randn(size, device="cuda").bfloat16() for i in range(MATRICES)}
    memory = torch.empty(MATRICES * size, dtype=torch.uint8, device="cuda")
    bytes_ = dict(zip(held, memory.split(size), strict=True))
    down, across = ROWS // BLOCK, COLUMNS // BLOCK
    numbers = torch.ones(MATRICES * down * across, device="cuda")
    boxes = {name: Box(name, (0, 0), (ROWS, COLUMNS)) for name in held}
    views = {name: View(name, 0, (ROWS, COLUMNS), (COLUMNS, 1)) for name in held}
    parts = [
        BlockPart(boxes[name], views[name], i * size, (ROWS, COLUMNS), i * down * across, across)
        for i, name in enumerate(held)
    ]
    quantizer = KernelParts(parts, memory, power_of_two=True)
    quantizer.measure(held, numbers)

    def quantize() -> None:
        for group in range(len(quantizer.begins)):
            quantizer.quantize(group, held, numbers, numbers)

    table = kernels.TileTable(
        [
            kernels.Tiled(
                views[name].tensor(held[name]), views[name].tensor(bytes_[name]), i * down * across, (across, 1)
            )
            for i, name in enumerate(held)
        ]
    )
    pieces = [Piece(views[name], "float8_e4m3fn", boxes[name], (ROWS, COLUMNS)) for name in held]
    port, batch = DevicePort(bytes_, "this GPU"), Batch(tuple(pieces))
    ways: dict[str, Callable[[], object]] = {
        "quantize, in groups as for a push": quantize,
        "quantize, in one launch": lambda: kernels.quantize_blocks(table, numbers, power_of_two=True, epsilon=0.0),
        "quantize, in one launch, finding NaN": lambda: kernels.quantize_blocks(
            table, numbers, power_of_two=True, epsilon=0.0, checked=True
        ),
        "digest of the bytes": lambda: port.digest(batch).result(),
    }
    for name, way in ways.items():
        taken, moved = seconds(way), MATRICES * size * (1 if name.startswith("digest") else 3)
        print(f"{name}: {taken * 1e3:.2f} ms, {moved / taken / 1e9:.0f} GB/s", flush=True)


def changes() -> None:
    """Times what a delta adds to packing a load: counting and compacting its changes, and putting them back."""
    from megatron_patches.refit.memory import delta_kernels
    from megatron_patches.refit.memory.delta import delta_of

    count = 8 * ROWS * COLUMNS
    old = torch.randint(0, 256, (2 * count,), dtype=torch.uint8, device="cuda")
    out = torch.empty_like(old)
    for share in (0.0, 0.01, 0.02, 0.03, 0.3):
        marked = (torch.rand(count, device="cuda") < share)[:, None]
        new = torch.where(marked, old.view(count, 2) ^ 1, old.view(count, 2)).view(-1)
        found = seconds(lambda new=new: delta_kernels.encode_delta(new, old, 2, out))  # type: ignore[misc]
        changed = int(delta_kernels.encode_delta(new, old, 2, out).item())
        put = 0.0
        if delta_of(0, changed, count, 2) is not None and changed:
            base = old.clone()
            put = seconds(lambda base=base, changed=changed: delta_kernels.decode_delta(out, changed, base, 2))  # type: ignore[misc]
        print(
            f"{changed / count:.1%} of {count} elements of 2 bytes: found in {found * 1e3:.2f} ms, "
            f"{2 * count / found / 1e9:.0f} GB/s, put back in {put * 1e3:.2f} ms",
            flush=True,
        )


def copies() -> None:
    """Times copies from the first GPU to the second."""
    source = torch.randint(0, 255, (COPIED,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda:1")
    for chunk, count, side in product((8 << 20, 32 << 20, 128 << 20, 512 << 20), (1, 2, 4), (0, 1)):
        streams = [torch.cuda.Stream(f"cuda:{side}") for _ in range(count)]

        def copy(chunk: int = chunk, streams: list[torch.cuda.Stream] = streams) -> None:
            for index, begin in enumerate(range(0, COPIED, chunk)):
                with torch.cuda.stream(streams[index % len(streams)]):
                    target[begin : begin + chunk].copy_(source[begin : begin + chunk], non_blocking=True)

        taken = seconds(copy)
        where = "source" if side == 0 else "target"
        print(
            f"pieces of {chunk >> 20} MiB, {count} streams of the {where}: {COPIED / taken / 1e9:.0f} GB/s", flush=True
        )


def runs() -> None:
    """Times copies of many runs from the first GPU to the second, by what copies the boxes of a load."""
    source = torch.randint(0, 255, (COPIED,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty(COPIED, dtype=torch.uint8, device="cuda:1")
    target[:1].copy_(source[:1])  # lets the GPUs reach each other
    length = COPIED // RUNS
    offsets = np.random.default_rng(0).permutation(RUNS) * length
    lengths = np.full(RUNS, length)
    copier = CudaRuntime("cuda:1").copier()
    for per_call in RUNS_PER_CALL:
        begun: list[float] = []

        def copy(per_call: int = per_call, begun: list[float] = begun) -> None:
            started = time.perf_counter()
            for first in range(0, RUNS, per_call):
                part = slice(first, first + per_call)
                copier.runs(source.data_ptr() + offsets[part], target.data_ptr() + offsets[part], lengths[part])
            begun.append(time.perf_counter() - started)
            copier.ended()

        taken = seconds(copy)
        each = statistics.median(begun) / RUNS * 1e6
        print(
            f"{RUNS} runs of {length >> 10} KiB, {per_call} a call: {COPIED / taken / 1e9:.0f} GB/s, begun in "
            f"{each:.1f} us each",
            flush=True,
        )


def pitched() -> None:
    """Times copies of rows of a matrix that is twice as wide, as for a row-parallel weight, between two GPUs."""
    source = torch.randint(0, 255, (COPIED,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty(COPIED // 2, dtype=torch.uint8, device="cuda:1")
    target[:1].copy_(source[:1])
    copier = CudaRuntime("cuda:1").copier()
    for width in ROW_BYTES:
        rows = Rows(PITCHED // width, width, 2 * width, width)

        def copy(rows: Rows = rows) -> None:
            for begin in range(0, COPIED // 2, PITCHED):
                copier.rows(source.data_ptr() + 2 * begin, target.data_ptr() + begin, rows)
            copier.ended()

        taken = seconds(copy)
        print(f"{rows.count} rows of {width} bytes a copy: {COPIED / 2 / taken / 1e9:.0f} GB/s", flush=True)


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds until all GPUs have done ``work``."""
    taken = []
    for _ in range(repeats + 1):
        _finish()
        started = time.perf_counter()
        work()
        _finish()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _finish() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


PARTS: tuple[tuple[str, Callable[[], None], int], ...] = (
    ("tiles", tiles, 1),
    ("swaps", swaps, 1),
    ("quantizing", quantizing, 1),
    ("changes", changes, 1),
    ("copies", copies, 2),
    ("runs", runs, 2),
    ("pitched", pitched, 2),
)
"""What is measured, and how many GPUs that takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints all rows, or those that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=[name for name, _, _ in PARTS])
    only = parser.parse_args(arguments).only
    chosen = [part for part in PARTS if only in (part[0], None)]
    require_gpus(parser.error, min(gpus for _, _, gpus in chosen))
    for name, work, gpus in chosen:
        if torch.cuda.device_count() >= gpus:
            work()
        else:
            print(f"{name}: not measured, as it needs {gpus} GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
