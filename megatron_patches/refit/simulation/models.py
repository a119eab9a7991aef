"""Configurations of well-known models, for plans without a checkpoint at hand; refuses what no trainer supports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_patches.refit.checkpoints.hf_flags import model_flags
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.weight_format import WeightFormat, is_block_fp8
from megatron_patches.refit.models.config_traits import read_config

_DEEPSEEK_V3: Mapping[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
MODELS: Mapping[str, Mapping[str, object]] = {
    "qwen3-235b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
    },
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": {
        **_DEEPSEEK_V3,
        "num_attention_heads": 64,
        "n_routed_experts": 384,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "first_k_dense_replace": 1,
        "vocab_size": 163840,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0,
    },
}
"""Content of ``config.json`` by name, without entries that affect no tensor. Kimi K2 has 1.03e12 parameters."""


def known_config(model: str) -> Mapping[str, object]:
    """The configuration of a model in ``MODELS``, or from a file.

    Args:
        model: a name, or the path of a ``config.json`` or of its directory.

    Raises:
        UnsupportedModelError: if it is neither.
    """
    if model in MODELS:
        return MODELS[model]
    if not Path(model).exists():
        raise UnsupportedModelError(f"{model} is neither a file nor one of {', '.join(MODELS)}")
    return read_config(Path(model))


def check_live(config: Mapping[str, object]) -> None:
    """Refuses a configuration that no trainer's model has, or whose engines get weights in another type than it has.

    Args:
        config: content of ``config.json``.

    Raises:
        UnsupportedModelError: with each reason.
    """
    model_flags(config)
    if is_block_fp8(config.get("quantization_config")):
        raise UnsupportedModelError(
            "quantization_config (fp8): plans are of weights in the type in which they are trained; take it out to "
            f"plan for the same model. A push sends such an engine weights in the format {WeightFormat.FP8_BLOCK} "
            "(--weight-format)"
        )
