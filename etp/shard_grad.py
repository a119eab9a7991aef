"""The gradient of a shard: a tensor subclass that makes PyTorch's clipping and loss scaling see the whole gradient.

[Note: whole-gradient functions] Most operations on a gradient are element-wise, and correct on a shard: an optimizer
step, scaling, ``clip_grad_value_``. Three operations of PyTorch itself are not, and each goes through a function that a
tensor subclass can intercept:

- ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` call ``torch.linalg.vector_norm`` for each gradient, or
  ``torch._foreach_norm`` for all of them: these return the norm of the whole gradient, over the shard group, without
  padding;
- ``torch.amp.GradScaler`` checks for overflows with ``torch._amp_foreach_non_finite_check_and_unscale_``: this checks
  all ranks that share a shard group, so that either all of them skip the step or none does;
- ``zero_grad(set_to_none=False)`` writes zeros: this also discards the local sums of earlier microbatches, and what a
  backward pass that has failed was still adding. Other changes would not reach these sums and are refused until they
  are reduced.

Functions that choose rows by number are refused, because a shard's row 0 is another row of the weight on each rank.

The method ``norm`` and norms along a dimension are not intercepted: optimizers such as Adafactor and LAMB combine the
norms of a gradient and of its weight, and both must be of the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from etp.allowed import COMPUTES, changes_in_place, is_refused
from etp.errors import EtpStateError
from etp.refusals import BY_ROW, refuse_rows
from etp.shard import Shard, read_grad, write_grad

if TYPE_CHECKING:
    from etp.routes import Routes
    from etp.runtime import EtpRuntime


class ShardGrad(torch.Tensor):
    """A shard's ``grad``; see [Note: whole-gradient functions]. Operations on it return plain tensors."""

    # Weak: a gradient is reachable from its parameter through C++, where Python's collector sees no cycle.
    _owner: Callable[[], Shard | None]

    @classmethod
    def of(cls, grad: torch.Tensor, owner: Callable[[], Shard | None]) -> Self:
        """``grad`` as the gradient of a parameter, with the same memory and version counter."""
        with torch._C.DisableTorchFunctionSubclass():
            made = grad.as_subclass(cls)
        made._owner = owner
        return made

    @property
    def owner(self) -> Shard:
        """The parameter.

        Raises:
            EtpStateError: if it is gone.
        """
        owner = self._owner()
        if owner is None:
            raise EtpStateError("this gradient's sharded parameter is gone; keep the module, or clone the gradient")
        return owner

    def belongs_to(self, owner: Shard) -> bool:
        """Whether this is the gradient of ``owner``."""
        return self._owner() is owner

    def local_part(self) -> torch.Tensor:
        """This rank's rows as a plain tensor, without padding."""
        return plain(self)[: self.owner.layout.logical_rows(self.owner.group_rank)]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See [Note: whole-gradient functions]."""
        kwargs = kwargs or {}
        whole = _WHOLE_GRADIENT_FUNCTIONS.get(func)
        if whole is not None:
            return whole(*args, **kwargs)
        if any(issubclass(kind, Shard) for kind in types) and is_refused(func):
            # The shard among the arguments refuses it.
            return NotImplemented
        if func in COMPUTES and changes_in_place(func):
            _require_complete(args[0] if isinstance(args[0], (list, tuple)) else args[:1])
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func in _ALIASES:
            return cls.of(result, args[0]._owner)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A plain tensor, because a copy is not the gradient of any parameter."""
        copied = plain(self).detach().clone()
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor, which loads where this package is not installed."""
        return plain(self).__reduce_ex__(protocol)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor that shares memory and version counter; other tensors unchanged."""
    if not isinstance(tensor, ShardGrad):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def owned_grad(owner: Shard) -> ShardGrad | None:
    """``owner.grad`` as a :class:`ShardGrad`, converted in place if needed; the same object each time."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = read_grad(owner)
        if grad is None or (isinstance(grad, ShardGrad) and grad.belongs_to(owner)):
            return grad
        made = ShardGrad.of(grad, owner._reference)
        write_grad(owner, made)
        return made


def _require_complete(grads: Iterable[Any]) -> None:
    """Raise EtpStateError for a gradient to which sums or reductions are still to be added, unchanged."""
    for grad in grads:
        owner = grad._owner() if isinstance(grad, ShardGrad) else None
        if owner is not None and owner.has_driver:
            owner.driver.reductions.require_complete(owner.weight_group)


def _foreach_norm(
    tensors: Sequence[torch.Tensor],
    ord: Any = 2,  # noqa: A002
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """``torch._foreach_norm``; one collective for each shard group."""
    norms: dict[int, torch.Tensor] = {}
    parts: dict[int, torch.Tensor] = {}
    others = [index for index, tensor in enumerate(tensors) if not isinstance(tensor, ShardGrad)]
    if others:
        found = torch._foreach_norm([tensors[index] for index in others], ord, dtype=dtype)
        norms.update(zip(others, found, strict=True))
    buckets: dict[tuple[EtpRuntime, dist.ProcessGroup, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, ShardGrad):
            tensor.owner.driver.reductions.require_complete(tensor.owner.weight_group)
            key = (tensor.owner.driver, tensor.owner.group, tensor.device)
            buckets.setdefault(key, []).append(index)
            parts[index] = tensor.local_part()
    for (driver, process_group, _), indices in buckets.items():
        whole = _norms(driver.routes, [parts[index] for index in indices], process_group, float(ord))
        norms.update(
            (index, norm.to(dtype or tensors[index].dtype)) for index, norm in zip(indices, whole, strict=True)
        )
    return [norms[index] for index in range(len(tensors))]


def _norms(
    routes: Routes, parts: Sequence[torch.Tensor], group: dist.ProcessGroup, norm_type: float
) -> list[torch.Tensor]:
    """Norms of tensors that are distributed over the ranks of ``group``, equal on all of them. Collective.

    Args:
        routes: waits for the collective.
        parts: this rank's part of each tensor, all on one device; without padding, so possibly empty.
        group: the ranks that hold the parts.
        norm_type: p of the p-norm; inf and -inf for the largest and the smallest magnitude, 0 for the number of
            nonzero elements.

    Returns:
        One 0-dim tensor per part, in fp64 if any part is fp64, else in fp32.
    """
    wide = torch.float64 if any(part.dtype is torch.float64 for part in parts) else torch.float32
    filled = [part for part in parts if part.numel()]
    found = iter(torch._foreach_norm(filled, norm_type, dtype=wide) if filled else ())
    # The neutral element for an empty part: 0 for sums and maxima, inf for minima.
    nothing = parts[0].new_full((), 0.0 if norm_type >= 0 else float("inf"), dtype=wide)
    own = torch.stack([next(found) if part.numel() else nothing for part in parts])
    everyone = routes.gather_numbers(own, group, "all-gather of gradient norms")
    if norm_type == 0:
        return list(everyone.sum(dim=0).unbind())
    return list(torch.linalg.vector_norm(everyone, norm_type, dim=0).unbind())


def _vector_norm(
    x: torch.Tensor,
    ord: Any = 2,  # noqa: A002
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.linalg.vector_norm``: of the whole gradient over all elements, of this shard only along a dimension."""
    if dim is None and out is None and isinstance(x, ShardGrad):
        (norm,) = _foreach_norm([x], ord, dtype)
        return norm.view([1] * x.dim()) if keepdim else norm
    if dim is None and out is not None:
        raise TypeError("torch.linalg.vector_norm of a sharded gradient takes no out=; use its result")
    with torch._C.DisableTorchFunctionSubclass():
        result: torch.Tensor = torch.linalg.vector_norm(x, ord, dim, keepdim, dtype=dtype, out=out)
    return result


