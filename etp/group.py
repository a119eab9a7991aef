"""Weight groups, the units of gathering and reducing: one weight, or all experts of a grouped layer.

[Note: one at a time] A group has at most one gather that was not handed out yet (:attr:`WeightGroup.pending`); starting
a second one raises EtpStateError. It has at most one reduction in flight (:attr:`WeightGroup.reducing`), which is
finished before the next one starts. A gathered weight stays in its slot after it was handed out. It can be handed out
again without a gather until another group claims the slot or the shard changes: see :meth:`WeightGroup.holds`. A gather
that fails to start or to finish voids its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter, methodcaller
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from etp.cache import BufferCache, BufferSpec, Slot
from etp.collectives.base import Route
from etp.errors import EtpStateError
from etp.formats.base import Quantization, WeightFormat
from etp.shard import Shard, needs_grad
from etp.stack import Stack
from etp.streams import InFlight, Lane

# For map(), which runs them in C: a Python call per expert would take longer than the expert's gather.
_VERSION = attrgetter("_version")
_FORMER_VERSIONS = attrgetter("_former_versions")
_DATA = attrgetter("_data")
_ADDRESS = methodcaller("data_ptr")
_HAS_REDUCE_HOOKS = attrgetter("has_reduce_hooks")


class Reading:
    """What a visit reads of a group. Compared by identity: each group has one of either kind.

    Attributes:
        group: whose weights are read.
        columns: whether columns are gathered rather than rows, in a format that quantizes them separately.
    """

    __slots__ = ("columns", "group")

    def __init__(self, group: WeightGroup, *, columns: bool) -> None:
        self.group, self.columns = group, columns


class WeightGroup:
    """Weights that one collective gathers and one collective reduces.

    Args:
        shards: this rank's shards, of one layout, in the order in which the consumer wants the weights.
        process_group: the ranks that hold the shards.

    Attributes:
        layout: how each of the weights is cut.

    Raises:
        ValueError: if there are no shards, or their layouts differ.
    """

    def __init__(self, shards: Sequence[Shard], process_group: dist.ProcessGroup) -> None:
        if not shards:
            raise ValueError("a weight group needs at least one shard")
        self.shards = list(shards)
        self.layout = self.shards[0].layout
        for shard in self.shards:
            if shard.layout != self.layout:
                raise ValueError(
                    f"{shard.fqn} of {shard.layout} cannot be gathered together with {self.shards[0].fqn} of "
                    f"{self.layout}: the weights of a group have one shape"
                )
        self.rename()
        self.process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.pending = False
        """Whether a gather was started whose result has not been handed out yet."""
        self.reducing = False
        """Whether a reduction is in flight."""
        self.issued_in_pass = -1
        """Number of the pass in which the latest gather was started."""
        self.used_more_than_once = False
        """Whether some forward pass used it more than once, so that one backward pass has several gradients for it."""
        self.route: Route | None = None
        """How it communicates (:meth:`etp.routes.Routes.of`); None until that is known for its device."""
        self.observed: tuple[Any, ...] | None = None
        """Stamp, :attr:`format` and :attr:`version` of the last observation, see ``etp/versions.py``; None if none."""
        self.before_gather: list[Callable[[], None]] = []
        """Called before the shards are read, e.g. to finish an asynchronous update of them."""
        self.reduce_hooks: list[Callable[[Shard | None], None]] = []
        """Called whenever a backward pass's gradients have been added to the shards: with the shard if it is one that
        autograd alone has brought a gradient, otherwise with None."""
        self.format: WeightFormat | None = None
        """How its weights are gathered; None: as they are stored."""
        self.format_is_known = False
        """Whether a consumer has asked for :attr:`format`; before, it is a guess."""
        self._quantized: tuple[Quantization, int] | None = None
        self._cache: BufferCache | None = None
        self._slot: Slot | None = None
        self._slots: dict[BufferCache, Slot] = {}
        self.rows, self.columns = Reading(self, columns=False), Reading(self, columns=True)
        """What visits read of it. Columns are visited only in a format that quantizes them separately."""
        self._ready: InFlight | None = None
        self._generation = -1
        self.gathered_columns = False
        """Whether the latest gather was of columns; see :class:`Reading`."""
        self._gathered_version: tuple[Any, ...] = ()
        self.version: tuple[Any, ...] = ()
        """Changes when the version counter of a shard does, or when a shard is bound to other storage. Updated by
        :meth:`read_shards`."""
        self.read_in_pass = -1
        """Number of the pass of the last :meth:`read_shards`."""
        self._trained = self.trained()
        self._spec_of: Stack | None = None
        self._local: Stack | None = None
        self._addresses: tuple[int, ...] = ()
        self.reset_counts()
        for index, shard in enumerate(self.shards):
            shard.join_group(self, index)

    def reset_counts(self) -> None:
        """Count collectives and their bytes from zero; see :class:`etp.traffic.TrafficCounters`."""
        self.gathers = self.gathered_bytes = self.reductions = self.reduced_bytes = 0

    def rename(self) -> None:
        """Take the names of the shards, because one was named or renamed."""
        more = f" (+{len(self.shards) - 1})" if len(self.shards) > 1 else ""
        self.name = f"{self.shards[0].fqn}{more}"
        """The first weight's name, and the number of further weights."""
        self.gather_label = f"all-gather of {self.name}"
        """Names the group's gathers in messages."""
        self.reduce_label = f"reduce-scatter of {self.name}'s gradient"
        """Names the group's reductions in messages."""

    @property
    def slot(self) -> Slot:
        """Where this group's gathers land."""
        return self._slot or self._refuse_without_slot()

    def _refuse_without_slot(self) -> NoReturn:
        raise EtpStateError(f"{self.name} has no gather buffer yet; attach a cache first")

    @cached_property
    def spec(self) -> BufferSpec:
        """The buffers that a gather fills; :meth:`attach` updates it after a change of dtype, device or order."""
        self._spec_of = local = self.local_shards()
        shape, count = self.layout.padded_shape, len(local)
        if self.format is not None:
            return BufferSpec(self.format.gathered_shape(self.layout), torch.uint8, local.device, count)
        # The longest run decides the order: Megatron may spread a layer over two buckets.
        longest = max(local.runs, key=lambda run: run.count)
        return BufferSpec(shape, local.dtype, local.device, count, descending=longest.stride < 0)

    def use_format(self, format_: WeightFormat | None) -> None:
        """Gather the weights in this format from now on; None: as they are stored.

        Raises:
            ValueError: if they cannot be, with the way out.
        """
        obstacle = "" if format_ is None else format_.obstacle(self.layout)
        if obstacle:
            raise ValueError(f"{self.name} is used under a recipe for {obstacle}")
        self.format_is_known = True
        self.guess_format(format_)

    def guess_format(self, format_: WeightFormat | None) -> None:
        """Gather the weights in this format until :meth:`use_format` says otherwise."""
        if format_ != self.format:
            self.abandon_gather()
            self._forget_gather()
            self.format, self._spec_of = format_, None

    def set_quantized(self, quantization: Quantization, index: int) -> None:
        """Gather the copies of group ``index`` of a quantization in :attr:`format`."""
        self._quantized = quantization, index

    def forget_quantized(self, quantization: Quantization) -> None:
        """Keep no copy of a former quantization alive, because the weights have left its format."""
        if self._quantized is not None and self._quantized[0] is quantization:
            self._quantized = None
            if self.observed is not None and self.observed[1] != self.format:
                # Should they return to it, they must be published again.
                self.observed = None

    def published(self) -> Sequence[Stack]:
        """What this rank publishes: its shards, or all parts of their quantized copies.

        Raises:
            EtpStateError: if the group has a format and its shards were never quantized.
        """
        if self.format is None:
            return (self.local_shards(),)
        quantization, index = self._copies()
        return quantization.published(index)

    def _copies(self) -> tuple[Quantization, int]:
        if self._quantized is None:
            raise EtpStateError(f"{self.name} is gathered before its shards were quantized")
        return self._quantized

    def read_shards(self, pass_number: int) -> None:
        """Update :attr:`version`, and drop :meth:`local_shards` if the storage of a shard has changed.

        Collects whatever a visit needs of the shards themselves, because each look at them costs host time. One shard
        is read without the maps that are fast for many.
        """
        shards = self.shards
        with torch._C.DisableTorchFunctionSubclass():
            if len(shards) == 1:
                shard = shards[0]
                counted = shard._version + shard._former_versions
                if shard._data is not None:
                    counted += shard._data._version
                addresses: tuple[int, ...] = (shard.data_ptr(),)
                self._trained = (needs_grad(shard),)
            else:
                aliases = [data for data in map(_DATA, shards) if data is not None]
                counted = sum(map(_VERSION, shards)) + sum(map(_FORMER_VERSIONS, shards)) + sum(map(_VERSION, aliases))
                addresses = tuple(map(_ADDRESS, shards))
                self._trained = tuple(map(needs_grad, shards))
        self.version, self.read_in_pass = (counted, addresses), pass_number
        if self._local is not None and self._addresses != addresses:
            self._local = None

    @property
    def is_published(self) -> bool:
        """Whether gathers read published copies rather than the shards themselves; its route must be known."""
        return self.format is not None or (self.route is not None and self.route.transport.publishes)

    def is_observed(self, stamp: tuple[int, int]) -> bool:
        """Whether the shards were observed as they are now, with an observation of this stamp."""
        return self.observed == (stamp, self.format, self.version)

    def local_shards(self) -> Stack:
        """This rank's shards, plain, the same object until one has other storage; ValueError if that does not fit."""
        if self._local is None:
            self._local = Stack([shard.checked_memory() for shard in self.shards])
            self._addresses = tuple(tensor.data_ptr() for tensor in self._local)
        return self._local

    def attach(self, cache: BufferCache) -> Slot:
        """Use the group's slot of ``cache``, reserving one if there is none or if :attr:`spec` has changed.

        Returns:
            the slot.
        """
        slot = self._slot
        if slot is not None and self._cache is cache and self._local is not None and self._spec_of is self._local:
            return slot
        if self._spec_of is not self.local_shards():
            former = self.__dict__.pop("spec", None)
            if former is not None and former != self.spec:
                self.detach()
                self.route = None
        if self._cache is not cache or self._slot is None:
            self.abandon_gather()
            if cache not in self._slots:
                self._slots[cache] = cache.reserve(self.spec)
            self._cache, self._slot = cache, self._slots[cache]
        return self._slot

    def detach(self) -> None:
        """Give all slots back."""
        self.abandon_gather()
        for cache, slot in self._slots.items():
            cache.unreserve(slot)
        self._slots.clear()
        self._cache = self._slot = None

    def change_mode(self) -> None:
        """Forget what is in flight or held: a CUDA graph capture begins, with the device idle, or has ended."""
        self._ready = None
        self._generation, self._gathered_version = -1, ()
        self._cache = self._slot = None
        self.pending = self.reducing = False

    def holds(self, epoch: int, *, gathered_in: int | None, columns: bool = False) -> bool:
        """Whether the slot has (or is receiving) these weights as they are now.

        Args:
            epoch: the runtime's count of announced weight changes.
            gathered_in: number of a pass: only a gather that it started and that is still pending counts. None: any
                gather counts.
            columns: see :class:`Reading`.
        """
        if gathered_in is not None and not (self.pending and self.issued_in_pass == gathered_in):
            return False
        slot = self._slot
        return (
            slot is not None
            and slot.generation == self._generation
            and slot.owner is self
            and self.gathered_columns is columns
            and self._gathered_version == (epoch, self.version)
        )

    def issue_gather(
        self, route: Route, *, pass_number: int, epoch: int, waits: Sequence[Any] | None, columns: bool = False
    ) -> None:
        """Start gathering into the slot, which voids its previous content.

        Args:
            route: moves the shards.
            pass_number: the runtime's count of passes.
            epoch: the runtime's count of announced weight changes.
            waits: see :meth:`etp.streams.Lane.start`.
            columns: see :class:`Reading`.

        Raises:
            EtpStateError: if a gather is pending.
        """
        if self.pending:
            raise EtpStateError(f"{self.name} is being gathered already; its last gather was not handed out")
        slot = self._slot or self._refuse_without_slot()
        self.pending = True
        try:
            self._generation = slot.claim(self)
            self._gathered_version = (epoch, self.version)
            self.gathered_columns = columns
            self.issued_in_pass = pass_number
            gather: Callable[[], InFlight]
            if self.format is None:
                sources = self.local_shards() if self._local is None else self._local
                gather = partial(route.transport.all_gather, slot.buffers, sources, self.gather_label)
            else:
                quantization, index = self._quantized or self._copies()
                if self.format.apart:
                    parts = quantization.moved(index, slot.buffers, columns=columns)
                    gather = partial(route.transport.all_gather_parts, parts, self.gather_label)
                else:
                    copies = quantization.copies[index]
                    gather = partial(route.transport.all_gather, slot.buffers, copies, self.gather_label)
            self._ready = route.gather.start(gather, waits=waits, label=self.gather_label)
            self.gathers += 1
            self.gathered_bytes += self.spec.nbytes
        except BaseException:
            self._forget_gather()
            raise

    def read_until_here(self, lane: Lane) -> None:
        """Record that the consumer of the weights has enqueued all its work on them."""
        slot = self._slot
        if slot is not None and slot.generation == self._generation:
            for stream, event in slot.reads.items():
                if event is None:
                    slot.reads[stream] = slot.marks[stream] = lane.mark(stream, slot.marks.get(stream))

    def take(self, lane: Lane, *, transposed: bool = False) -> list[torch.Tensor]:
        """Hand out the gathered weights, ordered after the gather on the current stream.

        Args:
            lane: where they were gathered.
            transposed: in a format, whether the consumer reads columns.

        Returns:
            the weights in the group's order, of logical shape, with the ``requires_grad`` that :meth:`read_shards` has
            found: views of the slot or, in a format, quantized tensors around such views.

        Raises:
            StaleWeightError: if the slot was claimed by another group since the gather.
        """
        reader = lane.current_stream()
        # Needed even if the weights were handed out before: that may have been on another stream.
        if self._ready is not None:
            self._join(self._ready, reader)
        slot = self._slot or self._refuse_without_slot()
        slot.check(self, self._generation)
        if self.pending:
            self.pending = False
            # The gather was ordered after all readers of the previous content.
            slot.reads.clear()
        slot.reads[reader] = None
        if self.format is None:
            return slot.weights(self.layout.rows, self._trained)
        quantization, index = self._quantized or self._copies()
        return quantization.assemble(index, slot.buffers, self._trained, transposed=transposed)

    def release_derived(self) -> None:
        """Free what a format has derived from the gathered weights: the GEMMs that read them have been enqueued."""
        if self._quantized is not None:
            self._quantized[0].release()

    def trained(self) -> tuple[bool, ...]:
        """For each weight, whether it is trained."""
        # Not through __torch_function__, which would take most of the time.
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(map(needs_grad, self.shards))

    def abandon_gather(self) -> None:
        """Wait for a gather that was not handed out, and drop it. Its slot is free afterwards."""
        if self._ready is not None and self.pending:
            # The next gather into the slot may be on another lane, which waits only for this stream.
            self.slot.reads = {self._join(self._ready): None}
        self.pending = False

    def _join(self, ready: InFlight, stream: Any = None) -> Any:
        try:
            return ready.wait(stream)
        except BaseException:
            self._forget_gather()
            raise

    def _forget_gather(self) -> None:
        """Void the slot's content for all readers; the next visit gathers again."""
        self._ready = None
        self._generation, self._gathered_version = -1, ()
        self.pending = False

    def run_reduce_hooks(self) -> None:
        """Run the hooks of the group and of its trained shards: the gradients of one backward pass are complete."""
        for hook in self.reduce_hooks:
            hook(None)
        for shard in filter(_HAS_REDUCE_HOOKS, self.shards):
            if shard.requires_grad:
                shard.run_reduce_hooks()

    def run_hooks_of(self, shard: Shard) -> None:
        """Run the hooks of one shard, to which autograd has added all of a backward pass's gradient."""
        for hook in self.reduce_hooks:
            hook(shard)
        shard.run_reduce_hooks()
