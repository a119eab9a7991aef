"""Tensors that were computed from a shard element by element, and must not be used as its weight.

Arithmetic on shards is right for everything that treats each element alone, such as optimizer steps and penalties. In a
model it is not: ``F.linear(x, weight.float())`` and ``x + positions.weight`` have plausible shapes where padding leaves
all rows to the first rank, and then other ranks compute with zeros. So a result larger than the shard, in which its
rows were spread over other data, is refused. One of the shard's size refuses what a shard refuses, and to be a weight.
The latter holds in forward passes and wherever autograd records; optimizers compute with plain tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F

from etp.errors import EtpStateError
from etp.refusals import INITIALISERS, REFUSED, named_functions, refusal

_AS_WEIGHT = frozenset({F.linear, F.embedding})

# The result holds none of the shard's values, or the caller has asked for this rank's.
_UNRELATED = named_functions(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full "
    "new_tensor new_empty_strided detach",
    torch,
    torch.Tensor,
)


# The usual way to the node that accumulates a parameter's gradient, by ``param.expand_as(param).grad_fn``.
_REACHES_NODE = frozenset({torch.Tensor.expand_as})


class DrivenShard(Protocol):
    """What this file needs from a shard (:class:`etp.param.ETPShardedParam`) that a runtime drives."""

    @property
    def driver(self) -> Any:
        """The runtime; its ``in_forward`` tells whether the model computes."""

    def numel(self) -> int:
        """Number of elements."""


class _CopiedPlain(torch.Tensor):
    """A tensor that knows a shard, and whose copies do not: a shard cannot be copied or pickled with it."""

    _source: DrivenShard

    def _plain(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy to a plain tensor, where PyTorch copies at all."""
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a plain tensor, as state dicts do."""
        return self._plain().__reduce_ex__(protocol)


class ShardDerived(_CopiedPlain):
    """What was computed from a shard: for arithmetic and reductions, not for a model's layers."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise EtpStateError for what needs the whole weight; mark the results of other functions."""
        kwargs = kwargs or {}
        operands = [*args, *kwargs.values()]
        derived = [operand for operand in operands if isinstance(operand, cls)]
        if func in REFUSED or func in _AS_WEIGHT:
            # No TypeError, which Tensor's operators would turn into one without these words.
            raise EtpStateError(refusal(func, derived))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return mark_derived(func, result, derived[0]._source, operands) if derived else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What it was computed from; no values, because this rank's say little."""
        return f"a tensor computed from {self._source!r}"


class ShardData(_CopiedPlain):
    """What ``data`` of a shard is: for all that a tensor is for, but not to be drawn anew.

    ``weight.data.normal_()`` is how many models initialise. Ranks with the same seed would draw the same rows.
    """

    @classmethod
    def of(cls, data: torch.Tensor, source: DrivenShard) -> Self:
        """``data`` as that of the shard ``source``: the same memory and version counter."""
        # As detach() makes it; as_subclass would make a view, which data never is.
        made = torch.Tensor._make_subclass(cls, data)
        made._source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise TypeError for what would draw it anew; results of other functions are plain tensors."""
        kwargs = kwargs or {}
        if any(kind is not cls for kind in types):
            return NotImplemented
        if func in INITIALISERS:
            operands = (*args, *kwargs.values())
            raise TypeError(refusal(func, [operand._source for operand in operands if isinstance(operand, cls)]))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def mark_derived(func: Any, result: Any, source: DrivenShard, operands: Iterable[Any]) -> Any:
    """The ``result`` of ``func``, as a :class:`ShardDerived` where it could be mistaken for a weight.

    Args:
        func: the PyTorch function that was called.
        result: what it returned.
        source: the shard that ``operands`` have, or were computed from.
        operands: the function's arguments.

    Raises:
        EtpStateError: if the result is larger than the shard.
    """
    if type(result) is not torch.Tensor or func in _UNRELATED or _is_collective(func):
        return result
    with torch._C.DisableTorchFunctionSubclass():
        size = source.numel()
    if result.numel() > size:
        raise EtpStateError(refusal(func, [source]))
    same = func not in _REACHES_NODE and result.numel() == size and result.dim() > 1 and result.is_floating_point()
    if not same or any(result is operand for operand in operands):
        return result
    if not torch.is_grad_enabled() and not source.driver.in_forward:
        return result
    derived = result.as_subclass(ShardDerived)
    derived._source = source
    return derived


def _is_collective(func: Any) -> bool:
    """Whether it is one of ``torch.distributed``, which the caller uses to put the ranks' shards together."""
    return "c10d_functional" in (getattr(func, "__module__", None) or "")
