"""Block FP8 in vLLM on CPUs without AMX, which vLLM's own kernels need: weights are dequantized in torch.

vLLM imports this module in each worker where ``worker_extension_cls`` is :data:`EXTENSION`. As with kernels for AMX or
DeepGEMM, weights are brought into another form after loading: here they are transposed.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm import _custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.utils import replace_parameter
from vllm.platforms import PlatformEnum

from tests.support.vllm_digests import DigestingWorker

EXTENSION = "tests.support.vllm_fp8.CpuKernels"

_BLOCK = 128


class CpuKernels(DigestingWorker):
    """A worker that can be asked for its digests; naming it is what loads this module."""


def dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights, fp32 [..., N, K], of E4M3 numbers and of the scales of their blocks."""
    rows, columns = weight.shape[-2:]
    whole = scales.repeat_interleave(_BLOCK, -2)[..., :rows, :].repeat_interleave(_BLOCK, -1)[..., :columns]
    return weight.float() * whole


class TransposingKernel(Fp8BlockScaledMMLinearKernel):
    """Serves linear layers."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        del compute_capability
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        super().process_weights_after_loading(layer)
        replace_parameter(layer, "weight", layer.weight.data.t().contiguous())

    def apply_weights(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        del kwargs
        weight = dequantized(layer.weight.t(), layer.weight_scale_inv)
        return torch.nn.functional.linear(x.float(), weight, bias).to(x.dtype)

    def apply_block_scaled_mm(
        self,
        A: torch.Tensor,  # noqa: N803 - vLLM names it
        B: torch.Tensor,  # noqa: N803
        As: torch.Tensor,  # noqa: N803
        Bs: torch.Tensor,  # noqa: N803
    ) -> torch.Tensor:
        raise NotImplementedError


def _prepare(w13: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()


def _experts(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    w13_scales: torch.Tensor,
    w2_scales: torch.Tensor,
) -> torch.Tensor:
    result = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        up = hidden[token].float() @ dequantized(w13[expert].t(), w13_scales[expert]).t()
        gate, up = up.chunk(2, dim=-1)
        down = (torch.nn.functional.silu(gate) * up) @ dequantized(w2[expert].t(), w2_scales[expert]).t()
        result.index_add_(0, token, down * weights[token, choice, None].float())
    return result.to(hidden.dtype)


def _experts_of_026(*given: Any) -> torch.Tensor:
    return _experts(*given[:5], *given[7:9])


def _experts_since_032(output: torch.Tensor, *given: Any) -> None:
    output.copy_(_experts(*given[:5], *given[6:8]))


linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].insert(0, TransposingKernel)
cpu_moe.prepare_fp8_moe_layer_for_cpu = _prepare
if vllm.__version__.startswith("0.26."):
    cpu_moe.fused_experts_cpu = _experts_of_026
else:
    cpu_moe.fused_experts_cpu = _experts_since_032
    cpu_moe.CPUExpertsFp8._supports_current_device = staticmethod(lambda: True)


def _scaled_fp8_quant(
    values: torch.Tensor, scale: torch.Tensor | None = None, *, use_per_token_if_dynamic: bool = False, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers, and the scale that brings the largest magnitude, of all or of each row, to 448."""
    del kwargs
    if scale is None:
        largest = values.abs().amax(-1, keepdim=True) if use_per_token_if_dynamic else values.abs().amax().view(1)
        scale = largest.float() / torch.finfo(torch.float8_e4m3fn).max
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


_custom_ops.scaled_fp8_quant = _scaled_fp8_quant
