"""Differentiable operations on sharded weights: gather, compute, gather again, reduce.

Each runs the same kernels on the same full weight as its unsharded counterpart, so its output is bitwise equal.
The shard, never the gathered weight, is kept for backward. Under ``torch.autocast`` the gathered weight is cast
where the unsharded one would be, and its gradient is reduced in the autocast dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import is_
from typing import Any

import torch
import torch.nn.functional as F

from etp.differentiate import is_asked_for
from etp.errors import EtpStateError
from etp.shard import Shard, needs_grad, uncompiled


def _require_group(weights: Sequence[Any]) -> None:
    """Raise ValueError unless these are all weights of one group, in its order.

    The group's weights are gathered and reduced by position, so any others would silently be replaced by them.
    """
    group = weights[0].weight_group.shards
    if len(group) != len(weights) or not all(map(is_, group, weights)):
        raise ValueError(
            f"a layer computes with {_names(weights)}, but {_names(group)} are gathered together: layers may share all "
            "of their weights, in one order, or none"
        )


def _names(weights: Sequence[Shard]) -> str:
    return ", ".join(weight.fqn for weight in weights)


def remember(use: Any, weights: Sequence[Shard]) -> None:
    """Record on ``use``, such as the context of an autograd function, which weights a forward pass computes with."""
    # Not save_for_backward: under hooks on saved tensors, as in activation checkpointing, it returns plain tensors.
    use.weights = weights
    with torch._C.DisableTorchFunctionSubclass():
        use.versions = [weight._version for weight in weights]


def require_unchanged(ctx: Any) -> None:
    """Raise EtpStateError if the weights changed since :func:`remember`: a gradient depends on their values."""
    with torch._C.DisableTorchFunctionSubclass():
        current = [weight._version for weight in ctx.weights]
    if current != ctx.versions:
        changed = next(i for i, version in enumerate(ctx.versions) if version != current[i])
        raise EtpStateError(
            f"{ctx.weights[changed].fqn} was modified by an inplace operation between its forward (version "
            f"{ctx.versions[changed]}) and its backward (version {current[changed]}); step the optimizer after backward"
        )


def _accumulates(ctx: Any, first: int = 0) -> bool:
    """Whether the current backward pass needs the gradient of any weight; ``first`` counts the tensors before them.

    It does not for frozen weights, or if ``backward(inputs=...)`` or ``torch.autograd.grad`` leaves the weights out.
    A Python function's ``needs_input_grad`` does not account for the latter.
    """
    nodes = [node for node, _ in ctx.next_functions[first : first + len(ctx.weights)]]
    try:
        with torch._C.DisableTorchFunctionSubclass():
            wanted = [
                needs_grad(weight) and node is not None and torch._C._will_engine_execute_node(node)
                for weight, node in zip(ctx.weights, nodes, strict=True)
            ]
    except RuntimeError as error:
        if not is_asked_for(error):
            raise
        if ctx.weights[0].driver.reductions.returns_gradients(ctx.weights[0].weight_group):
            return True
        raise EtpStateError(
            f"torch.autograd.grad cannot return the gradient of the sharded weight {ctx.weights[0].fqn}, which goes to "
            "its main_grad; call backward()"
        ) from error
    return any(wanted)


def _cast_all(weights: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The gathered weights as autocast would cast them; unchanged if autocast is off (``dtype`` is None)."""
    if dtype is None:
        return weights
    return [weight if weight.dtype is torch.float64 else weight.to(dtype) for weight in weights]


