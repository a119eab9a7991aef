"""The unit of gathering and reducing: one weight, or the experts of one grouped layer together.

[Note: state machines] Each group has two, checked at every step:

    gather: NONE -> ISSUED (collective started) -> READY (its result is ordered) -> NONE (handed to a consumer)
    reduce: NONE -> ISSUED (collective started) -> READY (result ordered)        -> NONE (published, buffer free)

A gathered weight stays in its slot after it was handed out, and may be handed out again without a gather as long
as no other group has claimed the slot and the shard has not changed: see :meth:`WeightGroup.holds`. A gather that fails
to start or to finish returns to NONE, and its slot is void.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from etp.cache import BufferCache, BufferSpec, Slot, Ticket
from etp.collectives.base import Transport
from etp.errors import EtpStateError
from etp.layout import ShardLayout
from etp.streams import Lane, Ready


class GatherState(Enum):
    """State of the gather whose result is handed out next."""

    NONE = "none"
    ISSUED = "issued"
    READY = "ready"


class ReduceState(Enum):
    """State of the gradient reduction in flight."""

    NONE = "none"
    ISSUED = "issued"
    READY = "ready"


_SUCCESSOR = {
    GatherState.NONE: GatherState.ISSUED,
    GatherState.ISSUED: GatherState.READY,
    GatherState.READY: GatherState.NONE,
    ReduceState.NONE: ReduceState.ISSUED,
    ReduceState.ISSUED: ReduceState.READY,
    ReduceState.READY: ReduceState.NONE,
}


class Shard(Protocol):
    """What a group needs from its parameters (:class:`etp.param.ETPShardedParam`)."""

    fqn: str
    requires_grad: bool

    @property
    def layout(self) -> ShardLayout:
        """How the weight is cut."""

    def local_shard(self) -> torch.Tensor:
        """The shard as a plain contiguous tensor, sharing storage and version counter."""

    def content_version(self) -> tuple[int, int]:
        """Changes when the shard changes in a way that PyTorch counts, or is bound to other storage."""

    def placement(self) -> tuple[torch.dtype, torch.device]:
        """The shard's dtype and device."""

    def join_group(self, group: WeightGroup, index: int) -> None:
        """Record the group that this shard is gathered with, and its index in it."""

    def watch_uses(self, done: Callable[[torch.Tensor | None], torch.Tensor | None]) -> RemovableHandle:
        """Call ``done`` whenever a backward pass has differentiated all uses of this shard in its graph.

        It gets the gradient that autograd brings itself, or None, and returns what takes its place, or None.
        """

    def watch_accumulation(self, done: Callable[[], None]) -> RemovableHandle:
        """Call ``done`` whenever autograd itself has accumulated a gradient of this shard."""

    def run_reduce_hooks(self) -> None:
        """Run the hooks that wait for this shard's complete gradient."""


