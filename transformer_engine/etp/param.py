"""A sharded weight as an ``nn.Parameter``: its identity, and its interface for consumers.

The parameter's data is this rank's shard. Its :class:`WeightGroup` knows what is gathered together with it, and its
:class:`ShardDriver` (the runtime) decides when. There are three kinds of consumers:

- ``torch.nn.functional.linear`` and ``embedding``, by name, so any module that calls them works unchanged;
- Transformer Engine modules, through its ``DistributedWeight`` protocol (TE PR 3005);
- direct use: :meth:`ETPShardedParam.full_tensor`.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, Self, overload

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._compile import _disable_dynamo
from torch.utils.hooks import RemovableHandle

from etp import functional
from etp.allowed import ALLOWED, is_refused
from etp.derived import ShardData, mark_result
from etp.differentiate import RUNS_BACKWARD, run_backward
from etp.errors import EtpStateError
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.refusals import OneOfMany, refusal
from etp.shard_copy import Cut
from etp.shard_grad import GradDriver, owned_grad
from etp.te import refuse_override


class ShardDriver(GradDriver, Protocol):
    """Decides when a group's collectives run (:class:`etp.runtime.EtpRuntime`)."""

    in_forward: bool

    def materialize(self, group: WeightGroup) -> list[torch.Tensor]:
        """The group's full weights, for use right now."""

    def wgrad_buffers(self, group: WeightGroup, dtype: torch.dtype) -> list[torch.Tensor]:
        """A buffer for each of the group's full gradients."""

    def wgrad_buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One of these buffers, for a consumer that asks for them one by one."""

    def reduce_wgrads(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Start reducing the group's full gradients. Returns what to pass to autograd for each, usually None."""

    def returns_gradients(self, group: WeightGroup) -> bool:
        """Whether the gradients of this group's shards go to autograd rather than into the shards' ``grad``."""

    def gather_full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """One full weight, newly allocated."""

    def gathered(self, own: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
        """``[ranks, n]``: what every rank has in ``own``, ``[n]``."""


# Functions whose sharded counterpart replaces them when a shard is the weight.
_SHARDED_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: functional.linear,
    F.embedding: functional.embedding,
}

_NUMEL = frozenset({torch.numel, torch.Tensor.numel, torch.Tensor.nelement})

