"""Supports modules that read their sharded weights themselves, such as experts stacked in one parameter.

During such a module's forward pass, its parameters are the full weights, as plain tensors. Whatever it does with them
(indexing, batched and grouped products), autograd differentiates it, and the gradient of each full weight is reduced
into its shard.

[Note: saved weights] Autograd would keep the full weights, or views of them, until the backward pass. It saves their
place in the weight instead, and the weight is gathered again when the first of them is needed: once in a backward pass,
however many experts the tokens of a rank have chosen, so that all ranks gather alike. All else goes to the hooks on
saved tensors around the module, such as those of activation checkpointing: PyTorch calls the innermost ones only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from etp.errors import EtpStateError
from etp.functional import full_weight, remember, require_unchanged, second_order
from etp.shard import Shard


class StackedWeights:
    """Replaces some of a module's parameters by the full weights for the time of its forward pass.

    The full weights take memory of their own during the module's forward pass and during its backward pass.

    Args:
        module: the module, which is given forward hooks.
        names: names of its sharded parameters.
        uses: the uses of all such modules in one model.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], uses: Uses) -> None:
        self._names = list(names)
        self._uses = uses
        self._replaced: dict[str, Shard] = {}
        self._saving: torch.autograd.graph.saved_tensors_hooks | None = None
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, prepend=True, always_call=True)

    @_disable_dynamo
    def _enter(self, module: nn.Module, args: Any) -> None:
        del args
        if self._replaced:
            name = next(iter(self._replaced.values())).fqn
            raise EtpStateError(f"the module of {name} calls itself; pass it in replicated_modules")
        use = _Use([module._parameters[name] for name in self._names], self._uses)  # type: ignore[misc]
        fulls = [full_weight(shard, partial(use.release, index)) for index, shard in enumerate(use.weights)]
        for name, shard, full in zip(self._names, use.weights, fulls, strict=True):
            self._replaced[name] = shard
            module._parameters[name] = full  # type: ignore[assignment]
        if torch.is_grad_enabled():
            self._saving = torch.autograd.graph.saved_tensors_hooks(*_hooks(fulls, use))
            self._saving.__enter__()

    @_disable_dynamo
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Also called when the forward pass, or :meth:`_enter`, has failed."""
        del args, output
        if self._saving is not None:
            self._saving.__exit__()
            self._saving = None
        for name, shard in self._replaced.items():
            module._parameters[name] = shard
        self._replaced = {}


class Uses:
    """The uses of weights in one model's forward passes; one use at a time has full weights in a backward pass."""

    def __init__(self) -> None:
        self._current: _Use | None = None

    def begin(self, use: _Use) -> None:
        """Record that ``use`` needs its weights now, and free those of the use before."""
        if self._current is not None and self._current is not use:
            self._current.release_all()
        self._current = use


class _Use:
    """One forward pass of one module, and the full weights of its backward pass.

    Attributes:
        weights: the module's sharded weights.
        versions: theirs in the forward pass.
    """

    weights: Sequence[Shard]
    versions: Sequence[int]

    def __init__(self, shards: Sequence[Shard], uses: Uses) -> None:
        self._uses = uses
        remember(self, shards)
        self._fulls: dict[int, torch.Tensor] = {}

    def full(self, index: int) -> torch.Tensor:
        """A full weight in a backward pass.

        Raises:
            EtpStateError: if one of the weights has changed since the forward pass, or the gradient is to be
                differentiated again.
        """
        shard = self.weights[index]
        if torch.is_grad_enabled():
            raise second_order(shard)
        require_unchanged(self)
        if index not in self._fulls:
            self._uses.begin(self)
            self._fulls[index] = full_weight(shard, partial(self.release, index))
        return self._fulls[index]

    def release(self, index: int) -> None:
        """Free a full weight of the backward pass, because its gradient is complete. Frozen weights have none."""
        self._fulls.pop(index, None)

    def release_all(self) -> None:
        """Free all full weights of the backward pass."""
        self._fulls.clear()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a saved tensor lies in a full weight, in elements."""

    use: _Use
    index: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _hooks(fulls: Sequence[torch.Tensor], use: _Use) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], Any]]:
    """How to save a tensor and get it back; see [Note: saved weights]. They keep no reference to ``fulls``."""
    known: Mapping[int, tuple[int, torch.dtype]] = {
        full.untyped_storage().data_ptr(): (index, full.dtype) for index, full in enumerate(fulls)
    }
    outer_pack, outer_unpack = torch._C._autograd._top_saved_tensors_default_hooks(False) or (None, None)

    @_disable_dynamo
    def pack(tensor: torch.Tensor) -> Any:
        found = known.get(tensor.untyped_storage().data_ptr())
        if found is None or found[1] != tensor.dtype:
            return tensor if outer_pack is None else outer_pack(tensor)
        return _Place(use, found[0], tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @_disable_dynamo
    def unpack(saved: Any) -> Any:
        if isinstance(saved, _Place):
            return saved.use.full(saved.index).as_strided(saved.size, saved.stride, saved.offset)
        return saved if outer_unpack is None else outer_unpack(saved)

    return pack, unpack
