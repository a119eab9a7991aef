"""Manifests from the configuration alone equal those of a live Megatron model, on ranks of many meshes.

The live model is built by one process that believes to be the rank; building one moves nothing between ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_patches.refit.errors import UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.models.config_traits import dtype_of, family_from_config, read_config
from megatron_patches.refit.models.mesh import TrainerMesh, TrainerRank
from megatron_patches.refit.models.offline import TrainerOptions, param_shards, trainer_manifest
from megatron_patches.refit.models.shard import ParamShard
from tests.support.held_together import assert_whole, boxes_held
from tests.support.live_models import Case

DENSE: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}


LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"]}
CASES = {
    "llama_alone": Case(TrainerMesh(), (0,), LLAMA),
    "llama_biases_tp2_etp2": Case(TrainerMesh(tp=2, etp=2), (0, 3), LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "qwen2_etp3": Case(TrainerMesh(etp=3), (0, 2), DENSE | {"architectures": ["Qwen2ForCausalLM"]}),
    "qwen3_above_kv_heads": Case(TrainerMesh(tp=4, etp=2, dp=2), (5, 15), DENSE),
    "qwen3_tied_stages": Case(TrainerMesh(etp=2, pp=2, vpp=2, dp=2), (1, 4), DENSE | {"tie_word_embeddings": True}),
    "qwen3_tied_one_stage": Case(TrainerMesh(tp=2), (1,), DENSE | {"tie_word_embeddings": True}),
    "experts_alone": Case(TrainerMesh(), (0,), EXPERTS),
    "experts_ep2_expert_etp2": Case(TrainerMesh(tp=2, etp=2, pp=2, vpp=2, ep=2, expert_etp=2, dp=2), (2, 13), EXPERTS),
    "experts_expert_tp2": Case(TrainerMesh(tp=2, etp=2, ep=2, expert_tp=2, dp=2), (3, 6), EXPERTS),
    "experts_more_than_tp": Case(TrainerMesh(etp=2, ep=4, dp=4), (3, 5), EXPERTS),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_equals_that_of_a_live_model(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]


def test_all_ranks_together_hold_the_whole_model_and_nothing_else() -> None:
    mesh = CASES["experts_ep2_expert_etp2"].mesh
    family = family_from_config(EXPERTS)
    held = boxes_held(family, mesh, TrainerOptions())
    assert_whole(held, family.shapes())
    assert "model.layers.3.mlp.experts.3.down_proj.weight" in held


def test_grouped_experts_and_fused_norms_are_the_same_boxes_under_other_names() -> None:
    mesh = TrainerMesh(tp=2, ep=2, expert_tp=2, dp=2)
    for config in (DENSE, EXPERTS):
        family = family_from_config(config)
        this = mesh if config is EXPERTS else TrainerMesh(tp=2, etp=2)
        plain = trainer_manifest(family, this, 3)
        grouped = trainer_manifest(family, this, 3, TrainerOptions(transformer_engine=True))
        assert {(item.box, item.view.offset) for item in plain.placements} == {
            (item.box, item.view.offset) for item in grouped.placements
        }
        assert {item.name for item in plain.storages} != {item.name for item in grouped.storages}


def test_ranks_are_numbered_in_megatrons_order() -> None:
    mesh = TrainerMesh(tp=2, etp=2, pp=2, ep=2, expert_etp=2, dp=2)
    assert mesh.size == 16
    assert mesh.coordinates(13) == TrainerRank(tp=1, etp=0, pp=1, ep=1, expert_tp=0, expert_etp=0)
    assert len({mesh.coordinates(rank) for rank in range(16)}) == 8, "two replicas of each"
    with pytest.raises(ValueError, match="no rank 16 among 16"):
        mesh.coordinates(16)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"vpp": 2}, "need pp of at least 2"),
        ({"tp": 2, "ep": 3}, r"expert_tp 1 x ep 3 x expert_etp 1 = 3 does not divide the 2 ranks"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerMesh(**sizes)


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (DENSE, TrainerMesh(pp=3), r"pp x vpp of 3 does not divide num_layers \(4\)"),
        (DENSE, TrainerMesh(tp=8), r"tp of 8 does not divide attention heads \(4\)"),
        (DENSE, TrainerMesh(ep=2, dp=2), "ep is 2, .* but the model has no experts"),
        (EXPERTS, TrainerMesh(ep=3, dp=3), r"ep of 3 does not divide experts \(4\)"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(
    config: dict[str, object], mesh: TrainerMesh, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        list(param_shards(family_from_config(config), mesh, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "the architecture is MixtralForCausalLM; known are Deepseek"),
        ({"architectures": None}, "the architecture is not given"),
        ({"hidden_size": "16"}, "hidden_size is '16' in the configuration; it must be a positive integer"),
        ({"mlp_only_layers": [1]}, "only models with experts in every layer"),
        ({"decoder_sparse_step": 2}, "only models with experts in every layer"),
        ({"attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3 and num_attention_heads is 4"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no' in the configuration; it must be true or false"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_from_config(EXPERTS | changes)


@pytest.mark.parametrize(
    ("architecture", "missing"),
    [
        ("DeepseekV3ForCausalLM", "q_lora_rank, first_k_dense_replace, n_shared_experts"),
        ("NemotronHForCausalLM", "num_key_value_heads"),
    ],
)
def test_what_nobody_leaves_out_on_purpose_is_asked_for(architecture: str, missing: str) -> None:
    """Anything else than transformers' own values would give a plan for other shapes than the engine's."""
    config = {name: value for name, value in EXPERTS.items() if name != missing} | {"architectures": [architecture]}
    with pytest.raises(UnsupportedModelError, match=f"{architecture} does not say {missing}"):
        family_from_config(config)


def test_defaults_of_a_configuration() -> None:
    missing = ("head_dim", "num_key_value_heads")
    traits = family_from_config({name: value for name, value in LLAMA.items() if name not in missing}).traits
    assert (traits.head_dim, traits.num_kv_heads, traits.num_experts, traits.qk_norm) == (4, 4, 0, False)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("is_null", [False, True])
def test_defaults_are_those_of_transformers(architecture: str, is_null: bool) -> None:
    """They differ between architectures; where ``null`` is written they follow from other fields."""
    from transformers import AutoConfig

    missing: dict[str, object] = {"num_key_value_heads": None} if is_null else {}
    left_out = {*missing, "num_key_value_heads", *(() if is_null else ("head_dim",))}
    config = {name: value for name, value in LLAMA.items() if name not in left_out}
    config |= {"architectures": [architecture], "num_attention_heads": 64, "hidden_size": 256, **missing}
    traits = family_from_config(config).traits
    known: Any = AutoConfig.for_model(architecture.removesuffix("ForCausalLM").lower(), **config)
    head_dim = getattr(known, "head_dim", known.hidden_size // known.num_attention_heads)
    assert (traits.num_kv_heads, traits.head_dim) == (known.num_key_value_heads, head_dim)


def test_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == EXPERTS
    assert dtype_of(EXPERTS) == dtype_of({"dtype": "bfloat16"}) == "bfloat16"
    with pytest.raises(UnsupportedModelError, match="neither torch_dtype nor dtype"):
        dtype_of({})
    with pytest.raises(UnsupportedModelError, match=r"the weights' type is 'auto' .*, such as bfloat16"):
        dtype_of({"torch_dtype": "auto"})
    with pytest.raises(UnsupportedModelError, match=r"cannot read .*missing: No such file"):
        read_config(tmp_path / "missing")
    for text, message in (("{", "is not JSON"), ("[]", "is not the configuration of a model")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=message):
            read_config(tmp_path)


@pytest.mark.parametrize(
    "name", ["decoder.layers.4.mlp.experts.linear_fc1.weight0", "decoder.layers.0.mlp.experts.linear_fc2.weight4"]
)
def test_an_expert_that_the_model_does_not_have_is_named(name: str) -> None:
    family = family_from_config(EXPERTS)
    shard = ParamShard(name=name, storage=name, shape=(20, 16), rows=(0, 20), held_shape=(20, 16), dtype="bfloat16")
    with pytest.raises(UnmappedParameterError, match=f"Megatron parameter {name}"):
        family.pieces(shard)


def test_transformers_reads_what_the_family_writes() -> None:
    from transformers import Qwen3MoeConfig

    read = Qwen3MoeConfig(**family_from_config(EXPERTS).config())
    assert (read.num_experts, read.num_experts_per_tok, read.moe_intermediate_size) == (4, 2, 10)
    assert (read.decoder_sparse_step, read.mlp_only_layers, read.head_dim) == (1, [], 6)
