"""DeepSeek-V3: names against transformers, parameters against live Megatron models, and plans that are proved."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_patches.refit.errors import RefitError, UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions, trainer_manifest
from megatron_patches.refit.models.shard import ParamShard
from megatron_patches.refit.planning.tensors import agree_on_tensors
from tests.support.exported import shapes_written_by
from tests.support.held_together import assert_whole, boxes_held
from tests.support.live_models import Case

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "vocab_size": 37,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
}
PLAIN = CONFIG | {"q_lora_rank": None, "n_shared_experts": None, "num_nextn_predict_layers": 0}
# PLAIN is not among them: without a compressed query Megatron 0.19.2 takes a layer of Transformer Engine's.
CASES = {
    "alone": Case(TrainerMesh(), (0,), CONFIG),
    "tp2_etp2_ep2": Case(TrainerMesh(tp=2, etp=2, ep=2), (0, 3), CONFIG),
    "etp3": Case(TrainerMesh(etp=3), (0, 2), CONFIG),
    "stages_of_three_and_one": Case(TrainerMesh(tp=2, etp=2, pp=2, ep=2, first=3), (1, 7), CONFIG),
    "stages_two_chunks": Case(TrainerMesh(pp=2, vpp=2, ep=2, dp=2), (0, 2, 3), CONFIG),
    "stages_uneven_chunks": Case(
        TrainerMesh(pp=3, vpp=2, dp=2, ep=2, last=4), (0, 2, 5), CONFIG | {"num_hidden_layers": 8}
    ),
    "expert_tp2_expert_etp2": Case(TrainerMesh(tp=2, etp=2, expert_tp=2, expert_etp=2), (1, 2), CONFIG),
}


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_equals_that_of_a_live_model(name: str, verdicts: dict[str, str]) -> None:
    assert not verdicts[name], verdicts[name]


@pytest.mark.parametrize("config", [CONFIG, PLAIN])
def test_names_and_shapes_are_those_that_transformers_writes(config: dict[str, object], tmp_path: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    family = family_from_config(config)
    written = dict(family.config())
    if config is PLAIN:
        written["n_shared_experts"] = 1  # transformers cannot do without
    theirs = shapes_written_by(DeepseekV3ForCausalLM(DeepseekV3Config(**written)), tmp_path)
    ours = {name: shape for name, shape in family.shapes().items() if not name.startswith("model.layers.4.")}
    if config is PLAIN:
        theirs = {name: shape for name, shape in theirs.items() if "shared_experts" not in name}
    assert ours == theirs


def test_what_is_left_out_of_the_router_is_what_transformers_takes() -> None:
    from transformers import DeepseekV3Config

    router = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
    written = family_from_config({name: value for name, value in CONFIG.items() if name not in router}).config()
    theirs = DeepseekV3Config()
    assert {name: written[name] for name in router} == {name: getattr(theirs, name) for name in router}


def test_what_is_read_is_what_is_written() -> None:
    family = family_from_config(CONFIG)
    assert family_from_config(family.config()).traits == family.traits
    assert family.config()["topk_method"] == "noaux_tc"


@pytest.mark.parametrize("config", [CONFIG, PLAIN])
@pytest.mark.parametrize("transformer_engine", [False, True])
def test_all_ranks_together_hold_the_whole_model_and_nothing_else(
    config: dict[str, object], transformer_engine: bool
) -> None:
    family, mesh = family_from_config(config), TrainerMesh(tp=2, etp=2, pp=2, ep=2, dp=2, first=1)
    options = TrainerOptions(transformer_engine=transformer_engine)
    held = boxes_held(family, mesh, options)
    assert_whole(held, family.shapes())
    down = held["model.layers.2.self_attn.kv_a_proj_with_mqa.weight"]
    assert len(down) == (1 if transformer_engine else 2), "repeated, or cut by tensor parallelism"


def test_the_routers_bias_stays_float32_and_the_embedding_is_on_two_stages() -> None:
    family, mesh = family_from_config(CONFIG), TrainerMesh(pp=2)
    manifests = [trainer_manifest(family, mesh, rank) for rank in range(2)]
    dtypes = {spec.name: spec.dtype for spec in agree_on_tensors(family.shapes(), manifests)}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {
        f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3, 4)
    }
    for tensor in ("model.embed_tokens.weight", "model.layers.4.embed_tokens.weight"):
        holders = [m.rank for m in manifests if any(place.box.tensor == tensor for place in m.placements)]
        assert holders == [0, 1]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tied_table_has_all_its_names(pp: int) -> None:
    family = family_from_config(CONFIG | {"tie_word_embeddings": True})
    manifests = [trainer_manifest(family, TrainerMesh(pp=pp), rank) for rank in range(pp)]
    assert "lm_head.weight" not in {spec.name for spec in agree_on_tensors(family.shapes(), manifests)}
    for manifest in manifests:
        tables = {place.box.tensor for place in manifest.placements if place.box.stop[0] == 37}
        assert tables == {
            "model.embed_tokens.weight",
            "model.layers.4.embed_tokens.weight",
            "model.layers.4.shared_head.head.weight",
        }


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.router.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.4.self_attention.linear_proj.weight",
        "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight",
        "decoder.layers.1.mlp.shared_experts.gate_weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "mtp.layers.1.enorm.weight",
        "mtp.layers.1.mtp_model_layer.input_layernorm.weight",
    ],
)
def test_an_unmapped_parameter_is_named(name: str) -> None:
    shard = ParamShard(name=name, storage=name, shape=(20, 16), rows=(0, 20), held_shape=(20, 16), dtype="bfloat16")
    with pytest.raises(UnmappedParameterError, match=f"Megatron parameter {name}"):
        family_from_config(CONFIG).pieces(shard)


def test_a_tensor_that_no_parameter_maps_to_is_named() -> None:
    family = family_from_config(CONFIG | {"num_nextn_predict_layers": 0})
    held = trainer_manifest(family, TrainerMesh(), 0)
    with pytest.raises(RefitError, match=r"no rank holds model.layers.4.eh_proj.weight, model.layers.4.embed_tokens"):
        agree_on_tensors(family_from_config(CONFIG).shapes(), [held])


def test_a_down_projection_of_the_wrong_size_is_named() -> None:
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    shard = ParamShard(
        name=name, storage="", shape=(12, 16), rows=(0, 12), held_shape=(12, 16), dtype="bfloat16", tp_size=2,
        partition_dim=0,
    )  # fmt: skip
    with pytest.raises(UnmappedParameterError, match=r"has 12 rows on each of 2 .* cut along dim 0; .* has 12"):
        family_from_config(CONFIG).pieces(shard)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank is None"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        family_from_config(CONFIG | changes)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (TrainerMesh(pp=2, first=5), "4 layers, 5 on the first stage, leave -1 for 1 further stages"),
        (TrainerMesh(pp=4, last=2), "leave 2 for 3 further stages"),
        (TrainerMesh(pp=2, vpp=2, first=3), r"vpp of 2 does not divide layers of a stage \(3\)"),
        (TrainerMesh(tp=8), r"tp of 8 does not divide attention heads \(4\)"),
        (TrainerMesh(tp=2), r"tp of 2 does not divide rows of the compressed query \(9\)"),
        (TrainerMesh(tp=4), r"tp of 4 does not divide hidden size, for layers that predict .*, \(18\)"),
    ],
)
def test_meshes_that_cannot_be_are_refused(mesh: TrainerMesh, message: str) -> None:
    odd = {TrainerMesh(tp=2): {"q_lora_rank": 9}, TrainerMesh(tp=4): {"hidden_size": 18}}
    config = CONFIG | odd.get(mesh, {})
    with pytest.raises(UnsupportedModelError, match=message):
        trainer_manifest(family_from_config(config), mesh, 0)
    with pytest.raises(ValueError, match="but there is one pipeline stage"):
        TrainerMesh(first=1)
