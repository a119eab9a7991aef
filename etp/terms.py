"""Scales the gradients of loss terms of the weights themselves, such as a penalty, if gradients are summed over ranks.

Each rank has the term in its loss, so the term's gradient must count once per rank. It reaches the shard through
autograd, which adds it to any other gradient there, and one that a reduction has summed already must not be scaled.
So a term's gradient is multiplied where it leaves the term's arithmetic, and the shard's ``term_counted`` is set. It is
the number of the graph task, because one that fails never delivers the gradient.
Within the forward of an autograd function, autograd is off: the function's use of the shard is only noted, in
``used_by_function``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from etp.allowed import COMPUTES, changes_in_place
from etp.derived import reaches_node
from etp.shard import Shard


class _Counted(torch.autograd.Function):
    """Identity on a shard; multiplies the gradient by ``times``."""

    @staticmethod
    def forward(ctx: Any, shard: Any, times: int) -> torch.Tensor:
        ctx.shard, ctx.times = shard, times
        alias: torch.Tensor = shard.local_shard()
        return alias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.shard.term_counted = torch._C._current_graph_task_id()
        return grad * ctx.times, None


def call_with_counted(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` so that the gradient of each shard among its arguments, if it is summed, counts once per rank.

    Args:
        func: a PyTorch function.
        args: as ``__torch_function__`` gets them; shards may be inside of lists and tuples.
        kwargs: as ``__torch_function__`` gets them.

    Returns:
        what ``func`` returns.
    """
    if func not in COMPUTES or reaches_node(func, args):
        return func(*args, **kwargs)
    if not torch.is_grad_enabled():
        if inside_applied_function():
            for value in (*args, *kwargs.values()):
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(each, Shard) and each.used_by_function in {None, -1}:
                        each.used_by_function = torch._C._current_graph_task_id()
        return func(*args, **kwargs)
    counted: dict[int, tuple[Any, torch.Tensor]] = {}

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            # Not of its own class: a named tuple is made from several arguments.
            return (list if isinstance(value, list) else tuple)(map(replaced, value))
        if not isinstance(value, Shard) or not value.requires_grad or not value.has_driver:
            return value
        times = value.layout.num_shards if value.driver.sums_gradients else 1
        if times == 1:
            return value
        recomputing = torch._C._current_graph_task_id() != -1
        if recomputing and value.used_by_function == -1:
            # The function was reentrant checkpointing, which hid this term in the forward pass.
            value.used_by_function = None
        alias: torch.Tensor = _Counted.apply(value, times)
        counted[id(alias)] = value, alias
        return alias

    # The tensor that is changed in place is not replaced.
    changed = 1 if changes_in_place(func) else 0
    rest = {name: replaced(value) for name, value in kwargs.items()}
    result = func(*args[:changed], *map(replaced, args[changed:]), **rest)
    # If ``func`` returned its argument, as ``p.float()`` may, return the shard.
    original, _ = counted.get(id(result), (result, None))
    return original


def inside_applied_function() -> bool:
    """Whether the calling thread is in the forward of an autograd function, which turns off both modes of autograd.

    ``torch.no_grad()`` leaves forward-mode autograd on.
    """
    return not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