def second_order(weight: Shard) -> EtpStateError:
    """The error for ``create_graph=True``, which alone turns gradients on in a backward pass.

    PyTorch's ``once_differentiable`` does not refuse it: if the incoming gradient requires no gradient, like that of
    ``y.sum()``, it silently drops the dependence on the weight, and a gradient penalty would lack part of its gradient.
    """
    return EtpStateError(
        f"create_graph=True with the sharded weight {weight.fqn}, whose gradient cannot be differentiated again: leave "
        "out the gradient penalty or second derivative, or pass the modules that need it in replicated_modules of "
        "etp.shard_module"
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Shard, bias: torch.Tensor | None, cast: torch.dtype | None
    ) -> torch.Tensor:
        # As in PyTorch, the input is kept for the gradient of a weight that is trained, not for that of the input.
        ctx.save_for_backward(*([x] if any(ctx.needs_input_grad[1:2]) else []))
        remember(ctx, [weight])
        ctx.has_bias, ctx.cast, ctx.shape = bias is not None, cast, x.shape
        # PyTorch flattens such inputs into one matrix. For others, it sums the bias's gradient in memory order.
        ctx.flattened = x.dim() <= 2 or x.is_contiguous()
        ctx.transposed = x.dim() == 2 and x.stride() == (1, x.shape[0])
        (full,) = _cast_all(weight.driver.gathers.visit(weight.weight_group), cast)
        return F.linear(x, full, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.weights
        if torch.is_grad_enabled():
            raise second_order(weight)
        driver, group = weight.driver, weight.weight_group
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        flat_grad = grad.reshape(-1, grad.shape[-1])
        if needs_x:
            require_unchanged(ctx)
            (full,) = _cast_all(driver.gathers.visit(group), ctx.cast)
            # Transposed where PyTorch's own backward pass transposes it.
            grad_x = full.t().mm(flat_grad.t()).t() if ctx.transposed else flat_grad.mm(full).view(ctx.shape)
        if _accumulates(ctx, first=1):
            (x,) = ctx.saved_tensors
            (wgrad,) = driver.reductions.buffers(group, x.dtype)
            torch.mm(flat_grad.t(), x.reshape(-1, x.shape[-1]), out=wgrad)
            (grad_weight,) = driver.reductions.take(group, [wgrad])
        if ctx.has_bias and needs_bias:
            grad_bias = flat_grad.sum(0) if ctx.flattened else grad.sum(dim=list(range(grad.dim() - 1)))
        return grad_x, grad_weight, grad_bias, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Shard, indices: torch.Tensor, padding_idx: int, scale_grad_by_freq: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        remember(ctx, [weight])
        ctx.padding_idx, ctx.scale_grad_by_freq = padding_idx, scale_grad_by_freq
        (full,) = weight.driver.gathers.visit(weight.weight_group)
        return F.embedding(indices, full)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (indices,) = ctx.saved_tensors
        (weight,) = ctx.weights
        if torch.is_grad_enabled():
            raise second_order(weight)
        grad_weight = None
        if _accumulates(ctx):
            wgrad = torch.ops.aten.embedding_dense_backward(
                grad, indices, weight.layout.rows, ctx.padding_idx, ctx.scale_grad_by_freq
            )
            (grad_weight,) = weight.driver.reductions.take(weight.weight_group, [wgrad])
        return grad_weight, None, None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, m_splits: list[int], num_gemms: int, cast: torch.dtype | None, *params: Any
    ) -> torch.Tensor:
        weights: Sequence[Shard] = params[:num_gemms]
        biases: Sequence[torch.Tensor] = params[num_gemms:]
        ctx.save_for_backward(*([x] if any(ctx.needs_input_grad[4 : 4 + num_gemms]) else []))
        remember(ctx, weights)
        ctx.m_splits, ctx.num_biases, ctx.cast = m_splits, len(biases), cast
        fulls = _cast_all(weights[0].driver.gathers.visit(weights[0].weight_group), cast)
        parts = x.split(m_splits)
        out = [
            F.linear(part, full, biases[i] if biases else None)
            for i, (part, full) in enumerate(zip(parts, fulls, strict=True))
        ]
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        weights = ctx.weights
        if torch.is_grad_enabled():
            raise second_order(weights[0])
        driver, group = weights[0].driver, weights[0].weight_group
        grads = grad.split(ctx.m_splits)
        grad_x = None
        grad_weights: list[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            require_unchanged(ctx)
            fulls = _cast_all(driver.gathers.visit(group), ctx.cast)
            grad_x = torch.cat([g.mm(full) for g, full in zip(grads, fulls, strict=True)])
        if _accumulates(ctx, first=1):
            (x,) = ctx.saved_tensors
            wgrads = driver.reductions.buffers(group, x.dtype)
            for g, part, wgrad in zip(grads, x.split(ctx.m_splits), wgrads, strict=True):
                torch.mm(g.t(), part, out=wgrad)
            grad_weights = driver.reductions.take(group, wgrads)
        grad_biases = [g.sum(0) for g in grads] if ctx.num_biases else []
        return grad_x, None, None, None, *grad_weights, *grad_biases


class _FullWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Shard, done: Callable[[], None]) -> torch.Tensor:
        remember(ctx, [weight])
        ctx.done = done
        (full,) = weight.driver.gathers.visit(weight.weight_group)
        return full.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (weight,) = ctx.weights
        if torch.is_grad_enabled():
            raise second_order(weight)
        ctx.done()
        grad_weight = None
        if _accumulates(ctx):
            # Autograd may use this gradient elsewhere too, and the reduction may change its input.
            (wgrad,) = weight.driver.reductions.buffers(weight.weight_group, grad.dtype)
            wgrad.copy_(grad)
            (grad_weight,) = weight.driver.reductions.take(weight.weight_group, [wgrad])
        return grad_weight, None


class _Unrecorded:
    """Replaces an autograd function's context where autograd records nothing."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep nothing."""


