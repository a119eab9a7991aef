"""With ``--recompute-modules mlp``, the backward pass of a model with biases never ends.

The second linear layer of an MLP returns its bias to be added later. Recomputation runs the MLP in an autograd
function, and a parameter that such a function returns becomes one of its outputs, in place of a leaf. Where backward
computes the MLP again, the gradient of the bias leads back to that function, which computes the MLP again, and so on.
With this fix, recomputation returns a view of the bias. Transformer Engine's checkpoint, which Megatron uses with FP8,
has the same mistake.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import PatchRecord


def _view_if_parameter(output: Any) -> Any:
    return output.view_as(output) if isinstance(output, torch.nn.Parameter) else output


def _replace(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(checkpoint)
    def replacement(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def without_parameters(*inputs: Any, **settings: Any) -> Any:
            outputs = function(*inputs, **settings)
            return tuple(map(_view_if_parameter, outputs)) if isinstance(outputs, tuple) else outputs

        return checkpoint(without_parameters, *args, **kwargs)

    return replacement


RECORDS = (
    PatchRecord(
        target="megatron.core.tensor_parallel.random:checkpoint",
        replace=_replace,
        reason="the backward pass of recomputed MLPs with biases never ends",
        sha256="6c1654fcb5e317d2",
    ),
    PatchRecord(
        target="megatron.core.extensions.transformer_engine:te_checkpoint",
        replace=_replace,
        reason="the same with FP8",
        sha256="8ca778e5ca56fc7b",
    ),
)
