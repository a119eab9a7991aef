"""Weight groups, the units of gathering and reducing (one weight, or all experts of a grouped layer), and their shards.

[Note: one at a time] A group has at most one gather that was not handed out yet (:attr:`WeightGroup.pending`) and one
reduction in flight (:attr:`WeightGroup.reducing`); starting a second one raises EtpStateError. A gathered weight stays
in its slot after it was handed out. It can be handed out again without a gather until another group claims the slot or
the shard changes: see :meth:`WeightGroup.holds`. A gather that fails to start or to finish voids its slot.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter, methodcaller
from typing import Any, Protocol, Self, overload

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from etp.cache import BufferCache, BufferSpec, Slot
from etp.collectives.base import Route
from etp.errors import EtpStateError
from etp.formats.base import Quantization, WeightFormat
from etp.layout import ShardLayout
from etp.matrices import GroupMatrices
from etp.refusals import OneOfMany
from etp.scalars import GroupScalars
from etp.shard_copy import Cut
from etp.stack import Stack
from etp.streams import InFlight, Lane, Ready

# For map(), which runs them in C: a Python call per expert would take longer than the expert's gather.
_VERSION = attrgetter("_version")
_FORMER_VERSIONS = attrgetter("_former_versions")
_DATA = attrgetter("_data")
_ADDRESS = methodcaller("data_ptr")
_REQUIRES_GRAD = attrgetter("requires_grad")


class _SetLater[T]:
    """An attribute that is set once the object is part of a model; until then, reading it raises EtpStateError.

    A property would cost a Python call at each of the many reads afterwards.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @overload
    def __get__(self, obj: None, owner: type) -> Self: ...
    @overload
    def __get__(self, obj: Shard, owner: type) -> T: ...
    def __get__(self, obj: Shard | None, owner: type) -> T | Self:
        """Called only while the attribute is not set on the object itself."""
        if obj is None:
            return self
        raise EtpStateError(f"{obj.fqn} {self._what}; pass its module to etp.shard_module")


class Reading:
    """What a visit reads of a group. Compared by identity: each group has one of either kind.

    Attributes:
        group: whose weights are read.
        columns: whether columns are gathered rather than rows, in a format that has them apart.
    """

    __slots__ = ("columns", "group")

    def __init__(self, group: WeightGroup, *, columns: bool) -> None:
        self.group, self.columns = group, columns


class GathersWeights(Protocol):
    """:class:`etp.gathers.Gathers`, as consumers of weights call it."""

    def visit(
        self, group: WeightGroup, format_: WeightFormat | None = None, *, transposed: bool = False
    ) -> list[torch.Tensor]:
        """The full weights, for use now, as they are stored or in a format, by rows or by columns. Collective."""

    def full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """One full weight, newly allocated. Collective over the group's ranks."""


class ReducesGradients(Protocol):
    """:class:`etp.reductions.Reductions`, as consumers of weights, and the shards' gradients, call it."""

    def buffers(self, group: WeightGroup, dtype: torch.dtype) -> list[torch.Tensor]:
        """A buffer for each of the group's full gradients."""

    def buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One of these buffers, for a consumer that requests them one at a time."""

    def take(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Start reducing the group's full gradients. Returns what to pass to autograd for each, usually None."""

    def returns_gradients(self, group: WeightGroup) -> bool | None:
        """Whether the gradients of this group's shards go to autograd rather than into the shards' ``grad``."""

    def require_complete(self, group: WeightGroup) -> None:
        """Raise EtpStateError unless the group's gradients are complete."""

    def forget_sums(self, group: WeightGroup) -> None:
        """Called when a gradient of this group was set to zero."""


