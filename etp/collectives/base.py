"""The interface of the transports that move the engine's bytes, and the route that a weight group takes."""
# ruff: noqa: B027  # optional methods do nothing

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from etp.collectives.order import CollectiveOrder
from etp.collectives.watchdog import Watchdog
from etp.stack import Stack
from etp.streams import InFlight, Lane, Together


class Transport(ABC):
    """Collectives over one shard group. Every rank calls the same methods in the same order.

    Collectives enqueue on the calling stream (see [Note: lanes] in ``etp/streams.py``) and raise
    :class:`etp.errors.EtpCommunicationError`, naming ``label``, if a peer fails or the timeout passes. Methods that are
    not abstract are optional.
    """

    publishes: ClassVar[bool] = False
    """Whether gathers read published copies rather than the shards themselves."""
    pairs: ClassVar[bool] = False
    """Whether :meth:`pair` detects ranks that start different collectives, before any data is sent."""
    order: CollectiveOrder | None = None
    """The order of its collectives, which the ranks compare; None where that is not needed."""
    watchdog: Watchdog | None = None
    """Watches what waits for peers on a GPU; None if nothing needs to be watched, or another watches."""
    capturing = False
    """Whether a CUDA graph is being captured."""
    captured = False
    """Whether one is, or has been: its replays refer to this transport's memory, and are not visible here."""

    @abstractmethod
    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        """Gather each of a group's weights: ``outputs[i]`` (padded shape) from every rank's ``shards[i]``."""

    def all_gather_parts(self, parts: Sequence[tuple[Stack, Stack]], label: str) -> InFlight:
        """Gather weights that consist of several parts, each an ``outputs`` and a ``shards`` of :meth:`all_gather`."""
        return Together([self.all_gather(outputs, shards, label) for outputs, shards in parts])

    def stage(self, outputs: Stack) -> Stack:
        """Memory for shards that the calling stream writes and the next gather, into ``outputs``, reads. Collective.

        Only a transport that is used within hosts needs it; see ``etp/collectives/hierarchical.py``.

        Returns:
            a shard for each of ``outputs``, in one block.
        """
        raise NotImplementedError(f"{type(self).__name__} has no memory for the shards of {len(outputs)} weights")

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

    def exchange(self, numbers: torch.Tensor, label: str) -> torch.Tensor:
        """All-gather a few numbers, ``[n]``, into ``[ranks, n]``, newly allocated. Collective.

        The calling stream is ordered after it; without streams, the call blocks. Needed for weights in a format.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot exchange the {len(numbers)} numbers of the {label}")

    def pair(self, label: str, members: Sequence[str]) -> InFlight:
        """Wait until all ranks have reached the same collective, which the caller starts next. Collective.

        Args:
            label: names it in messages.
            members: the names of what it combines, in order.
        """
        del label, members
        return InFlight()

    # Published copies, and shards that peers read in place -----------------------------------------------------

    def publish(self, groups: Sequence[Stack], write: Callable[[], None] | None = None) -> None:
        """Publish the current shards of these groups to the peers. Collective.

        Args:
            groups: the shards, or their quantized copies.
            write: called once no peer still reads the previous publication; fills in the new copies.
        """
        del groups
        if write is not None:
            write()

    def published_memory(self, numel: int) -> torch.Tensor | None:
        """``[numel]`` bytes for quantized copies that peers read in place; None if they never do. Collective.

        Only ``write`` of :meth:`publish` may change them.
        """
        del numel
        return None

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read this rank's shards in place."""
        return False

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """``[numel]`` zeros, memory for shards that peers read in place; None if they never do. Collective.

        The owner of shards in this memory must call :meth:`etp.EtpRuntime.wait` before changing them.
        """
        del numel, dtype
        return None

    def finish_reading(self) -> None:
        """After the gathers on the calling stream, wait until no peer reads this rank's shards. Collective."""

    def nbytes(self) -> dict[str, int]:
        """Bytes of its own memory by purpose; those of ``shards_in_place`` are the shards themselves."""
        return {}

    # Lost peers, and CUDA graphs -------------------------------------------------------------------------------

    def expect(self, end: Any, label: str) -> None:
        """Watch that ``end`` happens in time, an event after all waits of the collective ``label`` for peers."""
        # Nothing runs while a graph is captured; watch_replays covers replays.
        if self.watchdog is not None and not self.capturing:
            self.watchdog.expect(end, label)

    def watch(self, label: str) -> None:
        """Watch that work enqueued so far on the calling stream, up to the collective ``label``, ends in time."""
        if self.watchdog is not None:
            self.watchdog.expect_stream(label)

    def change_mode(self, *, capturing: bool) -> None:
        """Change modes: a CUDA graph capture begins, with the device idle, or has ended."""
        self.capturing = capturing
        self.captured |= capturing

    def watch_replays(self) -> None:
        """Watch that work enqueued so far on the calling stream, graph replays included, ends within the timeout."""
        if self.captured:
            self.watch("the replay of a CUDA graph")


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How the groups of one process group on one device communicate.

    Attributes:
        transport: moves their shards.
        gather: where gathers run.
        reduce: where reductions run.
        device: where their weights are.
    """

    transport: Transport
    gather: Lane
    reduce: Lane
    device: torch.device
