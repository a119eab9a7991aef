"""Common parts of all formats: quantized copies of shards, and Transformer Engine's tensors around gathered ones."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

import torch

from etp.formats.base import Quantization, WeightFormat
from etp.layout import ShardLayout
from etp.stack import Stack

if TYPE_CHECKING:
    from etp.formats.kernels import TileTable

_MOST_ARRAYS = 3
"""Data, scales and largest magnitudes."""
_NUMBER_ROW = 4


class QuantizedShards[F: WeightFormat](Quantization):
    """Quantized copies of shards.

    Args:
        format_: the format.
        shards: this rank's shards of each group, all on one device.
        layouts: how the weights of each group are cut.
        memory: see :meth:`etp.formats.base.WeightFormat.quantization`.
    """

    def __init__(
        self,
        format_: F,
        shards: Sequence[Stack],
        layouts: Sequence[ShardLayout],
        memory: torch.Tensor | None,
    ) -> None:
        self.format, self.layouts, self.device = format_, layouts, shards[0].device
        sizes = [len(stack) * format_.copied(layout) for stack, layout in zip(shards, layouts, strict=True)]
        if memory is None:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        self._shards = shards
        self.firsts = [0, *accumulate(map(len, shards))]
        """For each group, the number of its first weight among those of all groups."""
        self._parts = [
            _placed(part, len(stack), format_.copied_parts(layout))
            for part, stack, layout in zip(memory.split(sizes), shards, layouts, strict=True)
        ]
        self.copies = [parts[0] for parts in self._parts]
        self.derived: list[torch.Tensor] = []
        """Tensors that were handed out around new memory; see :meth:`release`."""

    def weights(self) -> list[tuple[torch.Tensor, ...]]:
        """Each shard, with the parts of its copy."""
        return [
            each
            for stack, parts in zip(self._shards, self._parts, strict=True)
            for each in zip(stack, *parts, strict=True)
        ]

    def published(self, index: int) -> Sequence[Stack]:
        """See :class:`etp.formats.base.Quantization`."""
        return self._parts[index]

    def tables(self, places: Iterable[int], steps: Iterable[tuple[int, int]]) -> list[TileTable]:
        """The tiles of all shards, a table for each dtype; see :class:`etp.formats.kernels.Tiled`."""
        from etp.formats.kernels import Tiled, tables_of

        return tables_of(
            Tiled(weight, copy, place, step)
            for (weight, copy, *_), place, step in zip(self.weights(), places, steps, strict=False)
        )

    @cached_property
    def whole_tables(self) -> list[TileTable]:
        """:meth:`tables` for a number of each shard."""
        return self.tables(range(self.firsts[-1]), repeat((0, 0)))

    @cached_property
    def numbers(self) -> torch.Tensor:
        """fp32 ``[weights, 4]``, of which a format uses the first column: GEMMs may read at multiples of 16 bytes."""
        return torch.ones(self.firsts[-1], _NUMBER_ROW, device=self.device)

    @cached_property
    def _each_number(self) -> Sequence[torch.Tensor]:
        return self.numbers[:, :1].unbind(0)

    def numbers_of(self, index: int) -> Sequence[torch.Tensor]:
        """The number of each weight of group ``index``, ``[1]``."""
        return self._each_number[self.firsts[index] : self.firsts[index + 1]]

    @cached_property
    def _magnitudes(self) -> torch.Tensor:
        return torch.zeros(self.firsts[-1], device=self.device)

    def largest_magnitudes(self) -> torch.Tensor:
        """The largest magnitude of each shard, in memory that is reused."""
        found = self._magnitudes.zero_()
        if self.device.type == "cuda":
            from etp.formats import kernels

            for table in self.whole_tables:
                kernels.largest_magnitudes(table, found)
            return found
        return found.copy_(amax_of([weight for weight, *_ in self.weights()]))

    # Tensors -------------------------------------------------------------------------------------------------

    def assemble(self, index: int, gathered: Stack, trained: Sequence[bool], *, transposed: bool) -> list[torch.Tensor]:
        """See :class:`etp.formats.base.Quantization`."""
        if self.derived:
            self.release()
        made: dict[Any, Any] = gathered.derived(self, "tensors", dict)
        key = index, transposed, tuple(trained)
        tensors = made.get(key)
        if tensors is None:
            # Once for each slot, because making 128 takes a millisecond. Hence outside the caller's inference mode.
            with torch.inference_mode(False):
                tensors = made[key] = [self._tensor(index, each, columns=transposed) for each in trained]
        arrays = made.get((index, transposed))
        if arrays is None:
            arrays, is_new = self.arrays(index, gathered, columns=transposed)
            if is_new:
                self.derived = tensors
            else:
                made[index, transposed] = arrays
        # At each visit, because Transformer Engine may drop data, or derive some that the next visit must not see.
        self.fill(tensors, arrays, columns=transposed)
        return list(tensors)

    def release(self) -> None:
        """See :class:`etp.formats.base.Quantization`."""
        self.fill(self.derived, [repeat(None)] * _MOST_ARRAYS, columns=False)
        self.derived = []

    @abstractmethod
    def arrays(self, index: int, gathered: Stack, *, columns: bool) -> tuple[list[Sequence[torch.Tensor]], bool]:
        """For each weight of group ``index``, data, scales and whatever :meth:`fill` sets; whether any is new memory.

        Args:
            index: the group's place.
            gathered: the slot's buffers.
            columns: whether a GEMM reads columns.
        """

    @cached_property
    @abstractmethod
    def kind(self) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        """Transformer Engine's class, and those arguments of its tensors that are the same for all weights."""

    def _tensor(self, index: int, requires_grad: bool, *, columns: bool) -> torch.Tensor:
        cls, options = self.kind
        return cls(
            shape=self.layouts[index].shape,
            dtype=self._shards[index].dtype,
            device=self.device,
            requires_grad=requires_grad,
            **options,
            **self.empty(columns=columns),
        )

    def fill(self, tensors: Iterable[Any], arrays: Iterable[Iterable[Any]], *, columns: bool) -> None:
        """Set what tensors hold, to what :meth:`arrays` has returned."""
        # One loop for a group: a call for each of 128 weights would take longer than the rest of a visit.
        data, scales, *_ = arrays
        if columns:
            for tensor, each, scale in zip(tensors, data, scales, strict=False):
                tensor._columnwise_data, tensor._columnwise_scale_inv = each, scale
                tensor._rowwise_data = tensor._rowwise_scale_inv = None
        else:
            for tensor, each, scale in zip(tensors, data, scales, strict=False):
                tensor._rowwise_data, tensor._rowwise_scale_inv = each, scale
                tensor._columnwise_data = tensor._columnwise_scale_inv = None

    def empty(self, *, columns: bool) -> dict[str, Any]:
        """Arguments of a tensor that has rows, or columns, but no data yet."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        rows, down = (None, nothing) if columns else (nothing, None)
        names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
        return dict(zip(names, (rows, rows, down, down), strict=True))


def amax_of(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude of each matrix, of which ranks exchange the maximum where they hold shards of the matrices.

    On a GPU, one kernel reads all matrices of a dtype.

    Args:
        weights: matrices ``[rows, columns]`` of any sizes but 0 and of any floating-point types, on one device. The
            elements of a row are adjacent.

    Returns:
        fp32 ``[len(weights)]``, on their device. On a GPU, NaN is ignored; on a CPU, it is the largest.
    """
    device = weights[0].device
    if device.type != "cuda":
        return torch.stack([weight.abs().amax().float() for weight in weights])
    from etp.formats import kernels

    found = torch.zeros(len(weights), device=device)
    # The kernel writes to no target.
    for table in kernels.tables_of(kernels.Tiled(weight, weight, place) for place, weight in enumerate(weights)):
        kernels.largest_magnitudes(table, found)
    return found


def transpose(matrices: torch.Tensor) -> torch.Tensor:
    """Transpose byte matrices ``[count, rows, columns]``, each contiguous, to ``[count, columns, rows]``, at once."""
    if matrices.device.type != "cuda":
        return matrices.transpose(1, 2).contiguous()
    if len(matrices) > 1:
        from etp.formats import kernels

        return kernels.transpose(matrices)
    from transformer_engine.pytorch.constants import DType
    from transformer_engine_torch import fp8_transpose

    # In a profile, its launch took a fifth of the host time of a Triton launch.
    transposed: torch.Tensor = fp8_transpose(matrices[0], DType.kFloat8E4M3, out=None)
    return transposed.unsqueeze(0)


def _placed(memory: torch.Tensor, count: int, shapes: Sequence[tuple[int, ...]]) -> list[Stack]:
    """``count`` arrays of each shape, one shape after the other."""
    parts = memory.split([count * math.prod(shape) for shape in shapes])
    return [Stack.within(part, count, shape) for part, shape in zip(parts, shapes, strict=True)]