class ShardDriver(Protocol):
    """The parts of the runtime (:class:`etp.runtime.EtpRuntime`) that shards and their consumers call.

    A protocol, because these parts import the shards and groups that they drive.

    Attributes:
        in_forward: whether the model's forward pass is under way.
        sums_gradients: whether gradients are summed over the ranks rather than averaged.
    """

    in_forward: bool
    sums_gradients: bool

    @property
    def gathers(self) -> GathersWeights:
        """Gathers the weights."""

    @property
    def reductions(self) -> ReducesGradients:
        """Reduces their gradients."""

    @property
    def scalars(self) -> GroupScalars:
        """Combines numbers over the ranks."""

    @property
    def matrices(self) -> GroupMatrices:
        """Computes on whole matrices, each on one of the ranks."""

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """Every process group over which it shards weights, in the same order on all ranks."""


class Shard(OneOfMany, torch.nn.Parameter):
    """The engine's view of one rank's shard of a weight; :class:`etp.param.ETPShardedParam` is the user's.

    Attributes:
        group: the process group whose rank r holds shard r.
        group_rank: this process's rank in ``group``; valid even after the group is destroyed.
        weight_group: the weights that this one is gathered and reduced with.
        driver: the runtime that runs their collectives.
        fqn: name in messages; the parameter's dotted name once a runtime has adopted its module.
        knows_copies: whether its copies record which shard they are (``etp/shard_copy.py``); loaded states must then
            record it too.
        has_reduce_hooks: whether any hook waits for its complete gradient.
        term_counted: whether this backward pass gives the shard a gradient that ``etp/terms.py`` has already scaled.
    """

    group: dist.ProcessGroup
    group_rank: int
    fqn: str
    term_counted: bool
    knows_copies = True

    def __new__(
        cls, shard: torch.Tensor, layout: ShardLayout, group: dist.ProcessGroup, requires_grad: bool = True
    ) -> Self:
        """Make a parameter of a shard.

        Args:
            shard: tensor of ``layout.shard_shape``, not copied; its padding rows must be zero.
            layout: how the weight is sharded.
            group: the shard group.
            requires_grad: whether it is trained.

        Raises:
            ValueError: if this rank is not in ``group``, ``shard``, ``layout`` and ``group`` do not match, or ``shard``
                is complex.
        """
        rank = own_rank(group)
        if shard.is_complex():
            raise ValueError(f"a weight of {shard.dtype} cannot be sharded, only real ones")
        size = dist.get_world_size(group)
        if size != layout.num_shards:
            raise ValueError(f"the layout has {layout.num_shards} shards and the shard group {size} ranks")
        if tuple(shard.shape) != layout.shard_shape:
            raise ValueError(f"a shard of {layout} has shape {layout.shard_shape}, not {tuple(shard.shape)}")
        param = torch.Tensor._make_subclass(cls, shard.detach().contiguous(), requires_grad)
        param._layout = layout
        param.group, param.group_rank = group, rank
        param.fqn = f"<unnamed {layout.shape}>"
        param._group_index = 0
        param.has_reduce_hooks = False
        param._reduce_hooks = []
        param._accumulate_hooks = OrderedDict()
        param._reference = weakref.ref(param)
        param._data, param._former_versions = None, 0
        param._placeholder_due = param.term_counted = False
        return param

    weight_group: WeightGroup = _SetLater["WeightGroup"]("belongs to no weight group")  # type: ignore[assignment]
    driver: ShardDriver = _SetLater["ShardDriver"]("has no runtime yet")  # type: ignore[assignment]

    # Assigned in __new__; declared here for readers and type checkers.
    _layout: ShardLayout
    _group_index: int
    has_reduce_hooks: bool
    _reduce_hooks: list[Callable[[], None]]
    _accumulate_hooks: OrderedDict[int, Callable[[torch.Tensor], None]]
    _reference: weakref.ref[Self]
    _data: torch.Tensor | None
    _former_versions: int
    _placeholder_due: bool

    @property
    def layout(self) -> ShardLayout:  # type: ignore[override]
        """How the weight is cut. Hides ``torch.Tensor.layout``, which is always strided here."""
        return self._layout

    @property
    def cut(self) -> Cut:
        """The shard's index, the number of shards, and the rows of the weight."""
        return self.group_rank, self._layout.num_shards, self._layout.rows

    def join_group(self, group: WeightGroup, index: int) -> None:
        """Become weight ``index`` of a group; called once, when the group is constructed."""
        if "weight_group" in self.__dict__:
            raise EtpStateError(f"{self.fqn} is in group {self.weight_group.name} already")
        self.weight_group, self._group_index = group, index

    def attach(self, driver: ShardDriver, fqn: str) -> None:
        """Set the driver that runs this weight's collectives, and the weight's name."""
        self.driver, self.fqn = driver, fqn
        if "weight_group" in self.__dict__:
            self.weight_group.renamed()

    @property
    def has_driver(self) -> bool:
        """Whether a runtime drives this weight."""
        return "driver" in self.__dict__

    def local_shard(self) -> torch.Tensor:
        """The shard as a plain tensor of ``layout.shard_shape`` that shares storage and version counter."""
        # Like detach(), which would go through __torch_function__ where dynamo has compiled this.
        return torch.Tensor._make_subclass(torch.Tensor, self)

    def _forget_data(self) -> None:
        if self._data is not None:
            self._former_versions += self._data._version + 1
            self._data = None

    # Gradient ----------------------------------------------------------------------------------------------

    def register_reduce_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` whenever a backward pass's gradient has been added to this shard."""
        self._reduce_hooks.append(hook)
        self.has_reduce_hooks = True

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call ``hook(param)`` whenever ``param.grad`` has received a reduced gradient.

        The engine runs this hook, not autograd, which would call it before the reduction is done.
        """
        handle = RemovableHandle(self._accumulate_hooks)
        self._accumulate_hooks[handle.id] = hook
        self.has_reduce_hooks = True
        return handle

    def watch_uses(self, done: Callable[[torch.Tensor | None], torch.Tensor | None]) -> RemovableHandle:
        """Call ``done`` whenever a backward pass has differentiated all uses of this shard in its graph.

        Autograd runs a tensor's own hooks at that point, even if all uses returned None; see [Note: once a backward] in
        ``etp/grad_hooks.py``. ``done`` receives the gradient that autograd itself brings, usually None. It returns a
        replacement, or None to keep that gradient.
        """
        with torch._C.DisableTorchFunctionSubclass():
            handle: RemovableHandle = torch.Tensor.register_hook(self, done)
        return handle

    def watch_accumulation(self, done: Callable[[], None]) -> RemovableHandle:
        """Call ``done`` whenever autograd itself has accumulated a gradient, as it does for graphed callables."""

        def accumulated(param: torch.Tensor) -> None:
            del param
            done()

        with torch._C.DisableTorchFunctionSubclass():
            handle: RemovableHandle = torch.Tensor.register_post_accumulate_grad_hook(self, accumulated)
        return handle

    def run_reduce_hooks(self) -> None:
        """Run the hooks, those of ``register_post_accumulate_grad_hook`` included."""
        for hook in self._reduce_hooks:
            hook()
        for accumulated in list(self._accumulate_hooks.values()):
            accumulated(self)

    def take_placeholder(self) -> bool:
        """Whether autograd's gradient in this backward pass is, or contains, a placeholder. Resets the flag."""
        due, self._placeholder_due = self._placeholder_due, False
        return due

    # Implemented in C, unlike Tensor's: a dictionary of parameters calls it at every access.
    __hash__ = object.__hash__


def own_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in a shard group; ValueError if it has none."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of the shard group; pass each rank the group that contains it"
        )
    return rank


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
        """What was observed last (:meth:`note_observed`); None if nothing."""
        self.before_gather: list[Callable[[], None]] = []
        """Called before the shards are read, e.g. to finish an asynchronous update of them."""
        self.reduce_hooks: list[Callable[[], None]] = []
        """Called whenever a backward pass's gradients have been added to the shards."""
        self.format: WeightFormat | None = None
        """How its weights are gathered; None: as they are stored."""
        self.format_is_known = False
        """Whether a consumer has asked for :attr:`format`; before, it is a guess."""
        self._quantized: tuple[Quantization, int] | None = None
        self._slot: Slot | None = None
        self._cache: BufferCache | None = None
        self._slots: dict[BufferCache, Slot] = {}
        self.rows, self.columns = Reading(self, columns=False), Reading(self, columns=True)
        """What visits read of it. Columns are visited only in a format that has them apart."""
        self._ready: Ready | None = None
        self._generation = -1
        self._gathered_columns = False
        self._gathered_version: tuple[Any, ...] = ()
        self.version: tuple[Any, ...] = ()
        """Changes when the version counter of a shard does, or when a shard is bound to other storage. Updated by
        :meth:`read_shards`."""
        self.read_in_pass = -1
        """Number of the pass of the last :meth:`read_shards`."""
        self._spec_of: Stack | None = None
        self._local: Stack | None = None
        self._addresses: tuple[int, ...] = ()
        self.reset_counts()
        for index, shard in enumerate(self.shards):
            shard.join_group(self, index)

    def reset_counts(self) -> None:
        """Count collectives and their bytes from zero; see :class:`etp.traffic.TrafficCounters`."""
        self.gathers = self.gathered_bytes = self.reductions = self.reduced_bytes = 0

    @cached_property
    def name(self) -> str:
        """The first weight's name, and the number of further weights."""
        more = f" (+{len(self.shards) - 1})" if len(self.shards) > 1 else ""
        return f"{self.shards[0].fqn}{more}"

    @cached_property
    def gather_label(self) -> str:
        """Names the group's gathers in messages."""
        return f"all-gather of {self.name}"

    @cached_property
    def reduce_label(self) -> str:
        """Names the group's reductions in messages."""
        return f"reduce-scatter of {self.name}'s gradient"

    def renamed(self) -> None:
        """Drop the cached names, because a shard was renamed."""
        for name in ("name", "gather_label", "reduce_label"):
            self.__dict__.pop(name, None)

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

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered weights, padding included."""
        return self.spec.nbytes

    @cached_property
    def spec(self) -> BufferSpec:
        """The buffers that a gather fills; :meth:`attach` updates it after a change of dtype, device or order."""
        self._spec_of = local = self.local_shards()
        shape, count = self.layout.padded_shape, len(local)
        if self.format is not None:
            return BufferSpec(self.format.gathered_shape(self.layout), self.format.dtype, local.device, count)
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

    def published(self) -> Sequence[Stack]:
        """What this rank publishes: its shards, or all parts of their quantized copies."""
        if self.format is None:
            return (self.local_shards(),)
        quantization, index = self._copies()
        return quantization.published(index)

    def sources(self) -> Stack:
        """What gathers read: this rank's shards, or their quantized copies.

        In a format that has rows and columns apart, the data of the rows.

        Raises:
            EtpStateError: if the group has a format and its shards were never quantized.
        """
        if self.format is None:
            return self.local_shards()
        quantization, index = self._copies()
        return quantization.copies[index]

    def _copies(self) -> tuple[Quantization, int]:
        if self._quantized is None:
            raise EtpStateError(f"{self.name} is gathered before its shards were quantized")
        return self._quantized

    def read_shards(self, pass_number: int) -> None:
        """Update :attr:`version`, and drop :meth:`local_shards` if the storage of a shard has changed."""
        shards = self.shards
        with torch._C.DisableTorchFunctionSubclass():
            aliases = [data for data in map(_DATA, shards) if data is not None]
            counted = sum(map(_VERSION, shards)) + sum(map(_FORMER_VERSIONS, shards)) + sum(map(_VERSION, aliases))
            addresses = tuple(map(_ADDRESS, shards))
        self.version, self.read_in_pass = (counted, addresses), pass_number
        if self._local is not None and self._addresses != addresses:
            self._local = None

    @property
    def is_published(self) -> bool:
        """Whether gathers read published copies rather than the shards themselves; its route must be known."""
        return self.format is not None or (self.route is not None and self.route.transport.publishes)

    def note_observed(self, stamp: tuple[int, int]) -> None:
        """Record an observation of the shards as :meth:`read_shards` has found them; see ``etp/versions.py``."""
        self.observed = stamp, self.format, self.version

    def is_observed(self, stamp: tuple[int, int]) -> bool:
        """Whether the shards were observed as they are now, with an observation of this stamp."""
        return self.observed == (stamp, self.format, self.version)

    def local_shards(self) -> Stack:
        """This rank's shards as plain tensors; the same object until one of them is bound to other storage."""
        if self._local is None:
            self._local = Stack([shard.local_shard() for shard in self.shards])
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
            self.__dict__.pop("nbytes", None)
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
            and self._gathered_columns is columns
            and self._gathered_version == (epoch, *self.version)
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
        slot = self.slot
        self.pending = True
        try:
            self._generation = slot.claim(self)
            self._gathered_version = (epoch, *self.version)
            self._gathered_columns = columns
            self.issued_in_pass = pass_number
            gather: Callable[[], InFlight]
            if self.format is not None and self.format.apart:
                quantization, index = self._copies()
                parts = quantization.moved(index, slot.buffers, columns=columns)
                gather = partial(route.transport.all_gather_parts, parts, self.gather_label)
            else:
                gather = partial(route.transport.all_gather, slot.buffers, self.sources(), self.gather_label)
            self._ready = route.gather.start(gather, waits=waits, label=self.gather_label)
            self.gathers += 1
            self.gathered_bytes += self.nbytes
        except BaseException:
            self._forget_gather()
            raise

    def read_until_here(self, lane: Lane) -> None:
        """Record that the consumer of the weights has enqueued all its work on them."""
        slot = self._slot
        if slot is not None and slot.generation == self._generation:
            for stream, event in slot.reads.items():
                if event is None:
                    slot.reads[stream] = lane.mark(stream)

    def take(self, lane: Lane, *, transposed: bool = False) -> list[torch.Tensor]:
        """Hand out the gathered weights, ordered after the gather on the current stream.

        Args:
            lane: where they were gathered.
            transposed: in a format, whether the consumer reads columns.

        Returns:
            the weights in the group's order, of logical shape, with the shards' ``requires_grad``: views of the slot
            or, in a format, quantized tensors around such views.

        Raises:
            StaleWeightError: if the slot was claimed by another group since the gather.
        """
        reader = lane.current_stream()
        # Needed even if the weights were handed out before: that may have been on another stream.
        if self._ready is not None:
            self._join(self._ready, reader)
        slot = self.slot
        slot.check(self, self._generation)
        if self.pending:
            self.pending = False
            # The gather was ordered after all readers of the previous content.
            slot.reads.clear()
        slot.reads[reader] = None
        if self.format is None:
            return slot.weights(self.layout.rows, self.trained())
        quantization, index = self._copies()
        return quantization.assemble(
            index, slot.buffers, self.local_shards().dtype, self.trained(), transposed=transposed
        )

    def trained(self) -> tuple[bool, ...]:
        """For each weight, whether it is trained."""
        # Not through __torch_function__, which would take most of the time.
        with torch._C.DisableTorchFunctionSubclass():
            return tuple(map(_REQUIRES_GRAD, self.shards))

    def abandon_gather(self) -> None:
        """Wait for a gather that was not handed out, and drop it. Its slot is free afterwards."""
        if self._ready is not None and self.pending:
            ready, slot = self._ready, self.slot
            self._join(ready)
            # The next gather into the slot may be on another lane, which waits only for this event.
            slot.reads.clear()
            slot.reads.update(ready.mark())
        self.pending = False

    def _join(self, ready: Ready, stream: Any = None) -> None:
        try:
            ready.wait(stream)
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
            hook()
        for shard in itertools.compress(self.shards, self.trained()):
            if shard.has_reduce_hooks:
                shard.run_reduce_hooks()

    def begin_reduction(self, nbytes: int) -> None:
        """Record the start of a reduction of ``nbytes`` bytes of gradients.

        Raises:
            EtpStateError: if one is in flight.
        """
        if self.reducing:
            raise EtpStateError(f"a gradient of {self.name} is being reduced already; finish that reduction first")
        self.reducing = True
        self.reductions += 1
        self.reduced_bytes += nbytes

    def end_reduction(self) -> None:
        """Record that the reduction has ended or failed."""
        self.reducing = False
