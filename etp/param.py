"""A sharded weight as an ``nn.Parameter``: its interface for consumers.

The parameter's data is this rank's shard. Its :class:`etp.group.WeightGroup` has the weights that are gathered with it,
and its driver (:class:`etp.runtime.EtpRuntime`) decides when. There are three kinds of consumers:

- ``torch.nn.functional.linear`` and ``embedding``, by name, so any module that calls them works unchanged;
- Transformer Engine modules, through its ``DistributedWeight`` protocol (TE PR 3005);
- direct use: :meth:`ETPShardedParam.full_tensor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F

from etp import functional
from etp.allowed import ALLOWED, is_refused
from etp.derived import SUMS, ShardData, mark_result, without_padding
from etp.differentiate import RUNS_BACKWARD, run_backward
from etp.errors import EtpStateError
from etp.formats.base import WeightFormat
from etp.layout import ShardLayout
from etp.refusals import meet_whole_weight, refusal
from etp.shard import Shard, own_rank, read_grad, uncompiled, write_grad
from etp.shard_grad import owned_grad
from etp.te import active_format, kept_for_backward, overwrites_main_grad, refuse_modified_weight
from etp.terms import call_with_counted

# Functions whose sharded counterpart replaces them when a shard is the weight.
_SHARDED_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: functional.linear,
    F.embedding: functional.embedding,
}

_NUMEL = frozenset({torch.numel, torch.Tensor.numel, torch.Tensor.nelement})

# Called when ``param.data`` is read or assigned.
_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WRITE_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class ETPShardedParam(Shard):
    """One rank's shard of a weight. Its ``grad`` is a :class:`etp.shard_grad.ShardGrad`.

    Attributes:
        is_distributed_weight: marker of TE's ``DistributedWeight`` protocol.
    """

    is_distributed_weight = True
    _format: WeightFormat | None = None
    """The last format in which a forward pass of Transformer Engine has asked for the weight."""

    @classmethod
    def from_full(cls, weight: torch.Tensor, group: dist.ProcessGroup, pad_for_alignment: int = 16) -> Self:
        """Cut this rank's shard out of a full weight, whose values must be equal on all ranks."""
        rank = own_rank(group)
        layout = ShardLayout(tuple(weight.shape), dist.get_world_size(group), pad_for_alignment)
        # Even inside inference mode, whose tensors do not count their changes.
        with torch.inference_mode(False):
            return cls(cut_shard(weight.detach(), layout, rank), layout, group, weight.requires_grad)

    def numel(self) -> int:
        """Elements of the whole weight, without padding, so that ``sum(p.numel() for p in ...)`` counts the model's.

        ``shape`` and everything else describe the shard, which has ``local_shard().numel()`` elements.
        """
        return math.prod(self._layout.shape)

    nelement = numel

    # Without __torch_function__, which takes ten times as long: Megatron reads and assigns it after each reduction.
    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the shard, a :class:`etp.shard_grad.ShardGrad`."""
        if torch._C._is_torch_function_enabled():
            return owned_grad(self)
        return read_grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None and torch._C._is_torch_function_enabled() and self.has_driver:
            self.driver.reductions.require_complete(self.weight_group)
        with torch._C.DisableTorchFunctionSubclass():
            write_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _shared_data(self) -> torch.Tensor:
        """The tensor that ``data`` returns. All have one version counter, so that writes through them are counted.

        PyTorch's ``data`` is an alias with a new version counter each time. A layer that writes to it before it
        computes, such as one with bounded weights, would compute with weights gathered before the write.
        """
        with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
            if self._data is None or self._data.data_ptr() != self.data_ptr():
                self._forget_data()
                self._data = self.data
            return ShardData.of(self._data, self)

    def materialize(self) -> list[torch.Tensor]:
        """The full weights of this parameter's group, of logical shape, valid until the next gather of that shape."""
        return self.driver.gathers.visit(self.weight_group)

    def reduce_wgrads(self, wgrads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Start reducing the group's full gradients (logical shapes); the sum arrives in ``grad`` or ``main_grad``.

        Returns:
            what to pass to autograd for each shard of the group: None, except under ``torch.autograd.grad``.
        """
        return self.driver.reductions.take(self.weight_group, wgrads)

    def full_tensor(self) -> torch.Tensor:
        """The full weight, of logical shape, newly allocated. Collective over the shard group."""
        return self.driver.gathers.full(self.weight_group, self._group_index)

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

    # TE's DistributedWeight protocol ------------------------------------------------------------------------

    def materialize_group_for_forward(self) -> list[torch.Tensor]:
        """See ``transformer_engine.pytorch.distributed_weight.DistributedWeight``.

        Raises:
            TypeError: under hooks on saved tensors, which would pass TE's backward a plain tensor instead of the shard.
            ValueError: under a quantization recipe that sharded weights do not support, with the way out.
        """
        format_ = active_format(self.fqn, self._format)
        if format_ is not None:
            self._format = format_
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise TypeError(
                f"{self.fqn} is used by a Transformer Engine module under hooks on saved tensors, which replace the "
                "shard by a plain tensor: use torch.utils.checkpoint with use_reentrant=True, or Megatron's "
                "recomputation, instead of use_reentrant=False, and no offloading of activations by such hooks"
            )
        return self.driver.gathers.visit(self.weight_group, format_)

    def materialize_group_for_backward(self) -> list[torch.Tensor]:
        """See ``transformer_engine.pytorch.distributed_weight.DistributedWeight``.

        In the precision of the forward pass that is differentiated: others may have used the weight since in another.

        Raises:
            ValueError: if a debug feature of Transformer Engine modifies the weight for the backward pass.
        """
        kept = kept_for_backward()
        dtype: torch.dtype | None = getattr(kept, "activation_dtype", None)
        if dtype is None:
            return self.driver.gathers.visit(self.weight_group, self.weight_group.format, transposed=True)
        if kept.debug:
            refuse_modified_weight(self.fqn, kept)
        # Under an override, which only recipes have, TE computes its backward pass as without quantization.
        format_ = self._format if kept.fp8 or kept.backward_override is not None else None
        weights = self.driver.gathers.visit(self.weight_group, format_, transposed=True)
        if format_ is None and dtype is not self.dtype:
            # Under torch.autocast, TE casts a weight in the forward pass and keeps the result, unless it is sharded.
            return [weight.to(dtype) for weight in weights]
        return weights

    def finalize_group_grads(
        self, wgrads: torch.Tensor | Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None] | torch.Tensor | None:
        """Reduce the full gradients into the shards. Usually returns None for autograd; see :meth:`reduce_wgrads`.

        Transformer Engine calls it last, when its GEMMs have been enqueued.
        """
        if self._format is not None:
            self.weight_group.release_derived()
        overwrite = overwrites_main_grad(kept_for_backward(), self)
        if isinstance(wgrads, torch.Tensor):
            return self.driver.reductions.take(self.weight_group, [wgrads], overwrite=overwrite)[0]
        return self.driver.reductions.take(self.weight_group, wgrads, overwrite=overwrite)

    def grad_buffer(self) -> torch.Tensor:
        """A buffer of the full weight's shape for a weight-gradient GEMM that fuses the accumulation.

        Its dtype is that of ``main_grad`` if there is one, else that of the shard. Transformer Engine then passes
        autograd a tensor with arbitrary content as the gradient.
        """
        self.placeholder_due = torch._C._current_graph_task_id()
        main_grad: torch.Tensor | None = getattr(self, "main_grad", None)
        dtype = self.dtype if main_grad is None else main_grad.dtype
        return self.driver.reductions.buffer(self.weight_group, self._group_index, dtype)

    # Python protocols ---------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route ``linear`` and ``embedding`` to their sharded forms; refuse what ``etp/allowed.py`` does not list.

        Results are plain tensors, except as ``etp/derived.py`` says.
        """
        if torch.compiler.is_dynamo_compiling():
            # If compiled, it would call ``func`` on the shard itself without end.
            return uncompiled(cls.__torch_function__, func, types, args, kwargs)
        kwargs = kwargs or {}
        sharded = _SHARDED_FUNCTIONS.get(func)
        if sharded is not None and isinstance(kwargs.get("weight", args[1] if len(args) > 1 else None), cls):
            with torch._C.DisableTorchFunctionSubclass():
                return sharded(*args, **kwargs)
        if func == _READ_DATA:
            return args[0]._shared_data()
        if func == _WRITE_DATA and isinstance(args[0], cls):
            args[0]._forget_data()
            # Memory that was assigned before may have changed since, or be other memory at the same address.
            args[0]._former_versions += 1
        if func in RUNS_BACKWARD:
            return run_backward(func, args, kwargs)
        if func not in ALLOWED and (sharded is not None or is_refused(func)):
            if func in _NUMEL:
                return args[0].numel()
            raise TypeError(_refusal(func, (*args, *kwargs.values())))
        if func in SUMS:
            args, kwargs = without_padding(args, kwargs)
        operands = [*args, *kwargs.values()]
        shard = next((operand for operand in operands if isinstance(operand, cls)), None)
        result = _called(func, args, kwargs, shard)
        # Without a driver, the shard is in no model, so no layer can use the result.
        if type(result) is torch.Tensor and shard is not None and shard.has_driver:
            result = mark_result(func, result, shard, operands)
        return result

    # Methods, because Tensor's own operator turns a TypeError of __torch_function__ into one without our message.
    def __matmul__(self, other: Any) -> NoReturn:
        """Refused: a shard is not the whole weight."""
        raise TypeError(_refusal(torch.matmul, (self, other)))

    def __rmatmul__(self, other: Any) -> NoReturn:
        """Refused: a shard is not the whole weight."""
        raise TypeError(_refusal(torch.matmul, (other, self)))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused: a copy would need its own runtime and process group."""
        raise TypeError(
            f"{self.fqn} is a shard tied to its process group and cannot be deep-copied; copy the module before "
            "etp.shard_module, or use etp.full_state_dict"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused: pickle state dicts, not sharded parameters."""
        raise TypeError(
            f"{self.fqn} is a shard tied to its process group and cannot be pickled; save module.state_dict() "
            "(shards) or etp.full_state_dict(module) instead"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Name, rows, dtype and device; no values, because a shard's values tell little."""
        start, stop = self.layout.logical_range(self.group_rank)
        return (
            f"ETPShardedParam({self.fqn}: rows {start}:{stop} of {self.layout.shape}, shard "
            f"{self.group_rank} of {self.layout.num_shards}, {self.dtype}, {self.device})"
        )


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any], shard: ETPShardedParam | None) -> Any:
    """The result of a function of plain tensors. ``shard`` is one of the arguments, if any is not inside a list."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return call_with_counted(func, args, kwargs)
        except RuntimeError as error:
            operands = (*args, *kwargs.values())
            if shard is None or not meet_whole_weight(operands, shard):
                raise
            raise EtpStateError(_refusal(func, operands)) from error


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