def _check_and_unscale(grads: Sequence[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """``torch._amp_foreach_non_finite_check_and_unscale_``: the same ``found_inf`` on all ranks of the shard groups."""
    owners = [grad.owner for grad in grads if isinstance(grad, ShardGrad)]
    for owner in owners:
        owner.driver.reductions.require_complete(owner.weight_group)
    with torch._C.DisableTorchFunctionSubclass():
        torch._amp_foreach_non_finite_check_and_unscale_(list(grads), found_inf, inv_scale)
    # Over all groups, whichever weights overflowed: experts in their own group must not skip a step alone. The flag of
    # one group reaches those after it.
    for driver in dict.fromkeys(owner.driver for owner in owners):
        for group in driver.process_groups:
            spread = partial(dist.all_reduce, found_inf, op=dist.ReduceOp.MAX, group=group, async_op=True)
            on_cpu = found_inf.device.type == "cpu"
            driver.routes.wait_for(spread, group, "all-reduce of the overflow flag", on_cpu)


def _zero(grad: torch.Tensor) -> torch.Tensor:
    _foreach_zero([grad])
    return grad


def _foreach_zero(grads: Sequence[torch.Tensor]) -> None:
    owners = [grad.owner for grad in grads if isinstance(grad, ShardGrad) and grad.owner.has_driver]
    for driver in dict.fromkeys(owner.driver for owner in owners):
        # A backward pass that has failed may have left reductions in flight, which add to the same memory.
        driver.passes.drop_abandoned()
    with torch._C.DisableTorchFunctionSubclass():
        torch._foreach_zero_(list(grads))
    for owner in owners:
        owner.driver.reductions.forget_sums(owner.weight_group)


def _by_row(func: Callable[..., Any]) -> Callable[..., Any]:
    def refusing(*args: Any, **kwargs: Any) -> Any:
        chosen_from = args[0] if args else kwargs["input"]
        owner = chosen_from._owner() if isinstance(chosen_from, ShardGrad) else None
        if owner is not None:
            refuse_rows(func, args, kwargs, owner)
            if changes_in_place(func):
                _require_complete([chosen_from])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return refusing


_WHOLE_GRADIENT_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{func: _by_row(func) for func in BY_ROW},
    torch.linalg.vector_norm: _vector_norm,
    torch._foreach_norm: _foreach_norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _check_and_unscale,
    torch.Tensor.zero_: _zero,
    torch.zero_: _zero,
    torch._foreach_zero_: _foreach_zero,
}

# Functions that return the gradient itself.
_ALIASES = frozenset({torch.Tensor.detach, torch.Tensor.data.__get__})  # type: ignore[attr-defined]
