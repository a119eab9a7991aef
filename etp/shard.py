"""One rank's shard of a weight, as the engine sees it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from etp.errors import EtpStateError
from etp.layout import ShardLayout
from etp.shard_copy import Cut, OneOfMany

if TYPE_CHECKING:
    from etp.group import WeightGroup
    from etp.runtime import EtpRuntime


class _SetLater:
    """An attribute that is set once the object is part of a model; until then, reading it raises EtpStateError.

    A property would cost a Python call at each of the many reads afterwards.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __get__(self, shard: Shard, owner: type) -> NoReturn:
        """Called only while the attribute is not set on the object itself."""
        raise EtpStateError(f"{shard.fqn} {self._what}; pass its module to etp.shard_module")


needs_grad: Callable[[torch.Tensor], bool] = torch._C.TensorBase.requires_grad.__get__  # type: ignore[attr-defined]
"""``requires_grad`` without a Python call, for the engine: where ``__torch_function__`` is turned off."""

_GRAD: Any = torch._C.TensorBase.grad
read_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
write_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__
"""``grad``, likewise."""


def _described(name: str) -> Any:
    """A property of tensors that is read without ``__torch_function__``, which takes ten times as long.

    Transformer Engine's layers read a few of each weight in every pass.
    """
    of_tensor = getattr(torch._C.TensorBase, name)
    read, write = of_tensor.__get__, of_tensor.__set__

    def get(shard: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return read(shard)

    def assign(shard: torch.Tensor, value: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            write(shard, value)

    return property(get, assign)


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
        placeholder_due: number of the last graph task in which autograd's gradient is, or contains, a placeholder.
        term_counted: number of the last graph task that gives the shard a gradient which ``etp/terms.py`` has scaled.
        used_by_function: number of the graph task in which the forward of a user's autograd function last computed with
            the shard, -1 outside of backward passes; None if none has since the last backward pass that did not fail.
    """

    group: dist.ProcessGroup
    group_rank: int
    fqn: str
    placeholder_due: int
    term_counted: int
    used_by_function: int | None
    knows_copies = True

    def __new__(
        cls, shard: torch.Tensor, layout: ShardLayout, group: dist.ProcessGroup, requires_grad: bool = True
    ) -> Self:
        """Make a parameter from a shard.

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
        param.placeholder_due = -1
        param.term_counted = -1
        param.used_by_function = None
        return param

    weight_group: WeightGroup = _SetLater("belongs to no weight group")  # type: ignore[assignment]
    driver: EtpRuntime = _SetLater("has no runtime yet")  # type: ignore[assignment]

    dtype, device, shape = _described("dtype"), _described("device"), _described("shape")
    requires_grad, is_cuda = _described("requires_grad"), _described("is_cuda")

    # Assigned in __new__; declared here for readers and type checkers.
    _layout: ShardLayout
    _group_index: int
    has_reduce_hooks: bool
    _reduce_hooks: list[Callable[[], None]]
    _accumulate_hooks: OrderedDict[int, Callable[[torch.Tensor], None]]
    _reference: weakref.ref[Self]
    _data: torch.Tensor | None
    _former_versions: int

    @property
    def layout(self) -> ShardLayout:  # type: ignore[override]
        """How the weight is cut. Hides ``torch.Tensor.layout``, which is always strided here."""
        return self._layout

    @property
    def cut(self) -> Cut:
        """The shard's index, the number of shards, and the rows of the weight."""
        return self.group_rank, self._layout.num_shards, self._layout.rows

    @property
    def padding(self) -> int:
        """How many of its rows, the last ones, are padding."""
        return self._layout.shard_rows - self._layout.logical_rows(self.group_rank)

    def join_group(self, group: WeightGroup, index: int) -> None:
        """Become weight ``index`` of a group; called once, when the group is constructed."""
        if "weight_group" in self.__dict__:
            raise EtpStateError(f"{self.fqn} is in group {self.weight_group.name} already")
        self.weight_group, self._group_index = group, index

    def attach(self, driver: EtpRuntime, fqn: str) -> None:
        """Set the driver that runs this weight's collectives, and the weight's name."""
        self.driver, self.fqn = driver, fqn
        if "weight_group" in self.__dict__:
            self.weight_group.rename()

    @property
    def has_driver(self) -> bool:
        """Whether a runtime drives this weight."""
        return "driver" in self.__dict__

    def local_shard(self) -> torch.Tensor:
        """The shard as a plain tensor of ``layout.shard_shape`` that shares storage and version counter."""
        # Like detach(), which would go through __torch_function__ where dynamo has compiled this.
        return torch.Tensor._make_subclass(torch.Tensor, self)

    def checked_memory(self) -> torch.Tensor:
        """:meth:`local_shard`, for a gather; ValueError if ``data`` was assigned what cannot be gathered."""
        local = self.local_shard()
        if tuple(local.shape) != self._layout.shard_shape or not local.is_contiguous():
            raise ValueError(
                f"{self.fqn} has been given memory of shape {tuple(local.shape)} and strides {local.stride()}; assign "
                f"param.data a contiguous tensor of {self._layout.shard_shape}, this rank's rows, or load whole "
                "weights with etp.load_full_state_dict"
            )
        return local

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
        replacement, or None to keep that gradient. The shard may be frozen.
        """
        with torch._C.DisableTorchFunctionSubclass():
            is_trained = needs_grad(self)
            # A frozen tensor accepts no hook.
            torch.Tensor.requires_grad_(self, True)
            handle: RemovableHandle = torch.Tensor.register_hook(self, done)
            torch.Tensor.requires_grad_(self, is_trained)
        return handle

    def watch_accumulation(self, done: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call ``done`` with this shard whenever autograd has visited its node, even if it has brought no gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            handle: RemovableHandle = torch.Tensor.register_post_accumulate_grad_hook(self, done)
        return handle

    def run_reduce_hooks(self) -> None:
        """Run the hooks, those of ``register_post_accumulate_grad_hook`` included."""
        for hook in self._reduce_hooks:
            hook()
        for accumulated in list(self._accumulate_hooks.values()):
            accumulated(self)

    # Implemented in C, unlike Tensor's: a dictionary of parameters calls it at every access.
    __hash__ = object.__hash__


@_disable_dynamo
def uncompiled(call: Callable[..., Any], *args: Any) -> Any:
    """Call ``call`` hidden from dynamo, which would trace what the engine does with addresses and sizes of shards."""
    return call(*args)


def can_be_trained(param: torch.Tensor) -> bool:
    """Whether a frozen parameter may be trained later: integers, and tensors made in inference mode, never are."""
    return (param.is_floating_point() or param.is_complex()) and not param.is_inference()


def own_rank(group: dist.ProcessGroup, name: str = "the shard group") -> int:
    """This process's rank in a shard group, named in messages.

    Raises:
        TypeError: if it is no process group.
        ValueError: if this process is no member.
    """
    # torch.distributed.new_group gives a number to processes that are no members.
    if not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"{name} is of type {type(group).__name__}; pass a process group, such as torch.distributed.group.WORLD "
            "or, of a DeviceMesh, mesh.get_group()"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of {name}; create one group for each set of peers, and pass each "
            "rank the one that contains it"
        )
    return rank
