"""NemotronH: names against transformers, parameters against live Megatron models, blocks of a mixer by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_patches.refit.errors import UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions, param_shards, trainer_manifest
from megatron_patches.refit.models.shard import ParamShard, placements
from tests.support.exported import shapes_written_by
from tests.support.held_together import assert_whole, boxes_held
from tests.support.live_models import Case

CONFIG: dict[str, object] = {
    "architectures": ["NemotronHForCausalLM"],
    "torch_dtype": "bfloat16",
    "hybrid_override_pattern": "M-M*",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "ssm_state_size": 3,
    "conv_kernel": 4,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
EXPERTS = CONFIG | {
    "hybrid_override_pattern": "ME*M-E",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "moe_shared_expert_intermediate_size": 20,
}
LATENT = EXPERTS | {"moe_latent_size": 8}
MTP = LATENT | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
TWO_MTP = CONFIG | {"num_nextn_predict_layers": 2, "mtp_layers_block_type": ["mamba", "mlp"]}
CASES = {
    "alone": Case(TrainerMesh(), (0,), CONFIG),
    "tp2_etp2": Case(TrainerMesh(tp=2, etp=2), (0, 3), CONFIG),
    "etp3_tied": Case(TrainerMesh(etp=3), (2,), CONFIG | {"tie_word_embeddings": True}),
    "stages": Case(TrainerMesh(tp=2, pp=2), (1, 2), CONFIG),
    "experts_tp2_etp2_ep2": Case(TrainerMesh(tp=2, etp=2, ep=2, expert_etp=2), (1, 2), EXPERTS),
    "latent_experts_etp3": Case(TrainerMesh(etp=3, expert_etp=3), (0, 2), LATENT),
    "mtp_tp2_etp2_ep2": Case(TrainerMesh(tp=2, etp=2, ep=2, expert_etp=2), (1, 2), MTP),
    "mtp_stages": Case(TrainerMesh(tp=2, pp=2, dp=2), (1, 6), MTP | {"tie_word_embeddings": True}),
    "two_mtp_stages": Case(TrainerMesh(pp=2), (0, 1), TWO_MTP),
    "experts_expert_tp2": Case(TrainerMesh(tp=2, expert_tp=2, dp=2), (1, 2), EXPERTS),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_equals_that_of_a_live_model(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]


@pytest.mark.parametrize("config", [CONFIG, EXPERTS, MTP])
def test_names_and_shapes_are_those_that_transformers_writes(config: dict[str, object], tmp_path: Path) -> None:
    """It writes no MTP layers."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    family = family_from_config(config)
    theirs = shapes_written_by(NemotronHForCausalLM(NemotronHConfig(**family.config())), tmp_path)
    assert {name: shape for name, shape in family.shapes().items() if not name.startswith("mtp.")} == theirs


def test_mtp_layers_are_named_as_in_published_checkpoints() -> None:
    found = {name: shape for name, shape in family_from_config(MTP).shapes().items() if name.startswith("mtp.")}
    outer = {
        "mtp.layers.0.enorm.weight": (16,),
        "mtp.layers.0.hnorm.weight": (16,),
        "mtp.layers.0.eh_proj.weight": (16, 32),
        "mtp.layers.1.final_layernorm.weight": (16,),
    }
    attention = {"q_proj": (24, 16), "k_proj": (12, 16), "v_proj": (12, 16), "o_proj": (16, 24)}
    experts = {
        "gate.weight": (4, 16),
        "gate.e_score_correction_bias": (4,),
        "fc1_latent_proj.weight": (8, 16),
        "fc2_latent_proj.weight": (16, 8),
        "shared_experts.up_proj.weight": (20, 16),
        "shared_experts.down_proj.weight": (16, 20),
    }
    for expert in range(4):
        experts |= {f"experts.{expert}.up_proj.weight": (10, 8), f"experts.{expert}.down_proj.weight": (8, 10)}
    assert found == outer | {
        "mtp.layers.0.norm.weight": (16,),
        **{f"mtp.layers.0.mixer.{name}.weight": shape for name, shape in attention.items()},
        "mtp.layers.1.norm.weight": (16,),
        **{f"mtp.layers.1.mixer.{name}": shape for name, shape in experts.items()},
    }


@pytest.mark.parametrize("config", [CONFIG, EXPERTS, LATENT, MTP, TWO_MTP])
def test_what_is_read_is_what_is_written(config: dict[str, object]) -> None:
    family = family_from_config(config)
    assert family_from_config(family.config()).traits == family.traits


def test_all_names_of_a_layers_kind_are_understood() -> None:
    kinds = ["linear_attention", "moe", "full_attention", "mamba", "mlp", "moe"]
    listed = {name: value for name, value in EXPERTS.items() if name != "hybrid_override_pattern"}
    traits = family_from_config(listed | {"layers_block_type": kinds}).traits
    assert traits == family_from_config(EXPERTS).traits
    assert [traits.has_experts(layer) for layer in range(6)] == [False, True, False, False, False, True]


