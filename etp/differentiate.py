"""Runs ``backward`` and ``torch.autograd.grad`` when a shard is among their arguments.

``backward(inputs=...)`` and ``torch.autograd.grad`` dispatch to a shard's ``__torch_function__``. If they were called
there with ``__torch_function__`` turned off, it would stay off for the whole backward pass, and a recomputed layer
would compute with this rank's shard in place of its weight. So they are called with plain tensors and with edges of
the graph instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.overrides import has_torch_function

_POSITIONAL: dict[Callable[..., Any], tuple[str, ...]] = {
    torch.autograd.backward: ("tensors",),
    torch.autograd.grad: ("outputs", "inputs"),
    torch.Tensor.backward: ("self",),
}

RUNS_BACKWARD = frozenset(_POSITIONAL)
"""The functions that :func:`run_backward` is for."""

_GRADIENTS = ("gradient", "grad_tensors", "grad_outputs")


def run_backward(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` without tensors that have a ``__torch_function__``, and return its result.

    Args:
        func: one of :data:`RUNS_BACKWARD`.
        args: as ``__torch_function__`` gets them.
        kwargs: as ``__torch_function__`` gets them.
    """
    call = {**dict(zip(_POSITIONAL[func], args, strict=False)), **kwargs}
    for name in (_POSITIONAL[func][0], *_GRADIENTS):
        if call.get(name) is not None:
            call[name] = _each(_plain, call[name])
    inputs: Any = call.get("inputs")
    if inputs is not None:
        call["inputs"] = _each(_edge if func is torch.autograd.grad else _accumulated, inputs)
    # PyTorch does not make zeros for inputs that are given as edges.
    fills = call.pop("materialize_grads", False)
    found = func(**call)
    if not fills:
        return found
    return tuple(
        torch.zeros_like(_plain(of), requires_grad=call["create_graph"]) if grad is None else grad
        for grad, of in zip(found, inputs, strict=True)
    )


def is_asked_for(error: RuntimeError) -> bool:
    """Whether autograd raised ``error`` about a leaf because ``torch.autograd.grad`` returns that leaf's gradient."""
    return "autograd.grad" in str(error)


def _each(change: Callable[[Any], Any], tensors: Any) -> Any:
    return change(tensors) if isinstance(tensors, torch.Tensor) else [change(tensor) for tensor in tensors]


def _plain(tensor: Any) -> Any:
    if not _is_overriding(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _edge(tensor: Any) -> Any:
    if not _is_overriding(tensor):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor)


def _accumulated(tensor: Any) -> Any:
    """The edge of a tensor whose ``grad`` receives the gradient, even if the tensor is not a leaf."""
    if _is_overriding(tensor) and not tensor.is_leaf:
        tensor.retain_grad()
    return _edge(tensor)


def _is_overriding(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and has_torch_function((tensor,))
