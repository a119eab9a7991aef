"""FP8 with a power-of-two scale per 32 elements of a row, or of a column: Transformer Engine's ``MXFP8BlockScaling``.

A block never straddles two shards, so ranks need to agree on nothing. Rows and columns are quantized separately:
neither can be derived from the other. Their GEMMs need a GPU of compute capability 10.0, and Transformer Engine's
quantization writes nothing on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from etp.formats.apart import ApartFormat, ApartQuantization
from etp.formats.base import Quantization
from etp.formats.fp8 import LARGEST_E4M3, to_e4m3
from etp.layout import ShardLayout
from etp.stack import Stack

BLOCK = 32

_MANTISSA_BITS = 23
_MANTISSA = 0x7FFFFF
_NAN, _LARGEST = 0xFF, 0xFE
# Half of the smallest normal number, as a mantissa: 2^-127, which is the smallest scale.
_LEAST = 0x400000


@dataclass(frozen=True)
class MXFP8(ApartFormat):
    """See the module's docstring."""

    name: ClassVar[str] = "MXFP8"
    row_alignment: ClassVar[int] = BLOCK
    block: ClassVar[int] = BLOCK
    per_byte: ClassVar[int] = 1

    def quantization(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> Quantization:
        """See :class:`etp.formats.base.WeightFormat`."""
        return _MXFP8Quantization(self, shards, layouts, memory)


def e8m0_of(amax: torch.Tensor) -> torch.Tensor:
    """The exponents that bring numbers into the range of E4M3, as Transformer Engine rounds them: up.

    Args:
        amax: largest magnitudes, fp32.

    Returns:
        uint8 of the shape of ``amax``: e stands for the inverse scale ``2 ** (e - 127)``, 255 for NaN.
    """
    inverse = amax * (1 / LARGEST_E4M3)
    bits = inverse.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & _MANTISSA
    up = (mantissa > 0) & ~((exponent == 0) & (mantissa <= _LEAST)) & (exponent < _LARGEST)
    exponent = torch.where(inverse.isinf(), _LARGEST, exponent + up)
    return torch.where(inverse.isnan(), _NAN, exponent).to(torch.uint8)


def scale_of_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """The fp32 scales ``2 ** (127 - exponent)`` that numbers are multiplied by, from exponents in uint8."""
    exponent = exponent.to(torch.int32)
    bits = torch.where(exponent == _LARGEST, _LEAST, (_LARGEST - exponent) << _MANTISSA_BITS)
    return torch.where(exponent == _NAN, torch.nan, bits.view(torch.float32))


def quantize_mxfp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize a matrix to MXFP8, by rows and by columns, on any device.

    Args:
        weight: ``[rows, columns]`` of any floating-point type; both sizes are multiples of 32.

    Returns:
        the bytes of the rows ``[rows, columns]``, their scales ``[rows, columns / 32]``, the bytes of the columns
        ``[rows, columns]``, and their scales ``[rows / 32, columns]``: all uint8; for the scales see :func:`e8m0_of`.
    """
    rows, columns = weight.shape
    values = weight.float()
    along = values.view(rows, columns // BLOCK, BLOCK)
    row_scales = e8m0_of(along.abs().amax(2))
    row_data = to_e4m3(along, scale_of_e8m0(row_scales)[:, :, None])
    down = values.view(rows // BLOCK, BLOCK, columns)
    column_scales = e8m0_of(down.abs().amax(1))
    column_data = to_e4m3(down, scale_of_e8m0(column_scales)[:, None])
    return row_data.view(rows, columns), row_scales, column_data.view(rows, columns), column_scales


class _MXFP8Quantization(ApartQuantization[MXFP8]):
    """Quantized copies, without numbers to agree on."""

    def measure(self) -> torch.Tensor:
        """Nothing: each block lies in one shard."""
        return torch.empty(0, device=self.device)

    def cast(self, everyone: torch.Tensor) -> None:
        """Quantize the shards."""
        del everyone
        if self.device.type == "cuda":
            from etp.formats import kernels_apart

            for table in self.apart_tables:
                kernels_apart.quantize_mxfp8(table)
            return
        for weight, *copies in self.weights():
            for copy, quantized in zip(copies, quantize_mxfp8(weight), strict=True):
                copy.copy_(quantized)

    @cached_property
    def kind(self) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer, MXFP8Tensor

        # As Transformer Engine quantizes a weight for the forward pass: by rows.
        quantizer = MXFP8Quantizer(DType.kFloat8E4M3, rowwise=True, columnwise=False)
        return MXFP8Tensor, {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "with_gemm_swizzled_scales": False}
