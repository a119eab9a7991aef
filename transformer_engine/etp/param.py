"""A sharded weight as an ``nn.Parameter``: its identity, and its interface for consumers.

The parameter's data is this rank's shard. Its :class:`WeightGroup` knows what is gathered together with it, and its
:class:`ShardDriver` (the runtime) decides when. There are three kinds of consumers:

- ``torch.nn.functional.linear`` and ``embedding``, by name, so any module that calls them works unchanged;
- Transformer Engine modules, through its ``DistributedWeight`` protocol (TE PR 3005);
- direct use: :meth:`ETPShardedParam.full_tensor`.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.hooks import RemovableHandle

from etp import functional
from etp.derived import ShardData, mark_derived
from etp.errors import EtpStateError
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.refusals import REFUSED, OneOfMany, refusal
from etp.shard_grad import GradDriver, owned_grad


class ShardDriver(GradDriver, Protocol):
    """Decides when a group's collectives run (:class:`etp.runtime.EtpRuntime`)."""

    in_forward: bool

    def materialize(self, group: WeightGroup) -> list[torch.Tensor]:
        """The group's full weights, for use right now."""

    def wgrad_buffer(self, group: WeightGroup, index: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer for one of the group's full gradients."""

    def reduce_wgrads(self, group: WeightGroup, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Start reducing the group's full gradients. Returns what to pass to autograd for each, usually None."""

    def returns_gradients(self, group: WeightGroup) -> bool:
        """Whether the gradients of this group's shards go to autograd rather than into the shards' ``grad``."""

    def gather_full(self, group: WeightGroup, index: int) -> torch.Tensor:
        """One full weight, newly allocated."""

    def gathered(self, own: torch.Tensor, process_group: dist.ProcessGroup) -> torch.Tensor:
        """``[ranks, n]``: what every rank has in ``own``, ``[n]``."""


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
    """``functional.linear`` under the argument names of ``torch.nn.functional.linear``."""
    return functional.linear(input, weight, bias)


# Functions whose sharded counterpart replaces them when a shard is the weight.
_SHARDED_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    F.embedding: functional.embedding,
}

# These ask for torch.Tensor.layout, which a shard's own ``layout`` hides: they get a plain (differentiable) alias.
_READ_TENSOR_LAYOUT = frozenset({torch.norm, torch.Tensor.norm})


# What reading ``param.grad`` calls, and reading and assigning ``param.data``.
_READ_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WRITE_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class ETPShardedParam(OneOfMany, torch.nn.Parameter):
    """One rank's shard of a weight. Its ``grad`` is a :class:`etp.shard_grad.ShardGrad`.

    Attributes:
        group: the process group whose rank r holds shard r.
        group_rank: this process's rank in ``group``, also once the group is gone.
        fqn: name in messages; the parameter's dotted name once a runtime has adopted its module.
        is_distributed_weight: marker of TE's ``DistributedWeight`` protocol.
    """

    group: dist.ProcessGroup
    group_rank: int
    fqn: str
    is_distributed_weight = True

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
        param._weight_group = None
        param._group_index = 0
        param._driver = None
        param._reduce_hooks = []
        param._accumulate_hooks = OrderedDict()
        param._reference = weakref.ref(param)
        param._data, param._former_versions = None, 0
        param._placeholder_due = False
        return param

    # Assigned in __new__; declared here for readers and type checkers.
    _layout: ShardLayout
    _weight_group: WeightGroup | None
    _group_index: int
    _driver: ShardDriver | None
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
    def weight_group(self) -> WeightGroup:
        """The group that this weight is gathered with."""
        if self._weight_group is None:
            raise EtpStateError(f"{self.fqn} belongs to no weight group; pass its module to etp.shard_module")
        return self._weight_group

    def join_group(self, group: WeightGroup, index: int) -> None:
        """Become weight ``index`` of a group; called once, when the group is constructed."""
        if self._weight_group is not None:
            raise EtpStateError(f"{self.fqn} is in group {self._weight_group.name} already")
        self._weight_group, self._group_index = group, index

    def attach(self, driver: ShardDriver, fqn: str) -> None:
        """Set the driver that runs this weight's collectives, and the weight's name."""
        self._driver, self.fqn = driver, fqn

    @property
    def has_driver(self) -> bool:
        """Whether a runtime drives this weight."""
        return self._driver is not None

    @property
    def driver(self) -> ShardDriver:
        """What runs this weight's collectives."""
        if self._driver is None:
            raise EtpStateError(f"{self.fqn} has no runtime yet; pass its module to etp.shard_module")
        return self._driver

    def local_shard(self) -> torch.Tensor:
        """The shard as a plain tensor of ``layout.shard_shape`` that shares storage and version counter."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach()

    def content_version(self) -> tuple[int, int]:
        """Changes when PyTorch counts a change of the shard, or of its ``data``, or when ``data`` is assigned."""
        with torch._C.DisableTorchFunctionSubclass():
            written = self._former_versions if self._data is None else self._former_versions + self._data._version
            return self._version + written, self.data_ptr()

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

    def placement(self) -> tuple[torch.dtype, torch.device]:
        """The shard's dtype and device; faster than reading the two attributes."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.dtype, self.device

    def gathered_with(self) -> Sequence[Any]:
        """The shards that are gathered together with this one, itself included, in the group's order."""
        return self.weight_group.shards

    def materialize(self) -> list[torch.Tensor]:
        """The full weights of this parameter's group, valid until the next weight of the same shape is gathered."""
        return self.driver.materialize(self.weight_group)

    def wgrad_buffers(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Buffers of the group's logical shapes to compute full gradients into; pass them to ``reduce_wgrads``."""
        group = self.weight_group
        return [self.driver.wgrad_buffer(group, index, dtype) for index in range(len(group.shards))]

    def reduce_wgrads(self, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Start reducing the group's full gradients (logical shapes); the sum arrives in ``grad`` or ``main_grad``.

        Returns:
            what to pass to autograd for each shard of the group: None, except under ``torch.autograd.grad``.
        """
        return self.driver.reduce_wgrads(self.weight_group, wgrads)

    def returns_gradients(self) -> bool:
        """Whether the current backward pass is a ``torch.autograd.grad`` that asks for one of these shards."""
        return self.driver.returns_gradients(self.weight_group)

    def full_tensor(self) -> torch.Tensor:
        """The full weight, of logical shape, newly allocated. Collective over the shard group."""
        return self.driver.gather_full(self.weight_group, self._group_index)

    def register_reduce_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook`` whenever a backward pass's gradient has been added to this shard."""
        self._reduce_hooks.append(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
        """Call ``hook(param)`` whenever ``param.grad`` has received a reduced gradient.

        The engine runs this hook, not autograd, which would call it before the reduction is done.
        """
        handle = RemovableHandle(self._accumulate_hooks)
        self._accumulate_hooks[handle.id] = hook
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
        """
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise TypeError(
                f"{self.fqn} is used by a Transformer Engine module under hooks on saved tensors, which replace the "
                "shard by a plain tensor: use torch.utils.checkpoint with use_reentrant=True, or Megatron's "
                "recomputation, instead of use_reentrant=False, and no offloading of activations by such hooks"
            )
        return self.materialize()

    def materialize_group_for_backward(self) -> list[torch.Tensor]:
        """See ``transformer_engine.pytorch.distributed_weight.DistributedWeight``."""
        return self.materialize()

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None] | torch.Tensor | None:
        """Reduce the full gradients into the shards; autograd gets None as a rule, see :meth:`reduce_wgrads`."""
        if isinstance(wgrads, torch.Tensor):
            return self.reduce_wgrads([wgrads])[0]
        return self.reduce_wgrads(wgrads)

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
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route ``linear`` and ``embedding`` to their sharded forms; refuse what ``etp/refusals.py`` lists.

        Results are plain tensors, except as ``etp/derived.py`` says.
        """
        if torch.compiler.is_dynamo_compiling():
            # Compiled, this frame would call func on the shard itself, which comes here again, for ever.
            torch._dynamo.skip_frame()
        if func == _READ_GRAD:
            return owned_grad(args[0], args[0]._reference)
        if func == _READ_DATA:
            return args[0]._shared_data()
        if func == _WRITE_DATA and isinstance(args[0], cls):
            args[0]._forget_data()
            # Memory that is assigned again may have changed meanwhile, or be other memory at that address.
            args[0]._former_versions += 1
        kwargs = kwargs or {}
        sharded = _SHARDED_FUNCTIONS.get(func)
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        if sharded is not None and isinstance(weight, cls):
            with torch._C.DisableTorchFunctionSubclass():
                return sharded(*args, **kwargs)
        if sharded is not None or func in REFUSED:
            raise TypeError(_refusal(func, (*args, *kwargs.values())))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READ_TENSOR_LAYOUT:
                args = [arg.view_as(arg) if isinstance(arg, cls) else arg for arg in args]
            result = func(*args, **kwargs)
        if type(result) is not torch.Tensor:
            return result
        operands = [*args, *kwargs.values()]
        shard = next((operand for operand in operands if isinstance(operand, cls)), None)
        # Outside of a model nothing is computed with it.
        return result if shard is None or not shard.has_driver else mark_derived(func, result, shard, operands)

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
