"""A training script whose models may have layers of linear attention by the gated delta rule on a CPU.

Megatron computes the recurrence in plain PyTorch where it must be deterministic, but does not build the layer without
the kernels of flash-linear-attention, or without Transformer Engine, which fuses its first projection with the norm
before it. Here the projection is Megatron's own, without the norm.
"""

from __future__ import annotations

import functools
from unittest import mock

import torch
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from examples import pretrain_gpt


def _convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **settings: object
) -> tuple[torch.Tensor, None]:
    """Causal convolution of each channel and SiLU: ``[batch, sequence, channels]``, weight ``[channels, width]``."""
    del settings
    channels, width = weight.shape
    mixed = torch.nn.functional.conv1d(x.mT, weight[:, None], bias, padding=width - 1, groups=channels)
    return torch.nn.functional.silu(mixed[..., : x.shape[1]]).mT, None


def main() -> None:
    """Train as the command line says."""
    normalized = functools.partial(torch.nn.functional.normalize, dim=-1)
    with (
        mock.patch.object(common, "HAVE_FLA", True),
        mock.patch.object(common, "l2norm", normalized),
        mock.patch.object(gdn, "causal_conv1d", _convolve),
        mock.patch.object(gdn, "chunk_gated_delta_rule", common.torch_chunk_gated_delta_rule),
        mock.patch.object(specs, "_get_backend_spec_provider", return_value=LocalSpecProvider()),
        mock.patch.object(LocalSpecProvider, "column_parallel_layer_norm_linear", return_value=ColumnParallelLinear),
    ):
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
