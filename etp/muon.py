"""Muon for sharded weights: momentum stays sharded, and each matrix is orthogonalized by one rank of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.optimizer import ParamsT, _to_scalar

from etp.matrices import MatrixExchange
from etp.param import ETPShardedParam
from etp.shard_grad import plain

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for models with sharded weights, whose results do not depend on the number of ranks.

    ::

        matrices = [p for p in model.blocks.parameters() if p.ndim >= 2]
        optimizer = etp.Muon(matrices, lr=2e-2)

    Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) replaces the momentum of a
    matrix by the nearest orthogonal one, which requires the whole matrix. Each rank keeps its rows of the momentum. In
    a step, each matrix's momentum is gathered, in bf16, by one rank of the shard group, which runs the Newton-Schulz
    iteration of ``torch.optim.Muon`` on it, and sends each rank the update of its rows. Matrices are spread so that all
    ranks have about the same work. Given equal gradients, weights and momentum are bitwise those of
    ``torch.optim.Muon`` on the unsharded model. There are two exceptions for bf16 weights: with ``nesterov=False`` this
    optimizer does not overwrite their momentum, and on CPUs the rounding of their update depends on where in memory an
    element lies.

    A weight of three dimensions, in which ``etp.shard_module`` has found stacked experts, is one matrix per expert.
    Each is orthogonalized by the rank that holds it. Parameters that are not sharded are stepped on every rank.

    Args:
        params: parameters or groups of them, in the same order on all ranks: matrices of hidden layers. Give
            embeddings, output layers, biases and norms to another optimizer, such as AdamW.
        lr: learning rate, which ``adjust_lr_fn`` scales for each matrix.
        weight_decay: decoupled weight decay.
        momentum: decay rate of the momentum.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: coefficients a, b, c of the Newton-Schulz iteration.
        eps: lower bound of the norm by which momentum is divided.
        ns_steps: number of Newton-Schulz iterations, below 100.
        adjust_lr_fn: "original" (the default) scales ``lr`` by ``sqrt(max(1, rows / columns))``; "match_rms_adamw" by
            ``0.2 * sqrt(max(rows, columns))`` (Liu et al., "Muon is Scalable for LLM Training", 2025). Rows and columns
            are those of the whole matrix.

    Raises:
        ValueError: for arguments out of range, and parameters that are not matrices.
    """

    steps_whole_matrices = True
    """Tells ``etp/optimizers.py``, which refuses optimizers by their name, that this one supports shards."""

    def __init__(  # noqa: PLR0913, PLR0917 - the arguments of torch.optim.Muon
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"lr is a tensor of {lr.numel()} elements; give one of 1 element, or a float")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0.0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients is {ns_coefficients}; it must have 3 numbers")
        if not 0 <= ns_steps < 100:
            raise ValueError(f"ns_steps is {ns_steps}; it must be at least 0 and below 100")
        if adjust_lr_fn not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn is {adjust_lr_fn!r}; it must be one of {_ADJUSTMENTS}")
        self._exchange = MatrixExchange()
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Raises:
            ValueError: if one is neither a matrix nor a sharded stack of matrices.
        """
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if param.is_complex():
                raise ValueError(f"Muon has a parameter of {param.dtype}; it must be real")
            if param.ndim != 2 and not (param.ndim == 3 and isinstance(param, ETPShardedParam)):
                name = f"{param.fqn}, " if isinstance(param, ETPShardedParam) else ""
                raise ValueError(
                    f"Muon has a parameter of shape {tuple(param.shape)}, {name}which is no matrix; give it to another "
                    "optimizer, such as AdamW"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Collective over the shard groups.

        Args:
            closure: computes the loss and its gradients anew; called once, if given.

        Returns:
            what ``closure`` returned.

        Raises:
            PeerMismatchError: if the ranks of a shard group have gradients of different parameters; on GPUs, on those
                that had gradients of others in the step before, for which the rest wait until their timeout.
            ValueError: if a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Of each process group, any shard, and what is to be stepped. Ranks without gradients take part, too.
        shared: dict[dist.ProcessGroup, tuple[ETPShardedParam, list[_Update]]] = {}
        for group in self.param_groups:
            options = _Options.of(group)
            for param in group["params"]:
                is_shared = isinstance(param, ETPShardedParam) and param.ndim == 2 and param.layout.num_shards > 1
                if is_shared:
                    shared.setdefault(param.group, (param, []))
                if param.grad is None:
                    continue
                update = self._update(param, options)
                if is_shared:
                    shared[param.group][1].append(update)
                else:
                    _step_alone(update)
        for member, updates in shared.values():
            self._step_together(member, updates)
        return loss

    def _update(self, param: torch.Tensor, options: _Options) -> _Update:
        if param.grad is None or param.grad.is_sparse:
            raise ValueError(f"Muon has a sparse gradient, of a parameter of shape {tuple(param.shape)}; make it dense")
        grad, state = plain(param.grad), self.state[param]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        return _Update(param, grad, state["momentum_buffer"], options)

    def _step_together(self, member: ETPShardedParam, updates: list[_Update]) -> None:
        shards = [update.param for update in updates if isinstance(update.param, ETPShardedParam)]
        self._exchange.run(
            member,
            shards,
            send=lambda index: updates[index].advance_momentum(),
            compute=lambda index, momentum: updates[index].options.orthogonalized(momentum),
            receive=lambda index, rows: updates[index].apply(rows),
        )


@dataclass(frozen=True)
class _Options:
    """The options of a parameter group."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    @classmethod
    def of(cls, group: dict[str, Any]) -> _Options:
        values = {name: group[name] for name in cls.__dataclass_fields__}
        return cls(**{**values, "lr": _to_scalar(group["lr"])})

    def orthogonalized(self, matrix: torch.Tensor) -> torch.Tensor:
        """The nearest orthogonal matrix, roughly, in bf16. Overwrites ``matrix`` if it is in bf16."""
        found: torch.Tensor = _zeropower_via_newtonschulz(matrix, self.ns_coefficients, self.ns_steps, self.eps)
        return found


