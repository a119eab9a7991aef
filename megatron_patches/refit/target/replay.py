"""Converts received weights into the parameters that the engine's loader would have produced.

Recorded operations run in the engine's own torch on the engine's own device, on the elements as the trainer sent them,
so the resulting bits equal those of loading a checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.layout.boxes import View
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp
from megatron_patches.refit.layout.manifest import Manifest, Storage
from megatron_patches.refit.target.recorded import FillRecord


def replay(steps: Sequence[ElementOp], values: torch.Tensor) -> torch.Tensor:
    """Applies the steps of a rule.

    Args:
        steps: the steps.
        values: elements as they arrived, in any shape. Not changed.

    Returns:
        A tensor of the same shape, of the last step's dtype.

    Raises:
        TransferError: if this release of torch lacks an operation, or its result has another dtype than recorded.
    """
    for step in steps:
        if step.operation == CONVERT:
            values = values.to(getattr(torch, step.dtype))
            continue
        name, _, overload = step.operation.partition(".")
        operation = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if operation is None:
            raise TransferError(f"torch {torch.__version__} has no operation {step.operation}, which was recorded")
        values = operation(values, *step.arguments, **dict(step.named))
        if str(values.dtype).removeprefix("torch.") != step.dtype:
            raise TransferError(f"{step.operation} gave {values.dtype}; it was recorded to give {step.dtype}")
    return values


def finish(
    manifest: Manifest, fills: Sequence[FillRecord], arrived: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Makes the parameters, in loader form, from what has arrived and was verified.

    Args:
        manifest: what this rank wanted; its storages have the rules.
        fills: the loader's own fills.
        arrived: flat memory of every storage, by name. Storages with a rule are dropped as soon as they are converted,
            so that at most one of them exists twice.

    Returns:
        Flat memory of every parameter, by name; without conversion, it is the memory that arrived.

    Raises:
        TransferError: if a rule cannot be applied.
    """
    places: dict[str, list[View]] = defaultdict(list)
    for placement in manifest.placements:
        places[placement.view.storage].append(placement.view)
    finished: dict[str, torch.Tensor] = {}
    for storage in manifest.storages:
        values = arrived.pop(storage.name)
        if storage.target not in finished:
            finished[storage.target] = values if storage.rule is None else _empty(storage, values)
        target = finished[storage.target]
        if values is not target:
            for view in places[storage.name]:
                view.tensor(target).copy_(replay(storage.rule.steps if storage.rule else (), view.tensor(values)))
    for fill in fills:
        region = fill.write
        View(fill.storage, region.offset, region.shape, region.strides).tensor(finished[fill.storage]).fill_(fill.value)
    return finished


def _empty(storage: Storage, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(storage.numel, dtype=getattr(torch, storage.final_dtype), device=like.device)
