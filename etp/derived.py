"""Tensors that were computed from a shard element by element, and must not be used as its weight.

Arithmetic on shards is correct if it treats each element alone, as optimizer steps and penalties do. In a model's
layers it is not: where padding leaves all rows to the first rank, ``F.linear(x, weight.float())`` and
``x + positions.weight`` have plausible shapes, but other ranks compute with zeros. So a result larger than the shard,
into which the shard was broadcast, is refused. A result of the shard's size is refused as a weight, and by the
functions that refuse a shard. This holds in forward passes and wherever autograd records; optimizers compute with plain
tensors. In forward passes it also holds for ``weight.data`` and ``weight.detach()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

from etp.allowed import ALLOWED, is_refused
from etp.differentiate import RUNS_BACKWARD, run_backward
from etp.errors import EtpStateError
from etp.refusals import BY_ROW, INITIALISERS, meet_whole_weight, named_functions, refusal, refuse_rows
from etp.shard import Shard
from etp.shard_copy import AS_WEIGHT, ASKED_BY_WRITERS, COPIES, Cut, ShardCopy, WithCut, refuse_writers

# Functions whose result holds none of the shard's values.
_UNRELATED = named_functions(
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor new_empty_strided",
    torch,
    torch.Tensor,
)

_DETACH = frozenset({torch.detach, torch.Tensor.detach})


# The usual ways to get the node that accumulates a parameter's gradient: ``param.expand_as(param).grad_fn``, and the
# call in ``torch.autograd.graph.get_gradient_edge``.
_REACHES_NODE = frozenset({torch.Tensor.expand_as, torch.Tensor.view_as})


# A shard's last rows may be padding, which is no part of the weight.
SUMS = named_functions("sum nansum count_nonzero any all", torch, torch.Tensor)
"""Functions that :func:`without_padding` prepares the arguments of."""


# Functions whose result may have different rows from the shard's.
_RESHAPES = named_functions("view view_as reshape reshape_as flatten ravel", torch, torch.Tensor)


class _OfShard(WithCut):
    """A tensor with a reference to a shard. Copies only record which shard it was, because a shard cannot be copied."""

    _source: Shard

    @property
    def etp_cut(self) -> Cut | None:
        """Which shard it is; None if its shape differs from the shard's, or copies of the shard do not record it."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._source.cut if self._source.knows_copies and self.shape == self._source.shape else None


