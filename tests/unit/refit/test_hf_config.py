"""Configurations: what is read from a model, what is refused, and that transformers computes the same frequencies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.families import family_of
from megatron_patches.refit.models.family import build_config
from megatron_patches.refit.models.gpt import rotary_frequencies
from tests.support.public_models import PUBLIC


def fake_model(**changes: Any) -> Any:
    """The attributes of a GPTModel and its configuration that are read; ``model_*`` changes the model's own."""
    config = SimpleNamespace(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=128,
        add_bias_linear=False,
        add_qkv_bias=False,
        qk_layernorm=False,
        layernorm_epsilon=1e-6,
        init_method_std=0.01,
        num_moe_experts=None,
        moe_layer_freq=1,
        moe_ffn_hidden_size=32,
        moe_router_topk=2,
        moe_router_pre_softmax=False,
        moe_router_score_function="softmax",
        moe_router_load_balancing_type="aux_loss",
        moe_router_topk_scaling_factor=None,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
        moe_router_enable_expert_bias=False,
        moe_shared_expert_intermediate_size=None,
        multi_latent_attention=False,
        mtp_num_layers=None,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        rotary_interleaved=False,
    )
    own = {name.removeprefix("model_"): changes.pop(name) for name in list(changes) if name.startswith("model_")}
    vars(config).update(changes)
    scaling = own.pop("scaling_factor", None)
    frequencies = torch.tensor(rotary_frequencies(config.kv_channels, own.get("rotary_base", 10000), scaling))
    model = SimpleNamespace(
        config=config,
        decoder=object(),
        share_embeddings_and_output_weights=True,
        max_sequence_length=2048,
        vocab_size=256,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_scaling=scaling is not None,
        rotary_pos_emb=SimpleNamespace(seq_len_interpolation_factor=None, inv_freq=frequencies),
    )
    vars(model).update(own)
    return model


def test_a_plain_model_is_read() -> None:
    family = family_of(fake_model(), 251)
    traits = family.traits
    assert (traits.num_kv_heads, traits.head_dim, traits.vocab_size, traits.tied_embeddings) == (2, 128, 251, True)
    config = build_config(family, "bfloat16", eos_token_id=2)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_theta"] == 10000.0
    assert config["rope_scaling"] is None
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"normalization": "LayerNorm"}, "--normalization RMSNorm"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ({"gated_linear_unit": False, "activation_func": functional.gelu}, "is not a gated SiLU but a gelu"),
        ({"activation_func": functional.gelu}, "a gated gelu; train with --swiglu"),
        ({"model_position_embedding_type": "learned_absolute"}, "--position-embedding-type rope"),
        ({"rotary_interleaved": True}, "--rotary-interleaved"),
        ({"model_rotary_percent": 0.5}, "--rotary-percent 0.5"),
        ({"qk_l2_norm": True}, "--qk-l2-norm"),
        ({"window_size": (128, 0)}, "--window-size"),
        ({"no_rope_freq": [0, 1]}, "--no-rope-freq"),
        ({"softmax_type": "learnable"}, "--softmax-type"),
        ({"model_vocab_size": 128}, "128 rows, padding included, which cannot hold 251 tokens"),
    ],
)
def test_what_llama_cannot_express_is_refused_by_its_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(fake_model(**changes), 251)


def yarn_model(**changes: Any) -> Any:
    """A GPTModel with YaRN, as Megatron's flags set its configuration."""
    plain: dict[str, Any] = {
        "model_position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 4096,
        "yarn_beta_fast": 16,
        "yarn_beta_slow": 1,
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": True,
    }
    return fake_model(**(plain | changes))


