"""Common parts of the FP8 formats: Transformer Engine's scales, E4M3, and buffers for quantized copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from etp.formats.base import Quantization
from etp.layout import ShardLayout
from etp.stack import Stack

if TYPE_CHECKING:
    from etp.formats.kernels import TileTable

LARGEST_E4M3 = 448.0
"""The largest number of ``torch.float8_e4m3fn``."""

_EXPONENT = 0x7F800000


def scale_of(
    amax: torch.Tensor, *, power_of_two: bool, epsilon: float, largest: float = torch.finfo(torch.float32).max
) -> torch.Tensor:
    """The factors that bring numbers into the range of E4M3, as Transformer Engine computes them.

    Args:
        amax: largest magnitudes, fp32.
        power_of_two: round each scale down to a power of two.
        epsilon: smaller magnitudes are raised to this before a scale is computed.
        largest: the scale to use where it would be infinite.

    Returns:
        fp32, of the shape of ``amax``; 1 where a magnitude is 0, infinite or NaN.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    usable = (amax > 0) & (amax < torch.inf)
    # Not "448 / amax", which PyTorch computes as 448 * (1 / amax), rounding twice.
    scale = torch.div(torch.full_like(amax, LARGEST_E4M3), torch.where(usable, amax, 1.0))
    scale = torch.where(scale < torch.inf, scale, largest)
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where(usable, scale, 1.0)


def to_e4m3(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``values * scale`` in E4M3, saturated, as bytes of the shape of ``values``."""
    scaled = (values.float() * scale).clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


class Float8Quantization(Quantization):
    """Shards of some weight groups, and a byte for each of their elements.

    Args:
        shards: this rank's shards of each group, all on one device.
        layouts: how the weights of each group are cut.
        memory: see :meth:`etp.formats.base.WeightFormat.quantization`.
    """

    def __init__(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> None:
        self.device = shards[0].device
        sizes = [len(stack) * stack.numel for stack in shards]
        if memory is None:
            memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        parts = memory.split(sizes)
        self.copies = [Stack.within(part, len(stack), stack.shape) for part, stack in zip(parts, shards, strict=True)]
        self.layouts = layouts
        self.firsts = [0, *accumulate(map(len, shards))]
        """For each group, the number of its first weight among those of all groups."""
        self._shards = shards

    def weights(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each shard, and its copy."""
        for stack, copies in zip(self._shards, self.copies, strict=True):
            yield from zip(stack, copies, strict=True)

    def tensors(
        self,
        index: int,
        gathered: Stack,
        trained: Sequence[bool],
        *,
        transposed: bool,
        make: Callable[..., torch.Tensor],
    ) -> list[Any]:
        """Transformer Engine's tensors for group ``index``, whose data the caller sets at each visit.

        Tensors of rows are made once for each slot, because making 128 takes a millisecond. Tensors of columns are not
        kept, because they would keep the memory of their data.

        Args:
            index: the group's place.
            gathered: the slot's buffers.
            trained: ``requires_grad`` of each weight.
            transposed: whether they are columns.
            make: makes one, given its place among all weights and its ``requires_grad``.
        """
        made = {} if transposed else gathered.notes_of(self)
        key = index, tuple(trained)
        if key not in made:
            made[key] = [make(number, requires) for number, requires in enumerate(trained, self.firsts[index])]
        return list(made[key])

    def rows(self, index: int, gathered: Stack) -> Sequence[torch.Tensor]:
        """The weights of group ``index``, ``[rows, columns]``, without padding."""
        layout = self.layouts[index]
        return [weight[: layout.rows] for weight in gathered] if layout.pad_rows else gathered.tensors

    def transposed(self, index: int, gathered: Stack) -> Sequence[torch.Tensor]:
        """The transpose of each weight of group ``index``, ``[columns, rows]`` without padding, in one launch."""
        rows = self.layouts[index].rows
        if self.device.type == "cuda" and len(gathered) == 1:
            from transformer_engine.pytorch.constants import DType
            from transformer_engine_torch import fp8_transpose

            # In a profile, its launch took a fifth of the host time of a Triton launch.
            return [fp8_transpose(gathered[0][:rows], DType.kFloat8E4M3, out=None)]
        if self.device.type == "cuda":
            from etp.formats import kernels

            return kernels.transpose(gathered, rows)
        return gathered.block()[:, :rows].transpose(1, 2).contiguous().unbind(0)

    def tables(self, places: Sequence[int], steps: Sequence[tuple[int, int]]) -> list[TileTable]:
        """The tiles of all shards, a table for each dtype; see :class:`etp.formats.kernels.Tiled`."""
        from etp.formats.kernels import Tiled, tables_of

        return tables_of(
            Tiled(weight, copy, place, step)
            for (weight, copy), place, step in zip(self.weights(), places, steps, strict=True)
        )
