"""FP8 with one scale for each weight: Transformer Engine's ``Float8CurrentScaling``.

Ranks agree on the largest magnitude of each weight, of which each has seen a shard. Columns, which the backward pass
reads on Hopper, are exact transposes of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from etp.formats.base import Quantization, WeightFormat
from etp.formats.fp8 import data_of, scale_of, to_e4m3
from etp.formats.quantized import QuantizedShards
from etp.layout import ShardLayout
from etp.stack import Stack


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


class _TensorQuantization(QuantizedShards[Float8PerTensor]):
    """Quantized shards, and a scale and its inverse for each weight."""

    @cached_property
    def _scales(self) -> torch.Tensor:
        return torch.ones(self.firsts[-1], device=self.device)

    def measure(self) -> torch.Tensor:
        """Return the largest magnitude of each shard."""
        return self.largest_magnitudes()

    def cast(self, everyone: torch.Tensor) -> None:
        """Cast the shards with the scales of whole weights."""
        options: dict[str, Any] = {"power_of_two": self.format.power_of_two, "epsilon": self.format.epsilon}
        self._scales.copy_(scale_of(everyone.amax(dim=0), **options))
        self.numbers[:, 0] = self._scales.reciprocal()
        if self.device.type == "cuda":
            from etp.formats import kernels

            for table in self.whole_tables:
                kernels.cast(table, self._scales)
            return
        for number, (weight, copy) in enumerate(self.weights()):
            copy.copy_(to_e4m3(weight, self._scales[number]))

    def assemble(self, index: int, gathered: Stack, trained: Sequence[bool], *, transposed: bool) -> list[torch.Tensor]:
        """See :class:`etp.formats.base.Quantization`."""
        from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

        # Blackwell's GEMMs read rows in the backward pass too.
        transposed = transposed and not is_non_tn_fp8_gemm_supported()
        return super().assemble(index, gathered, trained, transposed=transposed)

    def arrays(self, index: int, gathered: Stack, *, columns: bool) -> tuple[list[Sequence[torch.Tensor]], bool]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        data, is_new = data_of(gathered, self.layouts[index].rows, columns=columns)
        return [data, self.numbers_of(index)], is_new

    def fill(self, tensors: Iterable[Any], arrays: Iterable[Iterable[Any]], *, columns: bool) -> None:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        data, scales, *_ = arrays
        for tensor, each, scale in zip(tensors, data, scales, strict=False):
            tensor._data, tensor._transpose = (None, each) if columns else (each, None)
            tensor._scale_inv, tensor._transpose_invalid = scale, not columns

    @cached_property
    def kind(self) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor

        # As Transformer Engine quantizes a weight for the forward pass: by rows.
        quantizer = Float8CurrentScalingQuantizer(
            DType.kFloat8E4M3,
            self.device,
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=self.format.power_of_two,
            amax_epsilon=self.format.epsilon,
        )
        return Float8Tensor, {"fp8_dtype": quantizer.dtype, "quantizer": quantizer}

    def empty(self, *, columns: bool) -> dict[str, Any]:
        """See :class:`etp.formats.quantized.QuantizedShards`."""
        found = super().empty(columns=columns)
        return {
            "data": found["rowwise_data"],
            "data_transpose": found["columnwise_data"],
            "fp8_scale_inv": self._scales[:1],
        }