def test_yarn_is_written_without_the_scales_of_latent_attention() -> None:
    assert family_of(yarn_model(), 251).config()["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"yarn_mscale": 0.7}, r"--mscale 0\.7 and --mscale-all-dim 0\.0, which vLLM ignores without latent attention"),
        ({"yarn_correction_range_round_to_int": False}, "it sets --no-yarn-correction-range-round-to-int"),
        ({"yarn_rotary_scaling_factor": 0.5}, r"YaRN shortens sequences \(by a factor of 0\.5\)"),
        ({"model_rotary_percent": 0.5}, "--rotary-percent 0.5"),
    ],
)
def test_yarn_that_no_configuration_expresses_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(yarn_model(**changes), 251)


def test_every_refused_feature_is_listed() -> None:
    with pytest.raises(UnsupportedModelError, match=r"--mtp-num-layers.*; .*--qk-l2-norm"):
        family_of(fake_model(mtp_num_layers=1, qk_l2_norm=True), 251)


@pytest.mark.parametrize("pre_softmax", [False, True])
def test_whether_scores_add_up_to_one_is_the_models_own(pre_softmax: bool) -> None:
    from transformers import Qwen3MoeConfig

    model = fake_model(num_moe_experts=8, qk_layernorm=True, moe_router_pre_softmax=pre_softmax)
    config = build_config(family_of(model, 251), "bfloat16")
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    read = Qwen3MoeConfig(**config)
    assert read.norm_topk_prob is not pre_softmax
    assert (read.num_experts, read.num_experts_per_tok, read.moe_intermediate_size) == (8, 2, 32)


