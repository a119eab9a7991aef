"""The protocol between the engine and what moves its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@runtime_checkable
class PublishingTransport(Protocol):
    """A transport whose gathers read what was published, not the shards themselves."""

    def publish(self, shards: Sequence[torch.Tensor]) -> None:
        """Let peers see these shards as they are now. Collective."""


@runtime_checkable
class InPlaceTransport(Protocol):
    """A publishing transport that can read shards where they lie."""

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read this rank's shards where they lie."""

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to keep shards in. Collective."""

    def finish_reading(self) -> None:
        """Behind the gathers on the calling stream: wait until no peer reads this rank's shards. Collective."""


@runtime_checkable
class GraphableTransport(Protocol):
    """A transport with streams and events of its own, which are not the same inside and outside of a capture."""

    def change_mode(self, *, capturing: bool) -> None:
        """A capture into a CUDA graph begins, with the device idle, or has ended."""

    def watch_replays(self) -> None:
        """Expect what the calling stream was given so far, replays of graphs among it, to end in time."""