@pytest.mark.parametrize("transformer_engine", [False, True])
def test_all_ranks_together_hold_the_whole_model_and_nothing_else(transformer_engine: bool) -> None:
    family, mesh = family_from_config(MTP), TrainerMesh(tp=2, etp=2, pp=2, ep=2, dp=2)
    options = TrainerOptions(transformer_engine=transformer_engine)
    assert_whole(boxes_held(family, mesh, options), family.shapes())


@pytest.mark.parametrize(("name", "parts"), [("in_proj.weight", (20, 20, 6, 6, 4)), ("conv1d.weight", (20, 6, 6))])
def test_each_block_of_a_mixer_is_cut_on_its_own(name: str, parts: tuple[int, ...]) -> None:
    """A rank's weight, put together by hand from the halves of every block, has the rows that the boxes say."""
    family, total = family_from_config(CONFIG), sum(parts)
    whole = np.arange(total)
    blocks = np.split(whole, np.cumsum(parts)[:-1])
    for rank in range(2):
        mine = np.concatenate([np.split(block, 2)[rank] for block in blocks])
        mesh = TrainerMesh(tp=2, etp=2)
        for etp_rank in range(2):
            storage = f"chunk0.decoder.layers.0.mixer.{name.replace('conv1d.', 'conv1d_')}"
            shards = {s.storage: s for s in param_shards(family, mesh, etp_rank * 2 + rank)}
            shard = shards[storage]
            for placement in placements(shard, family.pieces(shard)):
                first = placement.view.offset // shard.row_numel + shard.rows[0]
                box = placement.box
                assert list(range(box.start[0], box.stop[0])) == mine[first : first + box.shape[0]].tolist()


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.1.mixer.in_proj.weight",
        "decoder.layers.4.norm.weight",
        "decoder.layers.0.mixer.in_proj.bias",
        "decoder.final_layernorm.weight",
        "decoder.layers.1.mlp.fc1_latent_proj.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.mlp.router.weight",
    ],
)
def test_an_unmapped_parameter_is_named(name: str) -> None:
    shard = ParamShard(name=name, storage=name, shape=(24, 16), rows=(0, 24), held_shape=(24, 16), dtype="bfloat16")
    with pytest.raises(UnmappedParameterError, match=f"Megatron parameter {name}"):
        family_from_config(CONFIG).pieces(shard)


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.1.enorm.weight",
        "mtp.layers.0.mtp_model_layer.layers.2.mlp.router.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.mlp.router.weight",
    ],
)
def test_an_mtp_layer_too_many_or_of_another_kind_is_named(name: str) -> None:
    shard = ParamShard(name=name, storage=name, shape=(4, 16), rows=(0, 4), held_shape=(4, 16), dtype="bfloat16")
    with pytest.raises(UnmappedParameterError, match=f"Megatron parameter {name}"):
        family_from_config(MTP).pieces(shard)


def test_a_mixer_of_other_sizes_is_named() -> None:
    name = "decoder.layers.0.mixer.in_proj.weight"
    shard = ParamShard(name=name, storage=name, shape=(55, 16), rows=(0, 55), held_shape=(55, 16), dtype="bfloat16")
    with pytest.raises(UnmappedParameterError, match=r"has 55 rows .* blocks of 20, 20, 6, 6, 4 rows were expected"):
        family_from_config(CONFIG).pieces(shard)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True, "mlp_bias": True}, "sets attention_bias, mlp_bias; of NemotronH only"),
        ({"use_conv_bias": False}, "sets use_conv_bias to false"),
        (EXPERTS | {"moe_latent_size": -8}, "moe_latent_size is -8"),
        ({"num_nextn_predict_layers": 1}, "mtp_layers_block_type or mtp_hybrid_override_pattern is None; known kinds"),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*X"}, "mtp_hybrid_override_pattern is \\*X;"),
        ({"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is MX; known kinds are M, "),
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern is None"),
        ({"n_groups": 0}, "n_groups is 0"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_from_config(CONFIG | changes)


def test_the_width_of_feed_forwards_that_there_are_not_may_be_any() -> None:
    family = family_from_config(CONFIG | {"hybrid_override_pattern": "MM*M", "intermediate_size": 5})
    assert_whole(boxes_held(family, TrainerMesh(tp=2), TrainerOptions()), family.shapes())


def test_groups_that_tensor_parallelism_does_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"tp of 4 does not divide groups of a Mamba mixer \(2\)"):
        trainer_manifest(family_from_config(CONFIG), TrainerMesh(tp=4), 0)
