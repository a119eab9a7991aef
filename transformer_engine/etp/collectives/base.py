"""The protocol between the engine and what moves its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from etp.streams import InFlight


@dataclass(frozen=True)
class GradSink:
    """Where one reduced gradient shard goes.

    Attributes:
        tensor: of the shard's shape, any floating dtype.
        accumulate: add to ``tensor``; otherwise overwrite it.
    """

    tensor: torch.Tensor
    accumulate: bool


class Transport(Protocol):
    """Collectives over one shard group. Every rank calls the same methods in the same order.

    Methods enqueue on the calling stream (see [Note: lanes] in ``etp/streams.py``) and raise
    :class:`etp.errors.EtpCommunicationError`, naming ``label``, if a peer fails or the time-out passes.
    """

    def all_gather(self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], label: str) -> InFlight:
        """Gather each of a group's weights: ``outputs[i]`` (padded shape) from every rank's ``shards[i]``."""

    def reduce_scatter(
        self, wgrads: Sequence[torch.Tensor], sinks: Sequence[GradSink], divisor: int, label: str
    ) -> InFlight:
        """Sum each full gradient over ranks, divide it, and put this rank's shard of it into its sink.

        Args:
            wgrads: gradients of the padded shape, contiguous; the padding rows are zero.
            sinks: one for each gradient.
            divisor: what the sum is divided by, in the accumulation dtype.
            label: what the message of a failure calls this collective.
        """