def test_experts_without_norms_on_query_and_key_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"has its 8 experts without norms .* train with --qk-layernorm"):
        family_of(fake_model(num_moe_experts=8), 251)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_freq": [0, 1, 1, 1]}, "--moe-layer-freq"),
        ({"moe_router_score_function": "sigmoid"}, "--moe-router-score-function"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type sinkhorn"),
        ({"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]}, "--moe-router-load-balancing-type"),
        ({"moe_router_topk_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor 2.5"),
        ({"moe_router_pre_softmax": None}, "cannot be told .--moe-router-pre-softmax"),
        ({"moe_shared_expert_intermediate_size": 64}, "--moe-shared-expert-intermediate-size"),
        ({"moe_router_enable_expert_bias": True}, "--moe-router-enable-expert-bias"),
        ({"moe_router_num_groups": 2}, "--moe-router-num-groups"),
        ({"moe_expert_capacity_factor": 1.5}, "--moe-expert-capacity-factor"),
        ({"moe_apply_probs_on_input": True}, "--moe-apply-probs-on-input"),
        ({"moe_latent_size": 16}, "--moe-latent-size"),
        ({"moe_mlp_glu_interleave_size": 32}, "--moe-mlp-glu-interleave-size"),
        ({"moe_router_force_biased": 0.5}, "--moe-router-force-biased"),
    ],
)
def test_what_qwen3_moe_cannot_express_is_refused_by_its_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(fake_model(num_moe_experts=8, qk_layernorm=True, **changes), 251)


def test_interpolated_and_unknown_frequencies_are_refused() -> None:
    model = fake_model()
    model.rotary_pos_emb.seq_len_interpolation_factor = 2.0
    with pytest.raises(UnsupportedModelError, match="--rotary-seq-len-interpolation-factor"):
        family_of(model, 251)
    model = fake_model()
    model.rotary_pos_emb.inv_freq = model.rotary_pos_emb.inv_freq * 0.5
    with pytest.raises(UnsupportedModelError, match="follow neither --rotary-base alone nor Llama 3's scaling"):
        family_of(model, 251)


def test_norms_on_query_and_key_are_qwen3() -> None:
    from transformers import Qwen3Config

    config = build_config(family_of(fake_model(qk_layernorm=True), 251), "bfloat16")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    read = Qwen3Config(**config)
    assert (read.head_dim, read.num_attention_heads, read.hidden_size) == (128, 4, 64)
    assert (read.attention_bias, read.use_sliding_window, read.rms_norm_eps) == (False, False, 1e-6)


@pytest.mark.parametrize(
    ("biases", "architecture"),
    [
        ((), "Llama"),
        (("add_qkv_bias",), "Qwen2"),
        (("add_bias_linear",), "Llama"),
        (("add_qkv_bias", "add_bias_linear"), "Llama"),
    ],
)
def test_biases_on_query_key_and_value_alone_are_qwen2(biases: tuple[str, ...], architecture: str) -> None:
    family = family_of(fake_model(**dict.fromkeys(biases, True)), 251)
    assert family.architecture == f"{architecture}ForCausalLM"
    assert family.config()["model_type"] == architecture.lower()
    assert (family.traits.qkv_bias, family.traits.linear_bias) == (bool(biases), "add_bias_linear" in biases)


@pytest.mark.parametrize("bias", ["add_qkv_bias", "add_bias_linear"])
def test_norms_on_query_and_key_beside_biases_are_refused(bias: str) -> None:
    with pytest.raises(UnsupportedModelError, match="both the norms of --qk-layernorm and biases"):
        family_of(fake_model(qk_layernorm=True, **{bias: True}), 251)


@pytest.mark.parametrize("factor", [None, 8.0, 32.0])
def test_transformers_computes_the_same_frequencies(factor: float | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    family = family_of(fake_model(model_scaling_factor=factor, model_rotary_base=500000), 251)
    assert family.traits.rope_scaling_factor == factor
    config = LlamaConfig(**build_config(family, "float32"))
    theirs = LlamaRotaryEmbedding(config).inv_freq
    ours = torch.tensor(rotary_frequencies(128, 500000.0, factor))
    assert torch.allclose(theirs, ours, rtol=1e-6, atol=0)


def latent_model(**changes: Any) -> Any:
    """A model like DeepSeek-V3."""
    plain: dict[str, Any] = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 12,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 10,
        "rope_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "rotary_scaling_factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "num_moe_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 64,
        "mtp_num_layers": 1,
    }
    return fake_model(**(plain | changes))


def test_latent_attention_is_deepseek_v3() -> None:
    from transformers import DeepseekV3Config

    config = build_config(family_of(latent_model(), 251), "bfloat16")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    read = DeepseekV3Config(**config)
    assert (read.q_lora_rank, read.kv_lora_rank, read.qk_nope_head_dim, read.qk_rope_head_dim) == (24, 16, 12, 8)
    assert (read.n_group, read.topk_group, read.routed_scaling_factor, read.num_experts_per_tok) == (4, 2, 2.5, 4)
    assert (read.first_k_dense_replace, read.n_shared_experts, read.norm_topk_prob) == (1, 2, True)
    assert config["num_nextn_predict_layers"] == 1
    assert config["rope_scaling"] is None
    yarn = family_of(latent_model(rope_type="yarn", mscale_all_dim=1.0), 251).config()["rope_scaling"]
    published = PUBLIC["deepseek-v3"]["rope_scaling"]
    assert isinstance(published, dict)
    assert yarn == {"rope_type": "yarn"} | {name: value for name, value in published.items() if name != "type"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "other"}, "--rope-type rope or --rope-type yarn"),
        ({"mscale_all_dim": 1.0}, "--mscale-all-dim 1.0 without --rope-type yarn"),
        ({"rope_type": "yarn", "mscale": 0.5}, r"--mscale 0\.5 and --mscale-all-dim 0\.0, for which transformers and"),
        ({"rope_type": "yarn", "rotary_scaling_factor": 0.5}, r"YaRN shortens sequences \(by a factor of 0\.5\)"),
        ({"qk_layernorm": False}, "--qk-layernorm"),
        ({"num_moe_experts": None}, "it has no experts"),
        ({"moe_layer_freq": [0, 1, 0, 1]}, "--moe-layer-freq"),
        ({"moe_shared_expert_intermediate_size": 50}, "50 wide, no multiple of 32"),
        ({"moe_router_score_function": "softmax"}, "--moe-router-score-function sigmoid"),
        ({"moe_router_enable_expert_bias": False}, "--moe-router-enable-expert-bias"),
        ({"moe_router_group_topk": 1}, "ranks groups by their best 4 experts"),
        ({"moe_shared_expert_gate": True}, "--moe-shared-expert-gate"),
        ({"add_bias_linear": True}, "--disable-bias-linear"),
        ({"normalization": "LayerNorm"}, "--normalization RMSNorm"),
        ({"activation_func": functional.gelu}, "a gated gelu"),
        ({"window_size": (128, 0)}, "--window-size"),
        ({"rotary_interleaved": True}, "--rotary-interleaved"),
        ({"model_vocab_size": 128}, "which cannot hold 251 tokens"),
    ],
)
def test_what_deepseek_v3_cannot_express_is_refused_by_its_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(latent_model(**changes), 251)


