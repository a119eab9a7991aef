"""Functions that a shard refuses, and the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


def named_functions(names: str, *owners: Any) -> frozenset[Callable[..., Any]]:
    """The functions of these names, separated by blanks, of every owner that has them."""
    return frozenset(getattr(owner, name) for owner in owners for name in names.split() if hasattr(owner, name))


# Ranks with the same seed would draw the same rows, and fan-in and fan-out would be those of the shard. The other
# functions of torch.nn.init call these.
INITIALISERS = named_functions(
    "normal_ uniform_ log_normal_ exponential_ bernoulli_ random_ cauchy_ geometric_", torch.Tensor
) | named_functions("normal_ uniform_ kaiming_uniform_", nn.init)
INITIALISERS |= frozenset({torch.eye})


BY_ROW = named_functions(
    "__getitem__ __setitem__ select index_select index_fill_ index_add_ index_copy_", torch, torch.Tensor
)
"""Functions that may choose rows of their first argument by number; see :func:`refuse_rows`."""


def refuse_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], shard: Any) -> None:
    """Raise TypeError if ``func`` chooses rows of a shard's data or gradient, whose numbers differ from the weight's.

    Slices can be read, and masks of the shard's own shape and columns also be written.

    Args:
        func: one of ``BY_ROW``.
        args: its arguments; the first one is the data or the gradient.
        kwargs: its keyword arguments.
        shard: the shard.
    """
    if shard.layout.num_shards == 1 or not shard.knows_copies:
        return
    if chooses_rows(func, args, kwargs, len(shard.layout.shape)):
        start, stop = shard.layout.logical_range(shard.group_rank)
        raise TypeError(
            f"{func.__name__} of rows of the data or the gradient of {shard!r}: they are numbered from 0 on every "
            f"rank, so each would take other rows of the weight. This rank has rows {start} to {stop}, without {stop}, "
            "in param.local_shard() and param.grad.local_part(), whose row 0 is the first of these"
        )


def chooses_rows(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], dims: int) -> bool:
    """Whether one of ``BY_ROW`` is called for rows by number, as :func:`refuse_rows` counts them.

    Args:
        func: one of ``BY_ROW``.
        args: its arguments; the first one is the tensor.
        kwargs: its keyword arguments.
        dims: dimensions of the tensor.
    """
    if func in {torch.Tensor.__getitem__, torch.Tensor.__setitem__}:
        index = args[1]
        first = index[0] if isinstance(index, tuple) and index else index
        if isinstance(first, torch.Tensor):
            return first.dtype is not torch.bool or first.dim() < 2
        if isinstance(first, slice):
            return func is torch.Tensor.__setitem__ and first != slice(None)
        return first is not Ellipsis and first is not None and first != ()
    return kwargs.get("dim", args[1] if len(args) > 1 else 0) in {0, -dims}


def refusal(func: Callable[..., Any], shards: Iterable[Any]) -> str:
    """The message for ``func`` called with ``shards``, which may be empty if they are inside a list."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = func.__self__.__name__  # type: ignore[attr-defined]  # of the property, whose getter this is
    which = ", ".join(repr(shard) for shard in shards) or "a shard inside a list"
    if func in INITIALISERS:
        return (
            f"{name} on {which}: a shard is not its weight, and would be drawn otherwise than the unsharded one. "
            "Initialise before etp.shard_module, or pass the values to etp.load_full_state_dict"
        )
    return (
        f"{name} on {which}: a shard is not its weight. Use torch.nn.functional.linear or embedding, which gather, "
        "param.full_tensor(), or param.local_shard() for this rank's rows. If it is a module's own code that needs the "
        "whole weight, pass the module in replicated_modules of etp.shard_module"
    )


def meet_whole_weight(operands: Iterable[Any], shard: Any) -> bool:
    """Whether a tensor of the whole weight's shape is among ``operands``, to which a shard of it does not fit."""
    shape = shard.layout.shape
    if shape == shard.layout.shard_shape:
        return False
    return any(isinstance(operand, torch.Tensor) and tuple(operand.shape) == shape for operand in operands)