class WeightGroup:
    """Weights that one collective gathers and one collective reduces.

    Args:
        shards: this rank's shards, in the order in which the consumer wants the weights.
        process_group: the ranks that hold the shards.
    """

    def __init__(self, shards: Sequence[Shard], process_group: dist.ProcessGroup) -> None:
        if not shards:
            raise ValueError("a weight group needs at least one shard")
        self.shards = list(shards)
        self.process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.gather_state = GatherState.NONE
        self.reduce_state = ReduceState.NONE
        self.issued_in_pass = -1
        """Number of the pass in which the latest gather was started."""
        self.used_more_than_once = False
        """Whether some forward pass used it twice, so that one backward pass reduces it twice."""
        self.before_gather: list[Callable[[], None]] = []
        """Called before the shards are read, e.g. to finish an asynchronous update of them."""
        self._slot: Slot | None = None
        self._cache: BufferCache | None = None
        self._tickets: dict[BufferCache, Ticket] = {}
        self._ready: Ready | None = None
        self._generation = -1
        self._gathered_version: tuple[int, ...] = ()
        self._specs: tuple[BufferSpec, ...] = ()
        self._nbytes = 0
        self._named, self._name = "", ""
        for index, shard in enumerate(self.shards):
            shard.join_group(self, index)

    @property
    def name(self) -> str:
        """The first weight's name, and the number of further weights."""
        first = self.shards[0].fqn
        if self._named != first:
            more = f" (+{len(self.shards) - 1})" if len(self.shards) > 1 else ""
            self._named, self._name = first, f"{first}{more}"
        return self._name

    @property
    def has_slot(self) -> bool:
        """Whether a cache is attached in the current mode (inside or outside of a CUDA graph)."""
        return self._slot is not None

    @property
    def slot(self) -> Slot:
        """Where this group's gathers land."""
        if self._slot is None:
            raise EtpStateError(f"{self.name} has no gather buffer yet; attach a cache first")
        return self._slot

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered weights, padding included."""
        return self._nbytes if self._specs else sum(spec.nbytes for spec in self.specs)

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        """Buffers that a gather fills; :meth:`attach` brings them up to date after a change of dtype or device."""
        if not self._specs:
            dtype, device = self.shards[0].placement()
            self._specs = tuple(BufferSpec(shard.layout.padded_shape, dtype, device) for shard in self.shards)
            self._nbytes = sum(spec.nbytes for spec in self._specs)
        return self._specs

    def attach(self, cache: BufferCache) -> None:
        """Use the group's ticket of ``cache``, reserving one if there is none or if dtype or device have changed."""
        (dtype, device), first = self.shards[0].placement(), self.specs[0]
        if first.dtype != dtype or first.device != device:
            self._specs = ()
            self.detach()
        if self._cache is cache and self._slot is not None:
            return
        self.abandon_gather()
        if cache not in self._tickets:
            self._tickets[cache] = cache.reserve(self.specs)
        self._cache, self._slot = cache, cache.get(self._tickets[cache])

    def detach(self) -> None:
        """Return all tickets."""
        self.abandon_gather()
        for cache, ticket in self._tickets.items():
            cache.unreserve(ticket)
        self._tickets.clear()
        self._cache = self._slot = None

    def change_mode(self) -> None:
        """A CUDA graph capture begins, with the device idle, or has ended: forget what is in flight or held."""
        self._ready = None
        self._generation, self._gathered_version = -1, ()
        self._cache = self._slot = None
        self.gather_state, self.reduce_state = GatherState.NONE, ReduceState.NONE

    @property
    def pending(self) -> bool:
        """Whether a gather was started whose result has not been taken yet."""
        return self.gather_state is not GatherState.NONE

    def holds(self, epoch: int) -> bool:
        """Whether the slot has (or is receiving) these weights as they are now.

        Args:
            epoch: the runtime's count of announced weight changes.
        """
        slot = self._slot
        return (
            slot is not None
            and slot.generation == self._generation
            and slot.owner == self.name
            and self._gathered_version == (epoch, *self.weights_version())
        )

    def issue_gather(
        self, transport: Transport, lane: Lane, *, pass_number: int, epoch: int, waits: Sequence[Any] | None
    ) -> None:
        """Start gathering into the slot, which voids its previous content.

        Args:
            transport: moves the shards.
            lane: where the gather runs.
            pass_number: the runtime's count of passes.
            epoch: the runtime's count of announced weight changes.
            waits: see :meth:`etp.streams.Lane.start`.
        """
        self._set_gather_state(GatherState.ISSUED)
        slot = self.slot
        slot.tenant = self
        try:
            self._generation = slot.claim(self.name)
            shards = [shard.local_shard() for shard in self.shards]
            self._gathered_version = (epoch, *self.weights_version())
            self.issued_in_pass = pass_number
            label = f"all-gather of {self.name}"
            self._ready = lane.start(lambda: transport.all_gather(slot.buffers, shards, label), waits=waits)
        except BaseException:
            self._gather_failed()
            raise

    def weights_version(self) -> tuple[int, ...]:
        """Changes when a shard changes in a way that PyTorch counts, or is bound to other storage."""
        if len(self.shards) == 1:
            return self.shards[0].content_version()
        return tuple(value for shard in self.shards for value in shard.content_version())

    def read_until_here(self, lane: Lane) -> None:
        """Record that the consumer of the weights has enqueued its work on them by now."""
        slot = self._slot
        if slot is not None and slot.generation == self._generation and slot.last_read is None:
            slot.last_read = lane.mark(slot.reader_stream)

    def take(self, lane: Lane) -> list[torch.Tensor]:
        """Hand out the gathered weights, ordered after the gather on the current stream.

        Returns:
            the weights in the group's order: views of the slot, of logical shape, with the shards' ``requires_grad``.

        Raises:
            StaleWeightError: if the slot was claimed by another group since the gather.
        """
        reader = lane.current_stream()
        if self._ready is not None:
            self._join(self._ready, reader)
        if self.gather_state is GatherState.ISSUED:
            self._set_gather_state(GatherState.READY)
        slot = self.slot
        slot.check(self.name, self._generation)
        if self.gather_state is GatherState.READY:
            self._set_gather_state(GatherState.NONE)
        slot.tenant = None
        slot.reader_stream = reader
        slot.last_read = None
        return [
            _handed_out(buffer, shard.layout, trained)
            for shard, buffer, trained in zip(self.shards, slot.buffers, self.trained(), strict=True)
        ]

    def trained(self) -> list[bool]:
        """For each weight, whether it is trained."""
        # Not through __torch_function__, which would take most of the time.
        with torch._C.DisableTorchFunctionSubclass():
            return [shard.requires_grad for shard in self.shards]

    def abandon_gather(self) -> None:
        """Wait for a gather that was not taken, and drop it; its slot is free afterwards."""
        if self._ready is not None:
            ready = self._ready
            self._join(ready)
            # The next gather into the slot may be on another lane, which waits only for this event.
            self.slot.last_read = ready.mark()
        if self.gather_state is GatherState.ISSUED:
            self._set_gather_state(GatherState.READY)
        if self.gather_state is GatherState.READY:
            self._set_gather_state(GatherState.NONE)
        if self._slot is not None and self._slot.tenant is self:
            self._slot.tenant = None

    def _join(self, ready: Ready, stream: Any = None) -> None:
        self._ready = None
        try:
            ready.wait(stream)
        except BaseException:
            self._gather_failed()
            raise

    def _gather_failed(self) -> None:
        """Void the slot's content for all readers; the next visit gathers again."""
        self._ready = None
        self._generation, self._gathered_version = -1, ()
        self.gather_state = GatherState.NONE
        if self._slot is not None and self._slot.tenant is self:
            self._slot.tenant = None

    def _set_gather_state(self, state: GatherState) -> None:
        self._check(self.gather_state, state, "gather")
        self.gather_state = state

    def set_reduce_state(self, state: ReduceState) -> None:
        """Advance the reduction's state machine."""
        self._check(self.reduce_state, state, "reduce")
        self.reduce_state = state

    def _check(self, old: GatherState | ReduceState, new: GatherState | ReduceState, machine: str) -> None:
        if _SUCCESSOR[old] is not new:
            raise EtpStateError(
                f"{self.name}: {machine} cannot go from {old.name} to {new.name} (next is {_SUCCESSOR[old].name})"
            )


def _handed_out(buffer: torch.Tensor, layout: ShardLayout, trained: bool) -> torch.Tensor:
    """The logical rows of a gathered weight: a fresh alias, whose ``requires_grad`` does not reach the slot."""
    alias = (buffer if layout.pad_rows == 0 else buffer[: layout.rows]).detach()
    return alias.requires_grad_() if trained else alias
