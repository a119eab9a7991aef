"""Mamba-2 in vLLM on CPUs, for prompts.

vLLM imports this module in each worker where ``worker_extension_cls`` is :data:`EXTENSION`. Release 0.26.0 has kernels
for GPUs alone and gets some here; tokens are not generated one by one with them, as tests ask for the probabilities of
prompts. Release 0.32.0 packs the weight of a convolution on some CPUs, away from what Mamba-2 sees of it, so that refit
refuses the model there; here it is left as on GPUs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus
from vllm import _custom_ops
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d

from tests.support.mamba_kernels import scan

EXTENSION = "tests.support.vllm_mamba.CpuKernels"


class CpuKernels:
    """Adds nothing to the worker; naming it is what loads this module."""


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **named: Any) -> torch.Tensor:
    names = ("conv_states", "query_start_loc", "cache_indices", "has_initial_state", "activation")
    return causal_conv1d.causal_conv1d_torch(x, weight, bias, **{name: named[name] for name in names})


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - callers name it
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    **named: Any,
) -> torch.Tensor:
    times, initial = softplus(dt.float() + named["dt_bias"].float()), named["initial_states"]
    states = []
    for number, (low, high) in enumerate(pairwise(named["cu_seqlens"].tolist())):
        before = None if initial is None else initial[number]
        outputs, state = scan(x[low:high], times[low:high], A, B[low:high], C[low:high], named["D"], before)
        named["out"][low:high] = outputs.to(x.dtype)
        states.append(state)
    return torch.stack(states).to(named["state_dtype"])


if hasattr(causal_conv1d, "causal_conv1d_torch"):
    mamba_mixer2.causal_conv1d_fn = _convolve
    mamba_mixer2.mamba_chunk_scan_combined_varlen = _scan
elif hasattr(_custom_ops, "causal_conv1d_weight_pack"):
    del _custom_ops.causal_conv1d_weight_pack  # vLLM asks whether there is one
