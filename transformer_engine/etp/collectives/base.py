"""What the engine asks of the transports that move its bytes."""
# ruff: noqa: B027  # what a transport need not do, it does not do

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from etp.stack import Stack
from etp.streams import InFlight


class Transport(ABC):
    """Collectives over one shard group. Every rank calls the same methods in the same order.

    Collectives enqueue on the calling stream (see [Note: lanes] in ``etp/streams.py``) and raise
    :class:`etp.errors.EtpCommunicationError`, naming ``label``, if a peer fails or the time-out passes. Whatever is
    not abstract fits a transport that needs nothing of the kind.
    """

    publishes: ClassVar[bool] = False
    """Whether gathers read published copies rather than the shards themselves."""
    pairs: ClassVar[bool] = False
    """Whether it can tell apart what other code starts over its group, before any of it is sent; see :meth:`pair`."""

    @abstractmethod
    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        """Gather each of a group's weights: ``outputs[i]`` (padded shape) from every rank's ``shards[i]``."""

    @abstractmethod
    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        """Sum each full gradient over ranks, divide it, and store or add this rank's shard of it.

        Args:
            wgrads: gradients of the padded shape; the padding rows are zero.
            sinks: the destination of each gradient, of the shard's shape and any floating-point dtype.
            divisor: the sum is divided by it, in the accumulation dtype.
            label: name of this collective in error messages.
            accumulate: add to the sinks; otherwise overwrite them.
        """

    def pair(self, label: str, members: Sequence[str]) -> InFlight:
        """Come after all ranks have reached the same collective, which the caller starts next. Collective.

        Args:
            label: names it in messages.
            members: the names of what it combines, in order.
        """
        del label, members
        return InFlight()

    # Published copies, and shards that peers read in place -----------------------------------------------------

    def publish(self, groups: Sequence[Stack]) -> None:
        """Let peers see the shards of these groups as they are now. Collective."""

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read this rank's shards in place."""
        return False

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """``[numel]`` zeros, to keep shards in that peers read in place; None if they read none so. Collective."""
        del numel, dtype
        return None

    def finish_reading(self) -> None:
        """Behind the gathers on the calling stream: wait until no peer reads this rank's shards. Collective."""

    def nbytes(self) -> dict[str, int]:
        """Bytes of its own memory by purpose; those of ``shards_in_place`` are the shards themselves."""
        return {}

    # The order of collectives, where they pair with whatever the peers start next: etp/collectives/order.py ----

    def record(self, label: str) -> None:
        """Note that a collective is started now."""

    @property
    def has_order_to_compare(self) -> bool:
        """Whether there were collectives since the last exchange."""
        return False

    def exchange_order(self, whose: str = "") -> InFlight:
        """Tell the peers the order of this rank's collectives since the last exchange, and whose. Collective.

        Without streams the answer is there at once, and verified.
        """
        del whose
        return InFlight()

    def verify_order(self) -> None:
        """Raise PeerMismatchError on all ranks if the orders that were exchanged last differ."""

    # Lost peers, and CUDA graphs -------------------------------------------------------------------------------

    def watch(self, label: str) -> None:
        """Watch that work enqueued so far on the calling stream, up to the collective ``label``, ends in time."""

    def change_mode(self, *, capturing: bool) -> None:
        """A capture into a CUDA graph begins, with the device idle, or has ended."""

    def watch_replays(self) -> None:
        """Watch that work enqueued so far on the calling stream, graph replays included, ends within the timeout."""
