"""FP8 with one scale for each weight: Transformer Engine's ``Float8CurrentScaling``.

Ranks agree on the largest magnitude of each weight, of which each has seen a shard. Columns, which the backward pass
reads on Hopper, are exact transposes of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from etp.formats.base import Quantization, WeightFormat
from etp.formats.fp8 import Float8Quantization, scale_of, to_e4m3
from etp.layout import ShardLayout
from etp.stack import Stack

if TYPE_CHECKING:
    from etp.formats.kernels import TileTable

_SCALE_ROW = 4


@dataclass(frozen=True)
class Float8PerTensor(WeightFormat):
    """See the module's docstring.

    Attributes:
        power_of_two: whether scales are powers of two.
        epsilon: smaller magnitudes are raised to this before a scale is computed.
    """

    name: ClassVar[str] = "tensor-scaled FP8"
    row_alignment: ClassVar[int] = 1

    power_of_two: bool = False
    epsilon: float = 0.0

    def quantization(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> Quantization:
        """See :class:`etp.formats.base.WeightFormat`."""
        return _TensorQuantization(self, shards, layouts, memory)


class _TensorQuantization(Float8Quantization):
    """Quantized shards, and a scale and its inverse for each weight."""

    def __init__(
        self,
        format_: Float8PerTensor,
        shards: Sequence[Stack],
        layouts: Sequence[ShardLayout],
        memory: torch.Tensor | None,
    ) -> None:
        super().__init__(shards, layouts, memory)
        self._format = format_
        count = self.firsts[-1]
        self._own = torch.zeros(count, device=self.device)
        self._scales = torch.ones(count, device=self.device)
        # One per row, because cuBLAS reads scales at multiples of 16 bytes.
        self._inverse = torch.ones(count, _SCALE_ROW, device=self.device)

    def measure(self) -> torch.Tensor:
        """Return the largest magnitude of each shard."""
        self._own.zero_()
        if self.device.type == "cuda":
            from etp.formats import kernels

            for table in self._tables:
                kernels.largest_magnitudes(table, self._own)
            return self._own
        for number, (weight, _) in enumerate(self.weights()):
            self._own[number] = weight.abs().amax()
        return self._own

    def cast(self, everyone: torch.Tensor) -> None:
        """Cast the shards with the scales of whole weights."""
        options: dict[str, Any] = {"power_of_two": self._format.power_of_two, "epsilon": self._format.epsilon}
        self._scales.copy_(scale_of(everyone.amax(dim=0), **options))
        self._inverse[:, 0] = self._scales.reciprocal()
        if self.device.type == "cuda":
            from etp.formats import kernels

            for table in self._tables:
                kernels.cast(table, self._scales)
            return
        for number, (weight, copy) in enumerate(self.weights()):
            copy.copy_(to_e4m3(weight, self._scales[number]))

    @cached_property
    def _tables(self) -> list[TileTable]:
        count = self.firsts[-1]
        return self.tables(range(count), [(0, 0)] * count)

    def assemble(
        self, index: int, gathered: Stack, dtype: torch.dtype, trained: Sequence[bool], *, transposed: bool
    ) -> list[torch.Tensor]:
        """See :class:`etp.formats.base.Quantization`."""
        from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

        # Blackwell's GEMMs read rows in the backward pass too.
        transposed = transposed and not is_non_tn_fp8_gemm_supported()
        make = partial(self._tensor, self.layouts[index].shape, dtype, transposed)
        weights = self.tensors(index, gathered, trained, transposed=transposed, make=make)
        data = self.transposed(index, gathered) if transposed else self.rows(index, gathered)
        for weight, bytes_ in zip(weights, data, strict=True):
            weight._data, weight._transpose = (None, bytes_) if transposed else (bytes_, None)
            weight._transpose_invalid = not transposed
        return weights

    def _tensor(
        self, shape: Sequence[int], dtype: torch.dtype, transposed: bool, number: int, requires_grad: bool
    ) -> torch.Tensor:
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

        # Empty until a visit sets the data; says whether the tensor has rows or columns.
        nothing = self._inverse.new_empty(0, dtype=torch.uint8)
        tensor: torch.Tensor = Float8Tensor(
            shape=shape,
            dtype=dtype,
            device=self.device,
            requires_grad=requires_grad,
            data=None if transposed else nothing,
            data_transpose=nothing if transposed else None,
            fp8_scale_inv=self._inverse[number, :1],
            fp8_dtype=self._quantizer.dtype,
            quantizer=self._quantizer,
        )
        return tensor

    @cached_property
    def _quantizer(self) -> Any:
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        # As Transformer Engine quantizes a weight for the forward pass: by rows.
        return Float8CurrentScalingQuantizer(
            DType.kFloat8E4M3,
            self.device,
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=self._format.power_of_two,
            amax_epsilon=self._format.epsilon,
        )
