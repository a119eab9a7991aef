"""The interface of the formats in which weights are gathered.

Without a format, a weight is gathered as it is stored. With one, each rank quantizes its shards once for each version
of the weights, gathers move the quantized bytes, and a consumer gets a quantized tensor around them. The stored shards
remain the parameters: optimizers, checkpoints and gradients do not depend on formats.

[Note: phases] Ranks must agree on a few numbers, such as scales. So a version is quantized in phases: every rank
*measures* its shards of all weights, one collective exchanges the numbers of all weights, and every rank *casts* with
what all ranks now know. A gather then moves only bytes.

[Note: apart] A GEMM reads a weight by rows in the forward pass and by columns in the backward pass. In FP8 with a scale
per square block or per weight, columns are derived from gathered rows. In MXFP8 and NVFP4, a block may be a piece of a
row, or of a column, and the two are quantized *apart* (separately): both are published, and a gather moves the one that
its visit reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from etp.layout import ShardLayout
from etp.stack import Stack

_MATRIX = 2


class WeightFormat(ABC):
    """How weights are quantized. Formats that give the same bytes are equal, and hash alike."""

    name: ClassVar[str]
    """Its name in messages."""
    row_alignment: ClassVar[int]
    """The rows of a shard are a multiple of this, so that a quantized shard is the shard of the quantized weight."""
    apart: ClassVar[bool] = False
    """Whether rows and columns are gathered separately; see [Note: apart]."""

    @abstractmethod
    def quantization(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> Quantization:
        """Make the buffers for quantized copies of these shards.

        Args:
            shards: this rank's shards of each weight group, all on one device.
            layouts: how the weights of each group are cut.
            memory: one-dimensional memory for the copies, of as many bytes as :meth:`copied` gives for all shards
                together; None allocates it.
        """

    def gathered_shape(self, layout: ShardLayout) -> tuple[int, ...]:
        """Shape of the byte array that a gather of one weight fills."""
        return layout.padded_shape

    def copied_parts(self, layout: ShardLayout) -> Sequence[tuple[int, ...]]:
        """Shapes of the byte arrays that the quantized copy of one shard consists of."""
        return (layout.shard_shape,)

    def copied(self, layout: ShardLayout) -> int:
        """Bytes that the quantized copy of one shard takes."""
        return sum(map(math.prod, self.copied_parts(layout)))

    def obstacle(self, layout: ShardLayout) -> str:
        """Why weights that are cut like this cannot be gathered in the format; empty if they can."""
        if len(layout.shape) != _MATRIX:
            return f"{self.name}, but has the shape {layout.shape}: only matrices can be quantized"
        if layout.shard_rows % self.row_alignment:
            return (
                f"{self.name}, but it is cut into shards of {layout.shard_rows} rows, which are not multiples of "
                f"{self.row_alignment}: pass pad_for_alignment={self.row_alignment} in etp.EtpConfig (in Megatron, "
                f"--etp-pad-for-alignment {self.row_alignment})"
            )
        return ""


class Quantization(ABC):
    """Quantized copies of one rank's shards of some weight groups, all of one process group.

    Attributes:
        copies: for each group, the quantized shards, whose addresses never change; :meth:`cast` completes them. If rows
            and columns are quantized apart, the data of the rows.
    """

    copies: Sequence[Stack]

    def published(self, index: int) -> Sequence[Stack]:
        """All that ranks publish of group ``index``."""
        return (self.copies[index],)

    def moved(self, index: int, gathered: Stack, *, columns: bool) -> Sequence[tuple[Stack, Stack]]:
        """What a gather of group ``index`` moves: for each part, where it lands, and this rank's copies.

        Args:
            index: the group's place among those of the quantization.
            gathered: the buffers of the gather.
            columns: whether columns are gathered rather than rows; only where the two are quantized apart.
        """
        del columns
        return ((gathered, self.copies[index]),)

    @abstractmethod
    def measure(self) -> torch.Tensor:
        """Read the shards. Returns the numbers that this rank contributes, fp32 ``[n]``, in memory that is reused.

        If ranks need to agree on nothing, ``n`` is 0, and there is no collective.
        """

    @abstractmethod
    def cast(self, everyone: torch.Tensor) -> None:
        """Complete the copies, given the numbers of all ranks, ``[ranks, n]`` in the order of the process group."""

    @abstractmethod
    def assemble(self, index: int, gathered: Stack, trained: Sequence[bool], *, transposed: bool) -> list[torch.Tensor]:
        """The weights of group ``index`` as Transformer Engine's quantized tensors, of logical shape and nominal dtype.

        Args:
            index: the group's place among those of the quantization.
            gathered: the bytes of each weight, of :meth:`WeightFormat.gathered_shape`.
            trained: ``requires_grad`` of each weight.
            transposed: whether they are for the GEMM of the input's gradient, which reads columns.

        Returns:
            around views of ``gathered`` where the GEMM reads what was gathered, otherwise around new memory: columns
            that are derived from rows, for example.
        """

    def release(self) -> None:  # noqa: B027 - most formats of tests have nothing to free
        """Free the new memory of the tensors that :meth:`assemble` returned last: their GEMMs have been enqueued."""
