"""Configurations of tiny models of every family, as Hugging Face writes them, for live engines and for checkpoints.

Sizes are the least that vLLM's kernels for CPUs take: heads of 32, and experts of 64, as two ranks share one's rows.
"""

from __future__ import annotations

VOCABULARY = 37

SHAPE: dict[str, object] = {
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ROUTED: dict[str, object] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 64,
}
LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": True}
QWEN2 = SHAPE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = SHAPE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_MOE = SHAPE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = (
    SHAPE
    | ROUTED
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }
)
DEEPSEEK_V3_ODD = DEEPSEEK_V3 | {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "num_nextn_predict_layers": 1,
}
"""With sizes that no engine on a CPU takes, and a layer that predicts one more token."""

NEMOTRON_H = SHAPE | {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*M",
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*",
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
}
"""With an MTP layer, which engines leave out."""

NEMOTRON_H_ODD = (
    NEMOTRON_H
    | ROUTED
    | {
        "hybrid_override_pattern": "ME*M-EMM",
        "num_hidden_layers": 8,
        "mamba_head_dim": 6,
        "ssm_state_size": 5,
        "moe_shared_expert_intermediate_size": 20,
        "moe_latent_size": 24,
        "mtp_hybrid_override_pattern": "*E",
    }
)
"""With sizes that no engine on a CPU takes, latent experts, and an MTP layer."""
