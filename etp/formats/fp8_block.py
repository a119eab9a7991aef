"""FP8 with a scale for each block of 128 x 128 elements: Transformer Engine's ``Float8BlockScaling``.

A block never straddles two shards, so ranks need to agree on nothing; they only exchange the scales, which take 0.0002
bytes per element. Columns, which the backward pass reads, are exact transposes of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from etp.formats.base import Quantization, WeightFormat
from etp.formats.fp8 import data_of, scale_of, to_e4m3
from etp.formats.quantized import QuantizedShards
from etp.layout import ShardLayout
from etp.stack import Stack

if TYPE_CHECKING:
    from etp.formats.kernels import TileTable

BLOCK = 128

# The FP8 GEMMs read rows of scales whose length is a multiple of this.
_SCALE_COLUMNS = 4


@dataclass(frozen=True)
class Float8Block(WeightFormat):
    """See the module's docstring.

    Attributes:
        power_of_two: whether scales are powers of two.
        epsilon: smaller magnitudes are raised to this before a scale is computed.
    """

    name: ClassVar[str] = "block-scaled FP8"
    row_alignment: ClassVar[int] = BLOCK

    power_of_two: bool = True
    epsilon: float = 0.0

    def quantization(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> Quantization:
        """See :class:`etp.formats.base.WeightFormat`."""
        return _BlockQuantization(self, shards, layouts, memory)


def quantize_blocks(
    weight: torch.Tensor, *, power_of_two: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix to E4M3, block by block, on any device.

    Args:
        weight: ``[rows, columns]`` of any floating-point type.
        power_of_two: whether scales are powers of two.
        epsilon: smaller magnitudes are raised to this before a scale is computed.

    Returns:
        the bytes, uint8 ``[rows, columns]``, and the inverse scales, fp32 ``[rows / 128, columns / 128]``, both sizes
        rounded up.
    """
    rows, columns = weight.shape
    down, across = _blocks(rows), _blocks(columns)
    padded = torch.nn.functional.pad(weight.float(), (0, across * BLOCK - columns, 0, down * BLOCK - rows))
    blocks = padded.view(down, BLOCK, across, BLOCK)
    scale = scale_of(
        blocks.abs().amax((1, 3)), power_of_two=power_of_two, epsilon=epsilon, largest=torch.finfo(weight.dtype).max
    )
    quantized = to_e4m3(blocks, scale[:, None, :, None]).view(padded.shape)
    return quantized[:rows, :columns].contiguous(), 1.0 / scale


class _BlockQuantization(QuantizedShards[Float8Block]):
    """Quantized shards, and the inverse scales of whole weights, each ``[blocks down, blocks across]``."""

    def __init__(
        self,
        format_: Float8Block,
        shards: Sequence[Stack],
        layouts: Sequence[ShardLayout],
        memory: torch.Tensor | None,
    ) -> None:
        super().__init__(format_, shards, layouts, memory)
        cuts = [layout for layout, stack in zip(layouts, shards, strict=True) for _ in stack]
        # Blocks of each shard, in the order of the weights.
        self._shapes = [(_blocks(cut.shard_rows), _padded(_blocks(cut.row_numel))) for cut in cuts]
        sizes = [down * across for down, across in self._shapes]
        self._places = [0, *accumulate(sizes)]
        total = self._places.pop()
        self._own = torch.zeros(total, device=self.device)
        # Of the scales of each weight, and then of their transposes: their places in [ranks, scales of all shards].
        rows, columns = [], []
        everyone = torch.arange(layouts[0].num_shards * total).view(-1, total)
        for cut, part, (_, across) in zip(cuts, everyone.split(sizes, dim=1), self._shapes, strict=True):
            rows.append(part.reshape(-1, across)[: _blocks(cut.rows)])
            columns.append(_padded_rows(rows[-1][:, : _blocks(cut.row_numel)].t()))
        places = [*rows, *columns]
        self._order = torch.cat([each.reshape(-1) for each in places]).to(self.device)
        self._scales = torch.ones(len(self._order), device=self.device)
        parts = self._scales.split([each.numel() for each in places])
        views = [part.view(each.shape) for part, each in zip(parts, places, strict=True)]
        self._scales_of_rows, self._scales_of_columns = views[: len(rows)], views[len(rows) :]

    def measure(self) -> torch.Tensor:
        """Quantize the shards, and return the inverse scales of their blocks."""
        options: dict[str, Any] = {"power_of_two": self.format.power_of_two, "epsilon": self.format.epsilon}
        if self.device.type == "cuda":
            from etp.formats import kernels

            for table in self._tables:
                kernels.quantize_blocks(table, self._own, **options)
            return self._own
        for (weight, copy), place, (down, across) in zip(self.weights(), self._places, self._shapes, strict=True):
            quantized, scales = quantize_blocks(weight, **options)
            copy.copy_(quantized)
            self._own[place : place + down * across].view(down, across)[:, : scales.shape[1]] = scales
        return self._own

    @cached_property
    def _tables(self) -> list[TileTable]:
        return self.tables(self._places, [(across, 1) for _, across in self._shapes])

    def cast(self, everyone: torch.Tensor) -> None:
        """Put the scales of all ranks in the order of the weights; the bytes are complete already."""
        torch.index_select(everyone.view(-1), 0, self._order, out=self._scales)

    def arrays(self, index: int, gathered: Stack, *, columns: bool) -> tuple[list[Sequence[torch.Tensor]], bool]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        data, is_new = data_of(gathered, self.layouts[index].rows, columns=columns)
        scales = self._scales_of_columns if columns else self._scales_of_rows
        return [data, scales[self.firsts[index] : self.firsts[index + 1]]], is_new

    @cached_property
    def kind(self) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
            Float8BlockQuantizer,
            Float8BlockwiseQTensor,
        )

        # As Transformer Engine quantizes a weight for the forward pass: by rows.
        quantizer = Float8BlockQuantizer(
            DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            amax_epsilon=self.format.epsilon,
            force_pow_2_scales=self.format.power_of_two,
            block_scaling_dim=2,
        )
        return Float8BlockwiseQTensor, {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "is_2D_scaled": True}


def _padded(count: int) -> int:
    return -(-count // _SCALE_COLUMNS) * _SCALE_COLUMNS


def _padded_rows(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` with rows as long as the GEMMs need them; the rest repeats the last scale, and is not read."""
    more = _padded(scales.shape[1]) - scales.shape[1]
    return torch.cat([scales, scales[:, -1:].expand(-1, more)], dim=1)


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)