# What reading ``param.grad`` calls, and reading and assigning ``param.data``.
_READ_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WRITE_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class _SetLater[T]:
    """An attribute that is set once the object is part of a model; until then, reading it raises EtpStateError.

    A property would cost a Python call at each of the many reads afterwards.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    @overload
    def __get__(self, obj: None, owner: type) -> Self: ...
    @overload
    def __get__(self, obj: ETPShardedParam, owner: type) -> T: ...
    def __get__(self, obj: ETPShardedParam | None, owner: type) -> T | Self:
        """Found only where the object itself has no such attribute."""
        if obj is None:
            return self
        raise EtpStateError(f"{obj.fqn} {self._what}; pass its module to etp.shard_module")


@_disable_dynamo
def _uncompiled(
    cls: type[ETPShardedParam],
    func: Any,
    types: Iterable[type],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None,
) -> Any:
    """What a shard does with a function, out of dynamo's sight.

    Compiled, it would call ``func`` on the shard itself, for ever, and dynamo's streams are not those of transports.
    """
    return cls.__torch_function__(func, types, args, kwargs)


class ETPShardedParam(OneOfMany, torch.nn.Parameter):
    """One rank's shard of a weight. Its ``grad`` is a :class:`etp.shard_grad.ShardGrad`.

    Attributes:
        group: the process group whose rank r holds shard r.
        group_rank: this process's rank in ``group``, also once the group is gone.
        weight_group: the weights that this one is gathered and reduced with.
        driver: the runtime that runs their collectives.
        fqn: name in messages; the parameter's dotted name once a runtime has adopted its module.
        is_distributed_weight: marker of TE's ``DistributedWeight`` protocol.
        knows_copies: whether its copies say which shard they are (``etp/shard_copy.py``), so that states must.
    """

    group: dist.ProcessGroup
    group_rank: int
    fqn: str
    is_distributed_weight = True
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
        param._placeholder_due = False
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

    @classmethod
    def from_full(cls, weight: torch.Tensor, group: dist.ProcessGroup, pad_for_alignment: int = 16) -> Self:
        """Cut this rank's shard out of a full weight, whose values must be equal on all ranks."""
        rank = own_rank(group)
        layout = ShardLayout(tuple(weight.shape), dist.get_world_size(group), pad_for_alignment)
        return cls(cut_shard(weight.detach(), layout, rank), layout, group, weight.requires_grad)

    @property
    def layout(self) -> ShardLayout:  # type: ignore[override]
        """How the weight is cut. Hides ``torch.Tensor.layout``, which is always strided here."""
        return self._layout

    @property
    def cut(self) -> Cut:
        """Which shard of how many, and the rows of the weight."""
        return self.group_rank, self._layout.num_shards, self._layout.rows

    def numel(self) -> int:
        """Elements of the whole weight, without padding: ``sum(p.numel() for p in ...)`` counts the model's.

        ``shape``, and all else, is of the shard; its elements are ``local_shard().numel()``.
        """
        return math.prod(self._layout.shape)

    nelement = numel

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
        # As detach() does, which would come through __torch_function__ where dynamo has compiled this.
        return torch.Tensor._make_subclass(torch.Tensor, self)

    def _shared_data(self) -> torch.Tensor:
        """What ``data`` returns: one alias, so that the writes through it can be counted.

        PyTorch returns an alias with a version counter of its own each time. A layer that writes there before it
        computes, such as one with bounded weights, would compute with what was gathered before.
        """
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            if self._data is None or self._data.data_ptr() != self.data_ptr():
                self._forget_data()
                self._data = self.data
            return ShardData.of(self._data, self)

    def _forget_data(self) -> None:
        if self._data is not None:
            self._former_versions += self._data._version + 1
            self._data = None

    def materialize(self) -> list[torch.Tensor]:
        """The full weights of this parameter's group, valid until the next weight of the same shape is gathered."""
        return self.driver.materialize(self.weight_group)

    def wgrad_buffers(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Buffers of the group's logical shapes to compute full gradients into; pass them to ``reduce_wgrads``."""
        return self.driver.wgrad_buffers(self.weight_group, dtype)

    def reduce_wgrads(self, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Start reducing the group's full gradients (logical shapes); the sum arrives in ``grad`` or ``main_grad``.

        Returns:
            what to pass to autograd for each shard of the group: None, except under ``torch.autograd.grad``.
        """
        return self.driver.reduce_wgrads(self.weight_group, wgrads)

    def full_tensor(self) -> torch.Tensor:
        """The full weight, of logical shape, newly allocated. Collective over the shard group."""
        return self.driver.gather_full(self.weight_group, self._group_index)

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

    def register_hook(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> NoReturn:
        """Refused: autograd never sees a sharded weight's gradient.

        Raises:
            TypeError: always.
        """
        del hook
        raise TypeError(
            f"a tensor hook on {self.fqn} would get None, because its gradient is reduced outside autograd; use "
            "register_post_accumulate_grad_hook and change param.grad there"
        )

    def watch_uses(self, done: Callable[[torch.Tensor | None], torch.Tensor | None]) -> RemovableHandle:
        """Call ``done`` whenever a backward pass has differentiated all uses of this shard in its graph.

        Autograd runs a tensor's own hooks at that point, even if all uses returned None; see [Note: once a backward] in
        ``etp/reductions.py``. ``done`` gets the gradient that autograd brings itself, as a rule none, and returns what
        it shall add.
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

    # TE's DistributedWeight protocol ------------------------------------------------------------------------

    def materialize_group_for_forward(self) -> list[torch.Tensor]:
        """See ``transformer_engine.pytorch.distributed_weight.DistributedWeight``.

        Raises:
            TypeError: under hooks on saved tensors, which would pass TE's backward a plain tensor instead of the shard.
            ValueError: under a recipe of quantization whose backward pass would compute with the shard.
        """
        refuse_override(self.fqn)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise TypeError(
                f"{self.fqn} is used by a Transformer Engine module under hooks on saved tensors, which replace the "
                "shard by a plain tensor: use torch.utils.checkpoint with use_reentrant=True, or Megatron's "
                "recomputation, instead of use_reentrant=False, and no offloading of activations by such hooks"
            )
        return self.driver.materialize(self.weight_group)

    def materialize_group_for_backward(self) -> list[torch.Tensor]:
        """See ``transformer_engine.pytorch.distributed_weight.DistributedWeight``."""
        return self.driver.materialize(self.weight_group)

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None] | torch.Tensor | None:
        """Reduce the full gradients into the shards; autograd gets None as a rule, see :meth:`reduce_wgrads`."""
        if isinstance(wgrads, torch.Tensor):
            return self.driver.reduce_wgrads(self.weight_group, [wgrads])[0]
        return self.driver.reduce_wgrads(self.weight_group, wgrads)

    def grad_buffer(self) -> torch.Tensor:
        """A buffer of the full weight's shape for the weight-gradient GEMM, which fuses the accumulation into it.

        Transformer Engine then brings autograd a tensor of arbitrary content as the gradient.
        """
        self._placeholder_due = True
        main_grad: torch.Tensor | None = getattr(self, "main_grad", None)
        dtype = self.dtype if main_grad is None else main_grad.dtype
        return self.driver.wgrad_buffer(self.weight_group, self._group_index, dtype)

    def take_placeholder(self) -> bool:
        """Whether autograd's gradient of this backward pass is, or contains, a placeholder; asked once in each."""
        due, self._placeholder_due = self._placeholder_due, False
        return due

    # Python protocols ---------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(  # noqa: PLR0911 - one for each kind of function
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route ``linear`` and ``embedding`` to their sharded forms; refuse what ``etp/allowed.py`` does not list.

        Results are plain tensors, except as ``etp/derived.py`` says.
        """
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(cls, func, types, args, kwargs)
        if func == _READ_GRAD:
            return owned_grad(args[0], args[0]._reference)
        if func == _READ_DATA:
            return args[0]._shared_data()
        if func == _WRITE_DATA and isinstance(args[0], cls):
            args[0]._forget_data()
            # Memory that is assigned again may have changed meanwhile, or be other memory at that address.
            args[0]._former_versions += 1
        kwargs = kwargs or {}
        if func in RUNS_BACKWARD:
            return run_backward(func, args, kwargs)
        sharded = _SHARDED_FUNCTIONS.get(func)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if sharded is not None and isinstance(weight, cls):
            with torch._C.DisableTorchFunctionSubclass():
                return sharded(*args, **kwargs)
        if func not in ALLOWED and (sharded is not None or is_refused(func)):
            if func in _NUMEL:
                return args[0].numel()
            raise TypeError(_refusal(func, (*args, *kwargs.values())))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if type(result) is torch.Tensor:
            operands = [*args, *kwargs.values()]
            shard = next((operand for operand in operands if isinstance(operand, cls)), None)
            # Outside of a model nothing is computed with it.
            if shard is not None and shard.has_driver:
                result = mark_result(func, result, shard, operands)
        return result

    # In C, unlike Tensor's own: a dictionary of parameters asks for it at every access.
    __hash__ = object.__hash__

    # Methods, because Tensor's own operator turns a TypeError of __torch_function__ into one without our message.
    def __matmul__(self, other: Any) -> NoReturn:
        """A shard is not its weight."""
        raise TypeError(_refusal(torch.matmul, (self, other)))

    def __rmatmul__(self, other: Any) -> NoReturn:
        """A shard is not its weight."""
        raise TypeError(_refusal(torch.matmul, (other, self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """A copy would need a runtime and a process group of its own."""
        raise TypeError(
            f"{self.fqn} is a shard tied to its process group and cannot be deep-copied; copy the module before "
            "etp.shard_module, or use etp.full_state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Pickle state dicts, not sharded parameters."""
        raise TypeError(
            f"{self.fqn} is a shard tied to its process group and cannot be pickled; save module.state_dict() "
            "(shards) or etp.full_state_dict(module) instead"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name, cut and place; no values, because a shard's values say little."""
        start, stop = self.layout.logical_range(self.group_rank)
        return (
            f"ETPShardedParam({self.fqn}: rows {start}:{stop} of {self.layout.shape}, shard "
            f"{self.group_rank} of {self.layout.num_shards}, {self.dtype}, {self.device})"
        )


def own_rank(group: dist.ProcessGroup) -> int:
    """This process's rank in a shard group; ValueError if it has none."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of the shard group; pass each rank the group that contains it"
        )
    return rank


def cut_shard(weight: torch.Tensor, layout: ShardLayout, rank: int) -> torch.Tensor:
    """Shard ``rank`` of a full weight, newly allocated, with zeros in the padding rows."""
    if tuple(weight.shape) != layout.shape:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}; its layout says {layout.shape}")
    start, stop = layout.logical_range(rank)
    shard = weight.new_zeros(layout.shard_shape)
    shard[: stop - start].copy_(weight[start:stop])
    return shard


def _refusal(func: Any, operands: Iterable[Any]) -> str:
    return refusal(func, [operand for operand in operands if isinstance(operand, ETPShardedParam)])
