"""Terms of a loss that are computed from the weights themselves, such as a penalty, where ranks' gradients are summed.

Each rank has the term in its loss, so its gradient counts once for each rank. It comes to the shard through autograd,
which adds it to whatever else comes that way, and a gradient that a reduction has summed already must not count again.
So a term's gradient is multiplied where it leaves the arithmetic, and the shard is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from etp.allowed import COMPUTES
from etp.derived import reaches_node


class _Counted(torch.autograd.Function):
    """A shard as it is, whose gradient counts ``times``."""

    @staticmethod
    def forward(ctx: Any, shard: Any, times: int) -> torch.Tensor:
        ctx.shard, ctx.times = shard, times
        alias: torch.Tensor = shard.local_shard()
        return alias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.shard.term_counted = True
        return grad * ctx.times, None


def call_with_counted(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], times: Callable[[Any], int]
) -> Any:
    """Call ``func``, so that gradients of the shards among its arguments count as often as ``times`` says of each.

    Args:
        func: a PyTorch function.
        args: as ``__torch_function__`` gets them; shards may be inside of lists and tuples.
        kwargs: the same.
        times: how often the gradient of a tensor counts: 1 if it is no shard.

    Returns:
        what ``func`` returns.
    """
    if func not in COMPUTES or not torch.is_grad_enabled() or reaches_node(func, args):
        return func(*args, **kwargs)
    counted: dict[int, tuple[Any, torch.Tensor]] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(replaced, value))
        if not isinstance(value, torch.Tensor) or not value.requires_grad or (count := times(value)) == 1:
            return value
        alias: torch.Tensor = _Counted.apply(value, count)
        counted[id(alias)] = value, alias
        return alias

    # What is changed in place stays what it is.
    changed = 1 if _is_in_place(func) else 0
    rest = {name: replaced(value) for name, value in kwargs.items()}
    result = func(*args[:changed], *map(replaced, args[changed:]), **rest)
    # A copy that would be equal, such as that of ``p.float()``, is no copy but the shard.
    original, _ = counted.get(id(result), (result, None))
    return original


def _is_in_place(func: Callable[..., Any]) -> bool:
    name: str = func.__name__
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