def _recording(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply``, or only its forward if autograd records nothing, which ``etp/passes.py`` relies on."""
    if not torch.is_grad_enabled():
        return partial(function.forward, _Unrecorded())
    if torch._C._are_functorch_transforms_active():
        return function.apply
    # What that calls otherwise, behind nine more Python calls.
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # in C
    return apply


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that ``torch.autocast`` casts the operands of a linear to; None where autocast is off."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _without_autocast(x: torch.Tensor, cast: torch.dtype | None) -> AbstractContextManager[Any]:
    """Turn autocast off around operations whose operands are cast already; costs nothing if it is off anyway."""
    return nullcontext() if cast is None else torch.autocast(x.device.type, enabled=False)


def _cast_input(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """An input as autocast would cast it: fp64 and integers are left alone."""
    eligible = dtype is not None and tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(dtype) if eligible else tensor


def linear(
    input: torch.Tensor,  # noqa: A002  # as in torch.nn.functional
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear`` with a sharded weight. Collective over the shard group.

    Args:
        input: ``[..., in_features]``.
        weight: an :class:`etp.param.ETPShardedParam` of logical shape ``[out_features, in_features]``.
        bias: ``[out_features]``, replicated, or None.

    Returns:
        ``[..., out_features]``.

    Raises:
        ValueError: if the weight is gathered together with others, as those of a grouped linear are.
    """
    if len(weight.weight_group.shards) > 1:  # type: ignore[attr-defined]
        _require_group((weight,))
    cast = _autocast_dtype(input)
    if cast is None:
        plain: torch.Tensor = _recording(_Linear)(input, weight, bias, None)
        return plain
    bias = None if bias is None else _cast_input(bias, cast)
    with _without_autocast(input, cast):
        out: torch.Tensor = _recording(_Linear)(_cast_input(input, cast), weight, bias, cast)
    return out


def embedding(
    indices: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.embedding`` with a table sharded over its rows. Collective over the shard group.

    Args:
        indices: integers of any shape.
        weight: an :class:`etp.param.ETPShardedParam` of logical shape ``[rows, embedding_dim]``.
        padding_idx: as in ``torch.nn.functional.embedding``.
        max_norm: must be None.
        norm_type: ignored, because it only matters with ``max_norm``.
        scale_grad_by_freq: as in ``torch.nn.functional.embedding``.
        sparse: must be False.

    Returns:
        ``[*indices.shape, embedding_dim]``.

    Raises:
        ValueError: for ``max_norm`` (it edits the table in the forward pass), ``sparse`` (sparse gradients cannot be
            reduced), a ``padding_idx`` out of range, or a weight that is gathered together with others.
    """
    del norm_type
    if max_norm is not None or sparse:
        raise ValueError(
            f"a sharded embedding has neither max_norm (got {max_norm}) nor sparse gradients (got {sparse}); "
            "turn the option off"
        )
    _require_group((weight,))
    rows = weight.layout.rows  # type: ignore[attr-defined]
    if padding_idx is None:
        padding = -1
    elif -rows <= padding_idx < rows:
        padding = padding_idx % rows
    else:
        raise ValueError(f"padding_idx {padding_idx} is out of range for an embedding of {rows} rows")
    out: torch.Tensor = _recording(_Embedding)(weight, indices, padding, scale_grad_by_freq)
    return out


def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor], m_splits: Sequence[int]
) -> torch.Tensor:
    """Apply ``weights[i]`` to the i-th block of ``m_splits[i]`` rows of ``x``. Collective over the shard group.

    Args:
        x: ``[sum(m_splits), in_features]``.
        weights: the sharded weights of one group, in its order; ``[out_features, in_features]`` each.
        biases: a replicated bias of ``[out_features]`` for each weight, or an empty sequence.
        m_splits: number of rows of ``x`` for each weight.

    Returns:
        ``[sum(m_splits), out_features]``.

    Raises:
        ValueError: if ``m_splits`` does not fit ``weights`` and ``x``, or ``weights`` are not one group.
    """
    if torch.compiler.is_dynamo_compiling():
        hidden: torch.Tensor = uncompiled(grouped_linear, x, weights, biases, m_splits)
        return hidden
    _require_group(weights)
    if len(m_splits) != len(weights) or sum(m_splits) != x.shape[0]:
        raise ValueError(
            f"m_splits {list(m_splits)} must name {len(weights)} parts that add up to the input's {x.shape[0]} rows"
        )
    cast = _autocast_dtype(x)
    biases = [_cast_input(bias, cast) for bias in biases]
    with _without_autocast(x, cast):
        args = (list(m_splits), len(weights), cast, *weights, *biases)
        out: torch.Tensor = _recording(_GroupedLinear)(_cast_input(x, cast), *args)
    return out


def full_weight(weight: Shard, done: Callable[[], None]) -> torch.Tensor:
    """The full weight, differentiable and newly allocated, for operations of any kind. Collective over the shard group.

    Args:
        weight: the only weight of its group.
        done: called in a backward pass when the weight's gradient is complete.

    Returns:
        A plain tensor of the weight's logical shape.
    """
    _require_group((weight,))
    with torch._C.DisableTorchFunctionSubclass():
        full: torch.Tensor = _recording(_FullWeight)(weight, done)
    return full