def hybrid_model(**changes: Any) -> Any:
    """A model like NemotronH."""
    plain: dict[str, Any] = {
        "model_hybrid_layer_pattern": "M-M*|ME",
        "model_position_embedding_type": "none",
        "gated_linear_unit": False,
        "activation_func": lambda x: functional.relu(x).square(),
        "layernorm_epsilon": 1e-5,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "mamba_num_groups": 2,
        "mamba_state_dim": 4,
        "num_moe_experts": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 48,
        "moe_latent_size": None,
        "mtp_use_repeated_layer": False,
    }
    return fake_model(**(plain | changes))


def test_a_hybrid_is_nemotron_h() -> None:
    from transformers import NemotronHConfig

    config = build_config(family_of(hybrid_model(), 251), "bfloat16")
    assert config["architectures"] == ["NemotronHForCausalLM"]
    read = NemotronHConfig(**config)
    assert read.hybrid_override_pattern == "M-M*ME"
    assert (read.mamba_num_heads, read.mamba_head_dim, read.n_groups, read.ssm_state_size) == (8, 16, 2, 4)
    assert (read.n_routed_experts, read.moe_intermediate_size, read.moe_shared_expert_intermediate_size) == (8, 32, 48)
    mtp = family_of(hybrid_model(model_hybrid_layer_pattern="M|*-/*E/*E", moe_latent_size=8), 251)
    assert mtp.traits.layer_kinds == ("mamba", "attention", "mlp")
    assert (mtp.traits.mtp_layers, mtp.traits.mtp_layer_kinds) == (2, ("attention", "experts"))
    assert (mtp.traits.moe_latent_size, mtp.traits.num_experts) == (8, 8)
    read = NemotronHConfig(**build_config(mtp, "bfloat16"))
    assert (read.num_nextn_predict_layers, read.mtp_hybrid_override_pattern, read.moe_latent_size) == (2, "*E", 8)
    repeated = hybrid_model(model_hybrid_layer_pattern="M*-/*E/*E", mtp_use_repeated_layer=True)
    assert family_of(repeated, 251).traits.mtp_layers == 1  # one layer, applied twice
    dense = family_of(hybrid_model(model_hybrid_layer_pattern="M*-", mamba_num_heads=None), 251).traits
    assert (dense.num_experts, dense.mamba.heads) == (0, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_hybrid_layer_pattern": "MG"}, "its layers are MG .--hybrid-layer-pattern"),
        ({"model_hybrid_layer_pattern": "M*/GE"}, r"its layers are M\*/GE .--hybrid-layer-pattern"),
        ({"model_position_embedding_type": "rope"}, "--position-embedding-type none"),
        ({"activation_func": functional.relu}, "not a squared ReLU but a relu"),
        ({"gated_linear_unit": True}, "--squared-relu"),
        ({"qk_layernorm": True}, "--qk-layernorm"),
        ({"layernorm_epsilon": 1e-6}, "epsilon of 1e-06"),
        ({"moe_router_score_function": "softmax"}, "--moe-router-score-function sigmoid"),
        ({"add_qkv_bias": True}, "--add-qkv-bias"),
    ],
)
def test_what_nemotron_h_cannot_express_is_refused_by_its_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_of(hybrid_model(**changes), 251)
