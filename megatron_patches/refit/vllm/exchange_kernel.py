"""The Triton kernel that swaps memory contents: all weights of a model in one launch, each read once.

Imported only if Triton is installed. It runs on the current stream, and on a CPU under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from megatron_patches.refit.errors import TransferError

Stretch = tuple[int, int, int]
"""Two addresses, and the number of bytes to swap between them."""

_WARPS = 4
_WIDE = 8  # bytes of an element if the stretch is aligned
_ALIGNED = 16  # bytes that a thread then reads at a time
# Elements that one program swaps. With smaller wide blocks, many shapes take three times as long.
_BLOCK = {_WIDE: 4096, 1: 1024}
_FIELDS = 4  # of an entry: starts of its two stretches and its length, in elements; its first program
_TYPES = {_WIDE: tl.int64, 1: tl.int8}


# No annotations: Triton would interpret them.
@triton.jit  # type: ignore[untyped-decorator]
def _exchange(  # type: ignore[no-untyped-def]
    origin,  # noqa: ANN001
    table,  # noqa: ANN001
    programs,  # noqa: ANN001
    swaps: tl.constexpr,
    fields: tl.constexpr,
    vector: tl.constexpr,
    block: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    entry = table + tl.load(programs + program).to(tl.int64) * fields
    one, other, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    at = (program - tl.load(entry + 3)) * block + tl.arange(0, block)
    if vector > 1:  # the host has ensured these alignments, so the compiler can read 16 bytes at a time
        one = tl.multiple_of(one, vector)
        other = tl.multiple_of(other, vector)
        count = tl.multiple_of(count, vector)
    mask = at < count
    if swaps:
        mine = tl.load(origin + one + at, mask=mask)
    theirs = tl.load(origin + other + at, mask=mask)
    tl.store(origin + one + at, theirs, mask=mask)
    if swaps:
        tl.store(origin + other + at, mine, mask=mask)


class MemorySwap:
    """Stretches of one device's memory that are swapped on each run.

    Args:
        stretches: the stretches; they must not overlap.
        device: the device.
    """

    def __init__(self, stretches: Sequence[Stretch], device: torch.device) -> None:
        self._launches = _launches(stretches, device)
        self._run = 0
        self._is_final = False  # whether the last launch has overwritten old content

    def run(self, *, keeps_old: bool) -> None:
        """Swaps the stretches. Without ``keeps_old``, the last launch only copies, which halves its traffic.

        A launch that fails has written nothing, so all can be undone then.
        """
        for launch in self._launches[self._run :]:
            swaps = keeps_old or launch is not self._launches[-1]
            launch.start(swaps=swaps)
            self._run += 1
            self._is_final = not swaps

    def undo(self) -> None:
        """Swaps back those that have been swapped.

        Raises:
            TransferError: if the old content was overwritten.
        """
        if self._is_final:
            raise TransferError("the old weights were overwritten")
        while self._run:
            self._launches[self._run - 1].start()
            self._run -= 1


class _Launch:
    """Entries with one element width."""

    def __init__(self, entries: NDArray[np.int64], width: int, device: torch.device) -> None:
        self._width = width
        self._origin = torch.empty(_ALIGNED, dtype=torch.uint8, device=device)
        lengths = entries[:, 2] // width
        counts = -(-lengths // _BLOCK[width])
        table = np.empty((len(entries), _FIELDS), dtype=np.int64)
        table[:, :2] = (entries[:, :2] - self._origin.data_ptr()) // width
        table[:, 2], table[:, 3] = lengths, np.cumsum(counts) - counts
        programs = np.repeat(np.arange(len(entries), dtype=np.int32), counts)
        self._table, self._programs = (torch.from_numpy(array).to(device) for array in (table, programs))

    def start(self, *, swaps: bool = True) -> None:
        """Launches the kernel, which swaps or only copies the second stretches over the first."""
        device = self._origin.device
        # Triton launches on the current device, which may be a different one in a commit's thread.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            _exchange[(self._programs.numel(),)](
                triton.reinterpret(self._origin, _TYPES[self._width]),
                self._table,
                self._programs,
                swaps=swaps,
                fields=_FIELDS,
                vector=_ALIGNED // self._width if self._width > 1 else 1,
                block=_BLOCK[self._width],
                num_warps=_WARPS,
            )


def _launches(stretches: Sequence[Stretch], device: torch.device) -> list[_Launch]:
    """Splits each stretch into its aligned part, in wide elements, and the rest, byte by byte."""
    given = np.array(stretches, dtype=np.int64).reshape(-1, 3)
    aligned = (given[:, 0] % _ALIGNED == 0) & (given[:, 1] % _ALIGNED == 0)
    wide_bytes = np.where(aligned, given[:, 2] // _ALIGNED * _ALIGNED, 0)
    wide, narrow = given.copy(), given.copy()
    wide[:, 2] = wide_bytes
    narrow[:, :2] += wide_bytes[:, None]
    narrow[:, 2] -= wide_bytes
    parts = [(narrow[narrow[:, 2] > 0], 1), (wide[wide[:, 2] > 0], _WIDE)]  # the last may overwrite: most of it
    return [_Launch(entries, width, device) for entries, width in parts if len(entries)]


def compile_for(device: torch.device) -> None:
    """Compiles the kernel for a GPU, in all its forms, so that the first commit does not wait for it."""
    scratch = torch.zeros(4 * _ALIGNED, dtype=torch.uint8, device=device)
    address = scratch.data_ptr()
    for launch in _launches([(address, address + 2 * _ALIGNED, _ALIGNED + 1)], device):
        for swaps in (True, False):
            launch.start(swaps=swaps)
