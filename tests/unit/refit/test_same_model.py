"""Settings that change answers but no shape are compared before a byte moves."""

from __future__ import annotations

import pytest
from transformers import (
    DeepseekV3Config,
    GraniteConfig,
    LlamaConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
)

from megatron_patches.refit.errors import ModelMismatchError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.vllm.same_model import check_same_model
from tests.integration.tiny_models import NEMOTRON_H
from tests.support.public_models import PUBLIC

TRAINER = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def test_the_same_model_passes_whatever_length_dtype_and_tokens_the_engine_has() -> None:
    same = TRAINER | {"max_position_embeddings": 4096, "torch_dtype": "float16", "eos_token_id": 7, "logit_scale": 1}
    check_same_model(TRAINER, Qwen3Config.from_dict(same))


def test_the_least_time_step_is_no_engines_setting() -> None:
    family = family_from_config(NEMOTRON_H)
    check_same_model(family.config(), NemotronHConfig.from_dict({**family.config(), "time_step_min": 0.001}))


def test_what_a_configuration_says_of_no_window_is_the_same_model() -> None:
    full = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "sliding_window": None, "is_causal": True}
    check_same_model(TRAINER | {"num_hidden_layers": 2}, LlamaConfig.from_dict(TRAINER | full))
    unused = full | {"sliding_window": 4096, "use_sliding_window": False}
    check_same_model(TRAINER | {"num_hidden_layers": 2}, Qwen3Config.from_dict(TRAINER | unused))


@pytest.mark.parametrize("kind", [LlamaConfig, DeepseekV3Config, NemotronHConfig])
def test_a_window_of_all_layers_is_refused_whatever_their_types(kind: type[PretrainedConfig]) -> None:
    """The engine takes it from the configuration unless ``layer_types`` has several kinds."""
    for more in ({}, {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}):
        engine = kind.from_dict(TRAINER | more)
        engine.sliding_window = 16
        with pytest.raises(ModelMismatchError, match="sliding_window is 16 in the engine, which the trainer's model"):
            check_same_model(TRAINER | more, engine)


def test_of_a_model_of_images_what_is_compared_is_its_part_for_texts() -> None:
    texts = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
    model = Qwen2_5_VLConfig(text_config=texts, architectures=["Qwen2_5_VLForConditionalGeneration"])
    trainer, name = model.to_dict(), "Qwen2_5_VLForConditionalGeneration"
    check_same_model(trainer, model.get_text_config(), name)
    model.text_config.rms_norm_eps = 1e-3
    with pytest.raises(
        ModelMismatchError, match=r"^rms_norm_eps is 1e-05 in the trainer and 0\.001 in the engine; start"
    ):
        check_same_model(trainer, model.get_text_config(), name)


def test_an_architecture_with_the_same_tensors_and_other_answers_is_refused() -> None:
    trainer = TRAINER | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    granite = GraniteConfig.from_dict(trainer | {"architectures": ["GraniteForCausalLM"], "model_type": "granite"})
    message = r"architectures is \['LlamaForCausalLM'\] in the trainer and \['GraniteForCausalLM'\] in the engine"
    with pytest.raises(ModelMismatchError, match=message):
        check_same_model(trainer, granite, "GraniteForCausalLM")
    alias = LlamaConfig.from_dict(trainer | {"architectures": ["InternLM3ForCausalLM"]})
    check_same_model(trainer, alias, "LlamaForCausalLM")
    check_same_model(trainer, LlamaConfig.from_dict(trainer), "TransformersForCausalLM")


def test_an_engine_may_serve_a_hybrid_without_its_mtp_layers() -> None:
    hybrid = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME", "moe_latent_size": 8}
    trainer = hybrid | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"}
    check_same_model(trainer, NemotronHConfig.from_dict(hybrid))
    with pytest.raises(ModelMismatchError, match="moe_latent_size is 8 in the trainer and None in the engine"):
        check_same_model(trainer, NemotronHConfig.from_dict(hybrid | {"moe_latent_size": None}))


def test_how_experts_are_scored_is_compared_where_the_engine_does_not_say() -> None:
    trainer = TRAINER | {"architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "sigmoid"}
    check_same_model(trainer, DeepseekV3Config.from_dict(trainer))
    silent = {key: value for key, value in trainer.items() if key != "scoring_func"}
    message = "scoring_func is 'sigmoid' in the trainer and 'softmax' in the engine, whose configuration does not name"
    with pytest.raises(ModelMismatchError, match=message):
        check_same_model(trainer, DeepseekV3Config.from_dict(silent))


def test_yarn_is_the_same_whatever_vllm_calls_it() -> None:
    """Engines write another name into the configuration, and published ones have an old field besides."""
    trainer = family_from_config(PUBLIC["deepseek-v3"]).config()
    engine = DeepseekV3Config.from_dict(PUBLIC["deepseek-v3"])
    engine.rope_parameters["rope_type"] = "deepseek_yarn"
    assert engine.rope_parameters["type"] == "yarn"
    check_same_model(trainer, engine)
    engine.rope_parameters["beta_slow"] = 2
    with pytest.raises(ModelMismatchError, match=r"rope_parameters is .*'beta_slow': 1.0.* and .*'beta_slow': 2"):
        check_same_model(trainer, engine)


def test_yarn_is_the_same_whether_its_defaults_are_written_out() -> None:
    entry = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    published = PUBLIC["qwen3-8b"] | {"rope_scaling": entry}
    engine = Qwen3Config.from_dict(PUBLIC["qwen3-8b"] | {"rope_scaling": dict(entry)})
    check_same_model(family_from_config(published).config(), engine)
    engine.rope_parameters["factor"] = 2.0
    with pytest.raises(ModelMismatchError, match=r"rope_parameters is .*'factor': 4.0.* and .*'factor': 2.0"):
        check_same_model(family_from_config(published).config(), engine)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 1e4}, r"rope_\w+ is .*500000\.0.* in the trainer and .*10000\.0.* in the engine"),
        ({"rms_norm_eps": 1e-6}, r"rms_norm_eps is 1e-05 in the trainer and 1e-06 in the engine"),
        ({"num_attention_heads": 8}, r"num_attention_heads is 4 in the trainer and 8 in the engine"),
        ({"layer_types": ["sliding_attention"] * 32}, r"layer_types is \['sliding_attention', .* in the engine"),
        ({"is_causal": False}, r"is_causal is False in the engine, which the trainer's model does not have"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, r"dual_chunk_attention_config is .* in the engine, which"),
        ({"logit_scale": 0.5}, r"logit_scale is 0\.5 in the engine"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is False in the trainer and True in the engine"),
    ],
)
def test_another_model_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelMismatchError, match=message):
        check_same_model(TRAINER, Qwen3Config.from_dict(TRAINER | change))