class ShardDerived(_OfShard):
    """A tensor computed from a shard, for arithmetic and reductions, but not for a model's layers."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise EtpStateError for what needs the whole weight; mark the results of other functions."""
        kwargs = kwargs or {}
        if func in RUNS_BACKWARD:
            return run_backward(func, args, kwargs)
        operands = [*args, *kwargs.values()]
        derived = [operand for operand in operands if isinstance(operand, cls)]
        if is_refused(func):
            # Not a TypeError: Tensor's operators would replace its message.
            raise EtpStateError(refusal(func, derived))
        if func in ASKED_BY_WRITERS:
            refuse_writers(func, derived[0].etp_cut)
        if func in SUMS:
            args, kwargs = without_padding(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except RuntimeError as error:
                if not derived or not meet_whole_weight(operands, derived[0]._source):
                    raise
                raise EtpStateError(refusal(func, derived)) from error
        return mark_result(func, result, derived[0]._source, operands) if derived else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """What it was computed from; no values, because one rank's say little."""
        return f"a tensor computed from {self._source!r}"


class ShardData(_OfShard):
    """The ``data`` of a shard: usable like any tensor, except as a weight, and not initialised at random.

    Many models initialise with ``weight.data.normal_()``. Ranks with the same seed would draw the same rows. In the
    model's forward pass, the same functions are refused as on a tensor that was computed from the shard.
    """

    @classmethod
    def of(cls, data: torch.Tensor, source: Shard) -> Self:
        """``data`` of the shard ``source``, with the same memory and version counter."""
        # Like detach(); as_subclass would make a view, which ``data`` never is.
        made = torch.Tensor._make_subclass(cls, data)
        made._source = source
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse random initialisers and use as a weight. Copies record which shard they are; other results are plain.

        Raises:
            TypeError: for a random initialiser, or rows that are chosen by number.
            EtpStateError: for use as a weight, and in forward passes for what needs the whole weight.
        """
        kwargs = kwargs or {}
        if any(kind is not cls for kind in types):
            return NotImplemented
        operands = (*args, *kwargs.values())
        sources = [operand._source for operand in operands if isinstance(operand, cls)]
        if func in INITIALISERS:
            raise TypeError(refusal(func, sources))
        if func in BY_ROW:
            chosen_from = args[0] if args else kwargs["input"]
            if isinstance(chosen_from, cls):
                refuse_rows(func, args, kwargs, chosen_from._source)
        cut = [source for source in sources if source.layout.num_shards > 1]
        in_layers = [source for source in cut if source.has_driver and source.driver.in_forward]
        if (func in AS_WEIGHT and cut) or (in_layers and is_refused(func)):
            raise EtpStateError(refusal(func, cut))
        if func in ASKED_BY_WRITERS:
            refuse_writers(func, args[0].etp_cut)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if in_layers:
            return mark_result(func, result, in_layers[0], operands)
        source = args[0]._source if func in COPIES and isinstance(args[0], cls) else None
        if source is None or not source.knows_copies or not isinstance(result, torch.Tensor):
            return result
        return ShardCopy.of(result, source.cut)


def without_padding(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a sum over a shard, or over what was computed from it, without the shard's rows of padding.

    Args:
        args: as ``__torch_function__`` gets them.
        kwargs: as ``__torch_function__`` gets them.
    """
    summed = args[0] if args else kwargs["input"]
    source = summed._source if isinstance(summed, ShardDerived) else summed
    if not isinstance(source, Shard) or source.padding == 0:
        return args, kwargs
    layout = source.layout
    rows = layout.shard_rows - source.padding
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(summed.shape)
    if shape == layout.shard_shape:
        cut = summed.narrow(0, 0, rows)
    elif len(shape) == 1 or (len(args) <= 1 and not {"dim", "axis"} & kwargs.keys()):
        cut = summed.flatten().narrow(0, 0, rows * layout.row_numel)
    else:
        return args, kwargs
    return ((cut, *args[1:]), kwargs) if args else ((), {**kwargs, "input": cut})


def reaches_node(func: Any, operands: Sequence[Any]) -> bool:
    """Whether ``func`` is called with a single tensor, to get the node that accumulates its gradient."""
    return func in _REACHES_NODE and all(operand is operands[0] for operand in operands)


def mark_result(func: Any, result: Any, source: Shard, operands: Sequence[Any]) -> Any:
    """The ``result`` of ``func``, as :class:`ShardDerived` if it could pass for a weight, or :class:`ShardCopy`.

    Args:
        func: the PyTorch function that was called.
        result: what it returned.
        source: the shard that is among ``operands``, or that they were computed from.
        operands: the function's arguments.

    Raises:
        EtpStateError: if the result is larger than the shard.
    """
    if type(result) is not torch.Tensor or func in _UNRELATED or func not in ALLOWED:
        return result
    with torch._C.DisableTorchFunctionSubclass():
        shape = source.shape
    size = shape.numel()
    if result.numel() > size:
        raise EtpStateError(refusal(func, [source]))
    # Megatron's optimizers cut flat views of shards.
    dims = 0 if source.knows_copies else 1
    same = result.numel() == size and result.dim() > dims and result.is_floating_point()
    if not same or reaches_node(func, operands) or any(result is operand for operand in operands):
        return result
    reshaped = source.knows_copies and func in _RESHAPES and result.shape != shape
    plain = not torch.is_grad_enabled() and not source.driver.in_forward and not reshaped
    if plain or (func in _DETACH and not source.driver.in_forward):
        # The caller wants this rank's shard; a copy records which one it is.
        is_copy = func in COPIES and source.knows_copies and result.shape == shape
        return ShardCopy.of(result, source.cut) if is_copy else result
    derived = result.as_subclass(ShardDerived)
    derived._source = source
    return derived
