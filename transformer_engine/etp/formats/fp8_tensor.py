"""FP8 with one scale for each weight: Transformer Engine's ``Float8CurrentScaling``.

Ranks agree on the largest magnitude of each weight, of which each has seen a shard. Transformer Engine transposes the
bytes itself where a backward pass needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
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
        epsilon: the least magnitude that a scale is computed for.
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
        # One in each row: cuBLAS reads scales at multiples of 16 bytes.
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
        return self.tables(range(count), [0] * count)

    def assemble(self, index: int, gathered: Stack, dtype: torch.dtype, trained: Sequence[bool]) -> list[torch.Tensor]:
        """See :class:`etp.formats.base.Quantization`."""
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

        layout, quantizer = self.layouts[index], self._quantizer
        return [
            Float8Tensor(
                shape=layout.shape,
                dtype=dtype,
                device=data.device,
                requires_grad=requires_grad,
                data=data[: layout.rows] if layout.pad_rows else data,
                fp8_scale_inv=self._inverse[number, :1],
                fp8_dtype=quantizer.dtype,
                quantizer=quantizer,
            )
            for number, (data, requires_grad) in enumerate(zip(gathered, trained, strict=True), self.firsts[index])
        ]

    @cached_property
    def _quantizer(self) -> Any:
        from transformer_engine.pytorch.constants import DType
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        # Without columns: Transformer Engine makes them from the rows where a backward pass needs them.
        return Float8CurrentScalingQuantizer(
            DType.kFloat8E4M3,
            self.device,
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=self._format.power_of_two,
            amax_epsilon=self._format.epsilon,
        )
