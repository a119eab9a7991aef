"""FP4 with a scale in E4M3 per 16 elements and one in fp32 per weight: Transformer Engine's NVFP4.

A block is 16 elements of a row or of a column, or 16 x 16 elements for both, which is what ``NVFP4BlockScaling`` does
with weights by default. No block straddles two shards. Ranks agree on the largest magnitude of each weight, of which
each has seen a shard. Weights are neither rotated (random Hadamard transforms) nor rounded stochastically, which
Transformer Engine does only to activations and gradients. The GEMMs need a GPU of compute capability 10.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from etp.formats.apart import ApartFormat, ApartQuantization
from etp.formats.base import Quantization
from etp.formats.fp8 import LARGEST_E4M3
from etp.layout import ShardLayout
from etp.stack import Stack

BLOCK = 16

LARGEST_E2M1 = 6.0
"""The largest number of FP4."""

_LARGEST = torch.finfo(torch.float32).max
_SIGN = 8


@dataclass(frozen=True)
class NVFP4(ApartFormat):
    """See the module's docstring.

    Attributes:
        square: whether blocks are 16 x 16 elements.
    """

    name: ClassVar[str] = "NVFP4"
    row_alignment: ClassVar[int] = BLOCK
    block: ClassVar[int] = BLOCK
    per_byte: ClassVar[int] = 2
    transposes_columns: ClassVar[bool] = True

    square: bool = True

    def quantization(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> Quantization:
        """See :class:`etp.formats.base.WeightFormat`."""
        return _NVFP4Quantization(self, shards, layouts, memory)


def quantize_nvfp4(
    weight: torch.Tensor, amax: torch.Tensor, *, square: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a matrix, or a shard of one, to NVFP4, by rows and by columns, on any device.

    Args:
        weight: ``[rows, columns]`` of any floating-point type; both sizes are multiples of 16.
        amax: largest magnitude of the whole weight, fp32, of one element.
        square: whether blocks are 16 x 16 elements.

    Returns:
        the rows' numbers ``[rows, columns / 2]`` and scales ``[rows, columns / 16]``, the columns' numbers
        ``[rows / 2, columns]`` and scales ``[rows / 16, columns]``: all uint8. A byte holds two neighbours in a row, or
        in a column, the first in the lower bits; scales are in E4M3.
    """
    values = weight.float()
    # Not "2688 / amax", which PyTorch computes as 2688 * (1 / amax), rounding twice.
    scale = torch.div(torch.full_like(amax, LARGEST_E4M3 * LARGEST_E2M1), amax).clamp(max=_LARGEST)
    scale = torch.where((amax == 0) | (scale == 0), 1.0, scale)
    row_data, row_scales = _quantize_rows(values, scale, square=square)
    column_data, column_scales = _quantize_rows(values.t(), scale, square=square)
    return row_data, row_scales, column_data.t(), column_scales.t()


def _quantize_rows(values: torch.Tensor, scale: torch.Tensor, *, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = values.unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(2)
    if square:
        amax = amax.unflatten(0, (-1, BLOCK)).amax(1).repeat_interleave(BLOCK, 0)
    inverse = (amax * (scale * (1 / LARGEST_E2M1))).clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn)
    # Where a block's scale is zero, its numbers saturate, but still stand for zero.
    factor = (inverse.float() * scale.reciprocal()).reciprocal().clamp(max=_LARGEST)
    numbers = _to_e2m1((blocks * factor[:, :, None]).flatten(1))
    return numbers[:, ::2] | numbers[:, 1::2] << 4, inverse.view(torch.uint8)


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Numbers in FP4, rounded to the nearest, ties to even, and saturated: uint8 of the shape of ``values``."""
    size = values.abs()
    above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0]
    return sum(above, start=values.signbit() * _SIGN).to(torch.uint8)


class _NVFP4Quantization(ApartQuantization[NVFP4]):
    """Quantized copies, and the largest magnitude of each whole weight."""

    def measure(self) -> torch.Tensor:
        """Return the largest magnitude of each shard."""
        return self.largest_magnitudes()

    def cast(self, everyone: torch.Tensor) -> None:
        """Quantize the shards, given the largest magnitudes of whole weights."""
        self.numbers[:, 0] = everyone.amax(dim=0)
        if self.device.type == "cuda":
            from etp.formats import kernels_apart

            for table in self.apart_tables:
                kernels_apart.quantize_nvfp4(table, self.numbers, square=self.format.square)
            return
        for (weight, *copies), amax in zip(self.weights(), self.numbers[:, 0], strict=True):
            for copy, quantized in zip(copies, quantize_nvfp4(weight, amax, square=self.format.square), strict=True):
                copy.copy_(quantized)

    def arrays(self, index: int, gathered: Stack, *, columns: bool) -> tuple[list[Sequence[torch.Tensor]], bool]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        arrays, is_new = super().arrays(index, gathered, columns=columns)
        return [*arrays, self.numbers_of(index)], is_new

    def fill(self, tensors: Iterable[Any], arrays: Iterable[Iterable[Any]], *, columns: bool) -> None:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        data, scales, amaxes = arrays
        super().fill(tensors, (data, scales), columns=columns)
        for tensor, amax in zip(tensors, amaxes, strict=False):
            tensor._amax_rowwise, tensor._amax_columnwise = (None, amax) if columns else (amax, None)

    @cached_property
    def kind(self) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor

        # As Transformer Engine quantizes a weight for the forward pass: by rows.
        quantizer = NVFP4Quantizer(rowwise=True, columnwise=False, with_2d_quantization=self.format.square)
        return NVFP4Tensor, {
            "amax_rowwise": None,
            "amax_columnwise": None,
            "fp4_dtype": quantizer.dtype,
            "quantizer": quantizer,
            "with_gemm_swizzled_scales": False,
        }
