"""A checkpoint is compared with the model of a run, setting by setting and tensor by tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_patches.refit.checkpoints.hf_files import open_checkpoint
from megatron_patches.refit.checkpoints.hf_match import check_config, check_tensors, check_vocabulary
from megatron_patches.refit.errors import LoadError, RefitError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.llama import LlamaFamily
from megatron_patches.refit.models.qwen3 import Qwen3Family
from tests.integration import tiny_models
from tests.support.random_checkpoint import random_tensors, write_checkpoint

Config = dict[str, object]

CONFIGS: dict[str, Config] = {
    "llama": tiny_models.LLAMA,
    "qwen2": tiny_models.QWEN2,
    "qwen3": tiny_models.QWEN3,
    "qwen3_moe": tiny_models.QWEN3_MOE,
    "deepseek_v3": tiny_models.DEEPSEEK_V3_ODD,
    "nemotron_h": tiny_models.NEMOTRON_H_ODD,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_fits_the_configuration_that_it_was_read_from_or_writes(name: str) -> None:
    family = family_from_config(CONFIGS[name])
    check_config(CONFIGS[name], family)
    harmless = {"mamba_hidden_act": "silu", "time_step_limit": [0.0, float("inf")]}
    check_config({**CONFIGS[name], **harmless}, family)
    check_config({**CONFIGS[name], "time_step_limit": [0.0, {"__float__": "Infinity"}]}, family)
    check_config({**family.config(), "torch_dtype": "float16", "transformers_version": "4.2"}, family)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 5},
            r"num_hidden_layers is 5 in config.json and 4 in this run",
        ),
        ("llama", {"hidden_size": 96}, r"hidden_size is 96 in config.json and 64 in this run"),
        ("llama", {"intermediate_size": 8}, r"intermediate_size is 8 .* 96 in this run"),
        ("llama", {"num_attention_heads": 8}, r"num_attention_heads is 8 .* 4"),
        ("llama", {"num_key_value_heads": 4}, r"is 4 .* 2 in this run"),
        ("llama", {"head_dim": 16}, r"head_dim is 16 .* 32 in this run"),
        ("llama", {"tie_word_embeddings": False}, r"is False .* True"),
        ("llama", {"rope_theta": 5e5}, r"rope_theta is 500000.0 .* 10000.0 in this run"),
        ("llama", {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": None}, r"rope_theta is 7.0"),
        ("llama", {"rms_norm_eps": 1e-6}, r"rms_norm_eps is 1e-06 .* 1e-05 in this run"),
        ("llama", {"rope_scaling": {"factor": 8.0}}, r"rope_scaling is .*'factor': 8.0.* and None in this run"),
        ("llama", {"rope_scaling": "linear"}, "its rope_scaling is 'linear', and no table of settings"),
        ("llama", {"rope_scaling": LLAMA_3}, r"rope_scaling is .*llama3.* None in this run"),
        (
            "llama",
            {"rope_scaling": YARN},
            r"rope_scaling is .*'yarn'.* None",
        ),
        ("llama", {"hidden_act": "gelu"}, r"hidden_act is 'gelu' .* 'silu' in this run"),
        ("llama", {"attention_bias": True, "mlp_bias": True}, r"attention_bias is True"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantized .* copy in bfloat16"),
        ("llama", {"sliding_window": 4096}, r"its attention has a window \(sliding_window 4096\)"),
        ("llama", {"partial_rotary_factor": 0.5}, r"rotates a part of each head \(partial_rotary_factor 0.5\)"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rotates a part of each",
        ),
        ("llama", {"architectures": ["Qwen3ForCausalLM"]}, "it is a Qwen3ForCausalLM, .* make a LlamaForCausalLM"),
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "the architecture is GPT2LMHeadModel; known are"),
        ("qwen3_moe", {"num_experts": 8}, r"num_experts is 8 .* 4 in this run"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, r"num_experts_per_tok is 1"),
        ("qwen3_moe", {"norm_topk_prob": False}, r"norm_topk_prob is False"),
        ("deepseek_v3", {"routed_scaling_factor": 1.5}, r"is 1.5 .* 2.5"),
        ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func is 'softmax'"),
        ("deepseek_v3", {"rope_interleave": False}, r"it rotates halves of a head .*\(rope_interleave False\)"),
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, r"is 0 .* 1 in this run"),
        ("deepseek_v3", {"rope_scaling": YARN}, r"rope_scaling is .*'yarn'.* and None"),
        ("nemotron_h", {"ssm_state_size": 7}, r"ssm_state_size is 7 .* 5 in this run"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, r"another activation than SiLU \(mamba_hidden_act 'gelu'\)"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, r"clamp the time step \(time_step_limit \[0.0, 0.1\]\)"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*M-EM*"}, r"'ME\*M-EM\*'"),
        ("nemotron_h", {"moe_latent_size": None}, r"moe_latent_size is None .* 24 in this run"),
        ("nemotron_h", {"num_nextn_predict_layers": 0}, r"is 0 .* 1 in this run"),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "E"}, r"is 'E' .* '\*E' in this run"),
    ],
)
def test_every_difference_is_named_with_both_values(name: str, changes: Config, message: str) -> None:
    config = {key: value for key, value in {**CONFIGS[name], **changes}.items() if value is not None}
    with pytest.raises(RefitError, match=message):
        check_config(config, family_from_config(CONFIGS[name]))


PUBLISHED: dict[str, Config] = {
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_fit_the_models_that_their_flags_make(name: str) -> None:
    config = PUBLISHED[name]
    traits = replace(family_from_config(config).traits, max_positions=4096, init_std=0.006)
    if config["rope_scaling"] is None:
        check_config(config, Qwen3Family(traits))
        return
    check_config(config, LlamaFamily(replace(traits, rope_scaling_factor=8.0)))
    for factor in (None, 32.0):
        with pytest.raises(LoadError, match=r"rope_scaling is"):
            check_config(config, LlamaFamily(replace(traits, rope_scaling_factor=factor)))


def test_yarn_is_compared_with_its_defaults() -> None:
    family = family_from_config(tiny_models.DEEPSEEK_V3 | {"rope_scaling": YARN})
    check_config(tiny_models.DEEPSEEK_V3 | {"rope_scaling": YARN | {"beta_fast": 32, "mscale_all_dim": 0}}, family)
    check_config(tiny_models.DEEPSEEK_V3 | {"rope_parameters": YARN | {"rope_theta": 10000.0}}, family)
    for changes in ({"beta_fast": 16}, {"factor": 20}, {"mscale_all_dim": 1.0}, {"rope_type": "default"}):
        with pytest.raises(LoadError, match=r"rope_scaling is"):
            check_config(tiny_models.DEEPSEEK_V3 | {"rope_scaling": YARN | changes}, family)


def test_what_does_not_matter_may_differ() -> None:
    family = family_from_config(tiny_models.LLAMA)
    window = {"sliding_window": 4096, "use_sliding_window": False, "max_position_embeddings": 9, "use_cache": False}
    check_config({**tiny_models.LLAMA, **window, "rope_scaling": {"type": "default"}}, family)
    mixture = family_from_config(tiny_models.QWEN3_MOE)  # no layer has a feed-forward of this width
    check_config({**tiny_models.QWEN3_MOE, "intermediate_size": 12345}, mixture)


def test_the_embedding_holds_all_tokens_and_fits() -> None:
    assert check_vocabulary(tiny_models.LLAMA, 37, 40) == 37
    assert check_vocabulary(tiny_models.LLAMA, 30, 37) == 37
    with pytest.raises(LoadError, match=r"vocab_size is 37 in config.json, and the run's tokenizer has 38 tokens"):
        check_vocabulary(tiny_models.LLAMA, 38, 40)
    with pytest.raises(LoadError, match=r"is 37 .* embedding has 32 rows; pass --padded-vocab-size with at least 37"):
        check_vocabulary(tiny_models.LLAMA, 30, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"model.norm.weight is missing in .*model"),
        ({"extra.weight": torch.randn(2)}, r"extra.weight is unexpected in .*model: the model of this run has no"),
        ({"model.norm.weight": torch.randn(63)}, r"model.norm.weight in .* has shape \(63,\); .* needs \(64,\)"),
        ({"model.layers.0.mlp.up_proj.weight": torch.randn(64, 96)}, r"has shape \(64, 96\); .* needs \(96, 64\)"),
        ({"lm_head.weight": torch.randn(36, 64)}, r"lm_head.weight is unexpected"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {**random_tensors(tiny_models.LLAMA), **change}
    given = {name: values for name, values in tensors.items() if values is not None}
    write_checkpoint(tmp_path / "model", tiny_models.LLAMA, given)
    with pytest.raises(LoadError, match=message):
        check_tensors(open_checkpoint(tmp_path / "model"), family_from_config(tiny_models.LLAMA))


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_models.LLAMA)
    given = {name: values for name, values in tensors.items() if "layers.0." not in name}
    write_checkpoint(tmp_path / "model", tiny_models.LLAMA, given)
    with pytest.raises(LoadError, match=r"self_attn.k_proj.weight and 6 more are missing in"):
        check_tensors(open_checkpoint(tmp_path / "model"), family_from_config(tiny_models.LLAMA))


@pytest.mark.parametrize("name", ["deepseek_v3", "nemotron_h"])
def test_mtp_layers_that_transformers_did_not_save_are_told_apart(tmp_path: Path, name: str) -> None:
    config, family = CONFIGS[name], family_from_config(CONFIGS[name])
    tensors = {key: values for key, values in random_tensors(config).items() if not key.startswith(family.mtp_prefixes)}
    write_checkpoint(tmp_path / "model", config, tensors)
    with pytest.raises(LoadError, match=r"more are missing .*: set num_nextn_predict_layers to 0 in config.json$"):
        check_tensors(open_checkpoint(tmp_path / "model"), family)
    del tensors["lm_head.weight"]
    write_checkpoint(tmp_path / "other", config, tensors)
    with pytest.raises(LoadError, match=r"more are missing in [^;]*$"):
        check_tensors(open_checkpoint(tmp_path / "other"), family)


def test_what_repeats_the_embedding_or_can_be_computed_is_no_mistake(tmp_path: Path) -> None:
    tensors = random_tensors(tiny_models.LLAMA)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.randn(16)
    write_checkpoint(tmp_path / "model", tiny_models.LLAMA, tensors)
    files, family = open_checkpoint(tmp_path / "model"), family_from_config(tiny_models.LLAMA)
    assert check_tensors(files, family) == {"lm_head.weight": "model.embed_tokens.weight"}
