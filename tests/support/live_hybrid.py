"""Live Megatron hybrids where neither Mamba's kernels nor Transformer Engine are installed.

Megatron takes norms of hybrids from Transformer Engine and refuses to build a Mamba mixer without its kernels. Here the
norms are torch's, and the mixer's recurrence and gated norm are written out.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_patches.refit.models.config_traits import family_from_config
from tests.support.live_models import Case, PlainAttention, chunk_arguments, common_settings
from tests.support.mamba_kernels import split_conv1d_scan


class GatedNorm(torch.nn.Module):
    """The norm of Mamba's kernels, whose input was multiplied with the gate before: each group by itself."""

    def __init__(self, width: int, *, eps: float, group_size: int, dtype: torch.dtype, **settings: object) -> None:  # noqa: ARG002
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From [..., width] to the same."""
        groups = x.float().unflatten(-1, (-1, self.group_size))
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return scaled.flatten(-2).to(x.dtype) * self.weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Entries of a checkpoint: tensor parallelism cuts the weight, as that of Megatron's norm for mixers."""
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def install_stand_ins() -> None:
    """Puts norms, gated norm and recurrence into Megatron, in this process."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm import mamba_context_parallel, mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = True
    mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.ExtendedRMSNorm = GatedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = split_conv1d_scan
    hybrid_block.TENorm = WrappedTorchNorm


def build_hybrid_chunk(case: Case, chunk: int) -> Any:
    """One chunk of a model like NemotronH. One MTP layer predicts two tokens, one after another."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    install_stand_ins()
    family = family_from_config(case.config)
    traits = family.traits
    mamba, written = traits.mamba, family.config()
    depths = 2 if traits.mtp_layers == 1 else traits.mtp_layers
    config = TransformerConfig(
        num_query_groups=traits.num_kv_heads,
        kv_channels=traits.head_dim,
        mamba_state_dim=mamba.state,
        mamba_head_dim=mamba.head_dim,
        mamba_num_heads=mamba.heads,
        mamba_num_groups=mamba.groups,
        gated_linear_unit=False,
        activation_func=lambda x: torch.nn.functional.relu(x).square(),
        add_bias_linear=False,
        moe_shared_expert_intermediate_size=traits.shared_ffn_hidden_size or None,
        moe_router_enable_expert_bias=traits.router_bias,
        moe_router_score_function="sigmoid",
        layernorm_epsilon=traits.norm_eps,
        mtp_num_layers=depths or None,
        mtp_use_repeated_layer=depths > traits.mtp_layers,
        **common_settings(case),
    )
    return HybridModel(
        config=config,
        hybrid_stack_spec=stack_spec(traits.num_experts),
        hybrid_layer_pattern=f"{written['hybrid_override_pattern']}"
        + depths * f"/{written.get('mtp_hybrid_override_pattern')}",
        **chunk_arguments(case, chunk),
    )


def stack_spec(experts: int) -> Any:
    """Megatron's own layers in the places where its specification for hybrids has Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        MultiTokenPredictionLayer,
        MultiTokenPredictionLayerSubmodules,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear, core_attention=PlainAttention, linear_proj=RowParallelLinear
        ),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    moe = get_moe_module_spec(use_te=False, num_experts=experts or 8, moe_grouped_gemm=False)
    norm = WrappedTorchNorm
    add = get_bias_dropout_add
    layers = {
        "mamba_layer": ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=add)),
        "attention_layer": ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(input_layernorm=norm, self_attention=attention, self_attn_bda=add),
        ),
        "mlp_layer": ModuleSpec(
            MLPLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add)
        ),
        "moe_layer": ModuleSpec(
            TransformerLayer, submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=moe, mlp_bda=add)
        ),
    }
    mtp_layer = ModuleSpec(
        MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
        ),
    )
    block = ModuleSpec(MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules([mtp_layer]))
    return ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**layers, mtp_block_spec=block))
