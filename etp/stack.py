"""Tensors of one shape that move together, such as a layer's experts, as runs of addresses at a constant distance.

[Note: runs] Moving or summing the E tensors of a stack takes one call per run, not one per tensor: a pitched copy
(``cudaMemcpy2DAsync``) or a kernel takes a first address, a distance and a count. A gather slot and a buffer for
gradients are one run each. Parameters and gradients of Megatron are one run for each of DistributedDataParallel's
buckets that the layer touches, with a negative distance, because its buffers are filled from the last parameter to the
first. Tensors at arbitrary addresses are runs of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, overload
from weakref import WeakKeyDictionary

import torch

KERNEL_ALIGNMENT = 16
"""Triton compiles a kernel for addresses that are multiples of this, or for any."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive tensors of a stack at a constant distance in one storage.

    Attributes:
        address: where the first one begins.
        count: how many there are.
        stride: bytes from one to the next, negative if addresses descend; the size of the tensor if there is only one.
    """

    address: int
    count: int
    stride: int

    def at(self, offset: int) -> Run:
        """The same run, ``offset`` bytes further on."""
        return Run(self.address + offset, self.count, self.stride)


class Stack(Sequence[torch.Tensor]):
    """Contiguous tensors of one shape, dtype and device, in a fixed order. Compared by identity.

    Args:
        tensors: at least one.

    Raises:
        ValueError: if they differ in shape, dtype or device, or one is not contiguous.
    """

    __slots__ = ("_derived", "_placement", "device", "dtype", "nbytes", "numel", "plans", "runs", "shape", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        first = tensors[0]
        self.tensors = tuple(tensors)
        self.shape, self.dtype, self.device = first.shape, first.dtype, first.device
        self.numel: int = first.numel()
        """Elements of one tensor."""
        self.nbytes: int = first.nbytes
        """Bytes of one tensor."""
        kind = (first.shape, first.dtype, first.device)
        for tensor in self.tensors:
            if (tensor.shape, tensor.dtype, tensor.device) != kind or not tensor.is_contiguous():
                raise ValueError(
                    f"tensors that move together must be contiguous and alike: {_described(tensor)} is with "
                    f"{_described(first)}"
                )
        self.runs = _runs(self.tensors, self.nbytes)
        """The tensors in order; see [Note: runs]."""
        self._placement: tuple[object, ...] | None = None
        self._derived: WeakKeyDictionary[object, dict[Any, Any]] | None = None
        self.plans: dict[int, object] = {}
        """A transport's plans for gathers into these tensors, by the ``id`` of the shards."""

    @classmethod
    def allocate(cls, count: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Self:
        """``count`` new tensors of ``shape`` in one run, with arbitrary content."""
        return cls.within(torch.empty(count * math.prod(shape), dtype=dtype, device=device), count, shape)

    @classmethod
    def within(cls, memory: torch.Tensor, count: int, shape: Sequence[int]) -> Self:
        """``count`` tensors of ``shape`` in one run, which fill the one-dimensional ``memory``."""
        return cls(memory.view(count, *shape).unbind(0))

    def derived[T](self, maker: object, key: object, make: Callable[[], T]) -> T:
        """What ``make`` returned at ``maker``'s first call for this ``key``, kept as long as both live."""
        if self._derived is None:
            self._derived = WeakKeyDictionary()
        kept = self._derived.setdefault(maker, {})
        if key not in kept:
            kept[key] = make()
        found: T = kept[key]
        return found

    @property
    def is_one_block(self) -> bool:
        """Whether the tensors follow each other in memory without a gap."""
        return len(self.runs) == 1 and self.runs[0].stride == self.nbytes

    @property
    def address(self) -> int:
        """Where the first run begins."""
        return self.runs[0].address

    @property
    def placement(self) -> tuple[object, ...]:
        """What addresses relative to :attr:`address` depend on, and its remainder by 16, which kernels are made for."""
        if self._placement is None:
            first = self.runs[0].address
            relative = tuple([(run.address - first, run.count, run.stride) for run in self.runs])
            self._placement = self.dtype, self.nbytes, first % KERNEL_ALIGNMENT, relative
        return self._placement

    def block(self) -> torch.Tensor:
        """``[count, *shape]``: the tensors' own memory if they are one run of ascending addresses, else a copy."""
        first = self.tensors[0]
        if len(self.tensors) == 1:
            return first.unsqueeze(0)
        distance, rest = divmod(self.runs[0].stride, first.itemsize)
        if len(self.runs) == 1 and distance > 0 and not rest:
            return first.as_strided((len(self.tensors), *self.shape), (distance, *first.stride()))
        return torch.stack(self.tensors)

    def joint_runs(self, other: Stack) -> Iterator[tuple[int, int]]:
        """First index and count of the longest pieces that are within one run of both stacks, in order."""
        start = 0
        for mine, theirs in _pieces(self.runs, other.runs):
            del theirs
            yield start, mine.count
            start += mine.count

    def __len__(self) -> int:
        """How many tensors there are."""
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[torch.Tensor, ...]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """One tensor, or several."""
        return self.tensors[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The tensors in order."""
        return iter(self.tensors)


_MAX_PITCH = 2**31 - 1
"""The largest distance that CUDA's pitched copies accept, in bytes."""


@dataclass(frozen=True, slots=True)
class PitchedCopy:
    """Copies ``height`` pieces of ``width`` bytes, which lie one pitch apart at each end; both pitches are positive."""

    destination: int
    destination_pitch: int
    source: int
    source_pitch: int
    width: int
    height: int


def pitched_copies(destinations: Sequence[Run], sources: Sequence[Run], width: int) -> list[PitchedCopy]:
    """The fewest copies that move ``width`` bytes from each address of ``sources`` to that of ``destinations``.

    Args:
        destinations: as many addresses as ``sources`` has, in their order.
        sources: where to copy from.
        width: bytes to copy at each address.
    """
    copies = []
    for to, source in _pieces(destinations, sources):
        pitches = abs(to.stride), abs(source.stride)
        if (to.stride < 0) != (source.stride < 0) or max(pitches) > _MAX_PITCH:
            copies += [
                PitchedCopy(to.address + i * to.stride, width, source.address + i * source.stride, width, width, 1)
                for i in range(to.count)
            ]
        elif to.stride == source.stride == width:
            copies.append(PitchedCopy(to.address, width, source.address, width, to.count * width, 1))
        else:
            last = to.count - 1 if to.stride < 0 else 0
            lowest_to, lowest_source = to.address + last * to.stride, source.address + last * source.stride
            copies.append(PitchedCopy(lowest_to, pitches[0], lowest_source, pitches[1], width, to.count))
    return copies


def _pieces(first: Sequence[Run], second: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Split both sequences, of equal total count, wherever either begins a run; yields pairs of pieces."""
    if len(first) == len(second) == 1:
        yield first[0], second[0]
        return
    rest = [list(reversed(first)), list(reversed(second))]
    while rest[0]:
        one, other = rest[0].pop(), rest[1].pop()
        count = min(one.count, other.count)
        for run, runs in zip((one, other), rest, strict=True):
            if run.count > count:
                runs.append(Run(run.address + count * run.stride, run.count - count, run.stride))
        yield Run(one.address, count, one.stride), Run(other.address, count, other.stride)


def _runs(tensors: Sequence[torch.Tensor], nbytes: int) -> tuple[Run, ...]:
    addresses = [tensor.data_ptr() for tensor in tensors]
    if len(addresses) == 1:
        return (Run(addresses[0], 1, nbytes),)
    found, start = [], 0
    while start < len(addresses):
        stop = start + 1
        stride = addresses[stop] - addresses[start] if stop < len(addresses) else nbytes
        while stop < len(addresses) and addresses[stop] - addresses[stop - 1] == stride:
            stop += 1
        # Storages that happen to be neighbours may be separate allocations, which no copy may span.
        while stop - start > 1 and _storage(tensors[start]) != _storage(tensors[stop - 1]):
            stop -= 1
        count = stop - start
        found.append(Run(addresses[start], count, stride if count > 1 else nbytes))
        start = stop
    return tuple(found)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _described(tensor: torch.Tensor) -> str:
    layout = "" if tensor.is_contiguous() else ", not contiguous"
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}{layout}"
