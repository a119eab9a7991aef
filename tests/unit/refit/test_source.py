"""Megatron's layouts to boxes: every element at its place, for TP x ETP, against a dense oracle written separately."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etp.layout import ShardLayout
from megatron_patches.refit.checkpoints.safetensors_layout import layout_checkpoint
from megatron_patches.refit.errors import UnmappedParameterError
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.models import rules
from megatron_patches.refit.models.llama import LlamaFamily
from megatron_patches.refit.models.qwen2 import Qwen2Family
from megatron_patches.refit.models.qwen3 import Qwen3Family
from megatron_patches.refit.models.shard import ParamShard, RowSpan, placements
from megatron_patches.refit.models.traits import ModelTraits
from megatron_patches.refit.planning.plan import PlanOptions, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.planning.tensors import agree_on_tensors

TRAITS = ModelTraits(
    num_layers=2,
    hidden_size=12,
    ffn_hidden_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=37,
    max_positions=64,
    tied_embeddings=False,
    qkv_bias=True,
    linear_bias=True,
    norm_eps=1e-5,
    rope_base=10000.0,
)
PADDED_VOCAB = 40
PADDING = -1.0


def mapping_of(traits: ModelTraits) -> LlamaFamily:
    """The family that has these biases and norms."""
    if traits.qk_norm:
        return Qwen3Family(traits)
    return Qwen2Family(traits) if traits.qkv_bias and not traits.linear_bias else LlamaFamily(traits)


def dense_model(traits: ModelTraits, seed: int) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face's names."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in mapping_of(traits).shapes().items()}


def megatron_model(traits: ModelTraits, dense: dict[str, np.ndarray]) -> dict[str, tuple[np.ndarray, int | None]]:
    """The same weights as Megatron keeps them without parallelism: name -> (array, dimension that TP cuts).

    Gate and up are stacked as a leading dimension of 2, to be flattened once they are cut.
    """

    def padded(table: np.ndarray) -> np.ndarray:
        return np.concatenate([table, np.full((PADDED_VOCAB - len(table), table.shape[1]), PADDING)])

    def fused(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        tail = q.shape[1:]
        groups = traits.num_kv_heads
        split = [part.reshape(groups, -1, *tail) for part in (q, k, v)]
        return np.concatenate(split, axis=1).reshape(-1, *tail)

    found: dict[str, tuple[np.ndarray, int | None]] = {
        "embedding.word_embeddings.weight": (padded(dense["model.embed_tokens.weight"]), 0),
        "decoder.final_layernorm.weight": (dense["model.norm.weight"], None),
    }
    if not traits.tied_embeddings:
        found["output_layer.weight"] = (padded(dense["lm_head.weight"]), 0)
    for layer in range(traits.num_layers):
        hf, mc = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        found[mc + "input_layernorm.weight"] = (dense[hf + "input_layernorm.weight"], None)
        found[mc + "mlp.linear_fc1.layer_norm_weight"] = (dense[hf + "post_attention_layernorm.weight"], None)
        if traits.qk_norm:
            for kind in "qk":
                norm = dense[f"{hf}self_attn.{kind}_norm.weight"]
                found[f"{mc}self_attention.{kind}_layernorm.weight"] = (norm, None)
        for kind, bias in (("weight", False), ("bias", True)):
            if f"{hf}self_attn.q_proj.{kind}" in dense:
                q, k, v = (dense[f"{hf}self_attn.{name}_proj.{kind}"] for name in "qkv")
                found[f"{mc}self_attention.linear_qkv.{kind}"] = (fused(q, k, v), 0)
            if f"{hf}mlp.gate_proj.{kind}" in dense:
                gate, up = dense[f"{hf}mlp.gate_proj.{kind}"], dense[f"{hf}mlp.up_proj.{kind}"]
                found[f"{mc}mlp.linear_fc1.{kind}"] = (np.stack([gate, up]), 1)
                found[f"{mc}self_attention.linear_proj.{kind}"] = (
                    dense[f"{hf}self_attn.o_proj.{kind}"],
                    None if bias else 1,
                )
                found[f"{mc}mlp.linear_fc2.{kind}"] = (dense[f"{hf}mlp.down_proj.{kind}"], None if bias else 1)
    return found


def shards(
    whole: dict[str, tuple[np.ndarray, int | None]], tp: int, etp: int, align: int
) -> Iterator[tuple[int, list[tuple[ParamShard, np.ndarray]]]]:
    """What each rank of TP x ETP holds: matrices are cut over ETP with padding at the tail, the rest is not."""
    for tp_rank, etp_rank in itertools.product(range(tp), range(etp)):
        held = []
        for name, (array, dim) in whole.items():
            local = array if dim is None else np.split(array, tp, axis=dim)[tp_rank]
            if "fc1.weight" in name or "fc1.bias" in name:
                local = local.reshape(-1, *local.shape[2:])
            rows = (0, len(local))
            memory = local
            if local.ndim == 2:
                layout = ShardLayout(local.shape, etp, align)
                rows = layout.logical_range(etp_rank)
                memory = np.full(layout.shard_shape, PADDING)
                memory[: rows[1] - rows[0]] = local[slice(*rows)]
            shard = ParamShard(
                name=name,
                storage=name,
                shape=local.shape,
                rows=rows,
                held_shape=memory.shape,
                dtype="float64",
                tp_rank=tp_rank,
                tp_size=tp,
                partition_dim=None if dim is None else 0 if "fc1" in name else dim,
            )
            held.append((shard, memory.ravel()))
        yield tp_rank * etp + etp_rank, held


def assemble(traits: ModelTraits, tp: int, etp: int, align: int, seed: int) -> None:
    """Shards a dense model, describes it, plans, proves, moves element by element, and compares."""
    dense = dense_model(traits, seed)
    family = mapping_of(traits)
    manifests, memory = [], {}
    for rank, held in shards(megatron_model(traits, dense), tp, etp, align):
        found = [place for shard, _ in held for place in placements(shard, family.pieces(shard))]
        manifests.append(Manifest(rank, "", tuple(shard.as_storage() for shard, _ in held), tuple(found)))
        memory[rank] = {shard.storage: array for shard, array in held}
    tensors = agree_on_tensors(family.shapes(), manifests)
    wanted = layout_checkpoint(tensors, 1 << 30).manifest()
    options = PlanOptions(split_bytes=64)
    plan = make_plan(tensors, manifests, [wanted], options)
    prove(plan, manifests, [wanted], options)
    result = {spec.name: np.full(spec.shape, np.nan) for spec in tensors}
    for item in plan.transfers:
        flat = memory[item.source][item.read.storage]
        steps = [step * 8 for step in item.read.strides]
        values = np.lib.stride_tricks.as_strided(flat[item.read.offset :], item.box.shape, steps)
        result[item.box.tensor][
            tuple(slice(low, high) for low, high in zip(item.box.start, item.box.stop, strict=True))
        ] = values
    for name, expected in dense.items():
        assert np.array_equal(result[name], expected), name
    assert set(result) == set(dense)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("etp", "align"), [(1, 16), (2, 0), (2, 16), (3, 1), (4, 8)])
def test_every_element_of_every_shard_finds_its_place(tp: int, etp: int, align: int) -> None:
    """TP 4 exceeds the two KV groups: a rank's rows end inside a group. ETP 4 x 8 leaves shards of padding alone."""
    assemble(TRAITS, tp, etp, align, seed=tp * 10 + etp)