@dataclass(frozen=True)
class _Update:
    """The step of one parameter. Padding is left out."""

    param: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    options: _Options

    @property
    def _shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.param.layout.shape if isinstance(self.param, ETPShardedParam) else tuple(self.param.shape)

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.param, ETPShardedParam):
            return tensor
        return tensor[: self.param.layout.logical_rows(self.param.group_rank)]

    def advance_momentum(self) -> torch.Tensor:
        """Add the gradient to the momentum. Returns this rank's rows of what to orthogonalize, new, in bf16."""
        grad, momentum, decay = self._rows(self.grad), self._rows(self.momentum), self.options.momentum
        momentum.lerp_(grad, 1 - decay)
        update = grad.lerp(momentum, decay) if self.options.nesterov else momentum
        # The iteration would convert it to bf16 anyway. It works in place, so momentum itself is copied.
        return update.to(torch.bfloat16, copy=not self.options.nesterov)

    def apply(self, update: torch.Tensor) -> None:
        """Decay the weights, and subtract the scaled update."""
        options, param = self.options, self.param
        weight = self._rows(param.local_shard() if isinstance(param, ETPShardedParam) else param)
        weight.mul_(1 - options.lr * options.weight_decay)
        adjusted = _adjust_lr(options.lr, options.adjust_lr_fn, torch.Size(self._shape[-2:]))
        weight.add_(update, alpha=-adjusted)


def _step_alone(update: _Update) -> None:
    """Step a parameter whose matrices this rank holds whole."""
    found = update.advance_momentum()
    matrices = [found] if found.ndim == 2 else list(found)
    for matrix in matrices:
        matrix.copy_(update.options.orthogonalized(matrix))
    update.apply(found)