@pytest.mark.parametrize(("tp", "etp"), [(1, 2), (2, 2), (4, 3)])
def test_qwen3_with_heads_larger_than_hidden_size_over_heads(tp: int, etp: int) -> None:
    traits = replace(TRAITS, qkv_bias=False, linear_bias=False, qk_norm=True, head_dim=10)
    assemble(traits, tp, etp, align=4, seed=tp + etp)


@st.composite
def random_traits(draw: st.DrawFn) -> ModelTraits:
    """A model that tensor parallelism of 2 can cut; nothing else is round."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    qk_norm = draw(st.booleans())
    qkv_bias = not qk_norm and draw(st.booleans())
    return replace(
        TRAITS,
        num_layers=1,
        hidden_size=draw(st.integers(1, 9)),
        ffn_hidden_size=2 * draw(st.integers(1, 6)),
        num_heads=2 * kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 4)),
        vocab_size=draw(st.integers(1, PADDED_VOCAB)),
        qkv_bias=qkv_bias,
        linear_bias=qkv_bias and draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        qk_norm=qk_norm,
    )


@settings(max_examples=100, deadline=None)
@given(random_traits(), st.integers(1, 4), st.sampled_from([1, 4, 16]))
def test_random_shapes_at_tp_2(traits: ModelTraits, etp: int, align: int) -> None:
    assemble(traits, tp=2, etp=etp, align=align, seed=traits.vocab_size)


def shard_of(name: str, shape: tuple[int, ...], **changes: object) -> ParamShard:
    plain = ParamShard(name=name, storage=name, shape=shape, rows=(0, shape[0]), held_shape=shape, dtype="float32")
    return replace(plain, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("etp_rank", "expected"),
    [
        (0, {"q_proj.weight[12:24, 0:12]": 0, "k_proj.weight[6:10, 0:12]": 12 * 12}),
        (1, {"k_proj.weight[10:12, 0:12]": 0, "v_proj.weight[6:12, 0:12]": 2 * 12}),
    ],
)
def test_the_worked_example_of_the_documentation(etp_rank: int, expected: dict[str, int]) -> None:
    layout = ShardLayout((24, 12), 2, 16)
    shard = shard_of(
        "decoder.layers.0.self_attention.linear_qkv.weight",
        (24, 12),
        rows=layout.logical_range(etp_rank),
        held_shape=layout.shard_shape,
        tp_rank=1,
        tp_size=2,
        partition_dim=0,
    )
    found = list(placements(shard, LlamaFamily(TRAITS).pieces(shard)))
    prefix = "model.layers.0.self_attn."
    assert {str(place.box).removeprefix(prefix): place.view.offset for place in found} == expected


def test_both_layer_specs_map_to_the_same_tensors() -> None:
    family = LlamaFamily(TRAITS)
    for local, fused in (
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ):
        assert family.pieces(shard_of(f"decoder.layers.1.{local}", (12,))) == family.pieces(
            shard_of(f"decoder.layers.1.{fused}", (12,))
        )


def test_a_tied_output_layer_is_the_embedding() -> None:
    family = LlamaFamily(replace(TRAITS, tied_embeddings=True))
    (piece,) = family.pieces(shard_of("output_layer.weight", (40, 12)))
    assert str(piece.box) == "model.embed_tokens.weight[0:37, 0:12]"
    assert "lm_head.weight" not in family.shapes()


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.2.mlp.linear_fc2.weight",
        "embedding.position_embeddings.weight",
    ],
)
def test_an_unmapped_parameter_is_named(name: str) -> None:
    with pytest.raises(UnmappedParameterError, match=f"Megatron parameter {name}"):
        LlamaFamily(TRAITS).pieces(shard_of(name, (12, 12)))


def test_a_shape_that_the_configuration_does_not_have_is_named() -> None:
    with pytest.raises(UnmappedParameterError, match=r"linear_qkv.weight has 47 rows on each of 1 .* need 48 in all"):
        LlamaFamily(TRAITS).pieces(shard_of("decoder.layers.0.self_attention.linear_qkv.weight", (47, 12)))
    with pytest.raises(UnmappedParameterError, match="gate and up would differ"):
        rules.gated(shard_of("fc1", (7, 12)), "gate", "up")
    with pytest.raises(UnmappedParameterError, match="the configuration and the weight disagree"):
        list(placements(shard_of("w", (4, 3)), [RowSpan(2, rules.replicated(shard_of("w", (4, 3)), "w")[0].box)]))


def test_a_cut_that_the_mapping_does_not_expect_is_named() -> None:
    shard = shard_of("decoder.layers.0.mlp.linear_fc2.weight", (12, 10), tp_size=2, partition_dim=0)
    with pytest.raises(UnmappedParameterError, match=r"cut along dim 0 over 2 .* expects dim 1"):
        LlamaFamily(TRAITS).pieces(shard)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        shard_of("w", (8, 4), rows=(0, 8), held_shape=(4, 4))
    with pytest.raises(ValueError, match="only rows are cut"):
        shard_of("w", (8, 4), rows=(0, 4), held_shape=(4, 3))


def test_qwen3_has_one_norm_for_all_query_heads_and_one_for_all_key_heads() -> None:
    family = Qwen3Family(replace(TRAITS, qkv_bias=False, linear_bias=False, qk_norm=True))
    (piece,) = family.pieces(shard_of("decoder.layers.1.self_attention.k_layernorm.weight", (6,)))
    assert str(piece.box) == "model.layers.1.self_attn.k_norm.weight[0:6]"
    assert [name for name in family.shapes() if "layers.1" in name and "_norm" in name] == [
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.self_attn.k_norm.weight",
    ]
