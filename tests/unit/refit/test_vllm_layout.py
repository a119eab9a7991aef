"""The engine's layout, offline: parameters assembled the way its loaders do, by hand, hold the planned elements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import TrainerOptions, trainer_manifest
from megatron_patches.refit.planning.plan import PlanOptions, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.target.vllm_layout import EngineMesh, engine_manifest, rank_experts, stage_layers

DENSE: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}
LLAMA = DENSE | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
DEEPSEEK: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
}
HYBRID: dict[str, object] = {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "ME*-",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "mamba_num_heads": 4,
    "mamba_head_dim": 5,
    "n_groups": 4,
    "ssm_state_size": 3,
    "conv_kernel": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 12,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}
LATENT = HYBRID | {"moe_latent_size": 5, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
CASES = {
    "hybrid_alone": (HYBRID, EngineMesh()),
    "hybrid_latent_cut": (LATENT, EngineMesh(tp=4)),
    "hybrid_latent_whole": (LATENT, EngineMesh(tp=2, dp=2, expert_parallel=True)),
    "hybrid_cut": (HYBRID, EngineMesh(tp=4)),
    "hybrid_stages_tied": (HYBRID | {"tie_word_embeddings": True}, EngineMesh(tp=2, pp=2, expert_parallel=True)),
    "hybrid_shared_experts_whole": (HYBRID, EngineMesh(tp=2, dp=2, expert_parallel=True)),
    "latent_alone": (DEEPSEEK, EngineMesh()),
    "latent_cut": (DEEPSEEK, EngineMesh(tp=4)),
    "latent_whole_experts": (DEEPSEEK, EngineMesh(tp=2, pp=2, expert_parallel=True)),
    "latent_shared_experts_whole": (DEEPSEEK, EngineMesh(tp=2, dp=2, expert_parallel=True)),
    "latent_uncompressed_query": (DEEPSEEK | {"q_lora_rank": None, "n_shared_experts": 0}, EngineMesh(tp=2)),
    "alone": (DENSE, EngineMesh()),
    "as_many_ranks_as_kv_heads": (DENSE, EngineMesh(tp=2)),
    "more_ranks_than_kv_heads": (DENSE, EngineMesh(tp=8)),
    "biases": (LLAMA, EngineMesh(tp=4)),
    "tied_stages": (DENSE | {"tie_word_embeddings": True}, EngineMesh(tp=2, pp=2)),
    "replicas": (DENSE, EngineMesh(tp=2, dp=2)),
    "experts_cut": (EXPERTS, EngineMesh(tp=2, dp=2)),
    "experts_whole": (EXPERTS, EngineMesh(tp=2, dp=2, expert_parallel=True)),
    "experts_whole_stages": (EXPERTS, EngineMesh(tp=2, pp=2, expert_parallel=True)),
}


class Loader:
    """Cuts a rank's parameters with numpy; padding is -1. Shares nothing with the layout under test."""

    def __init__(self, dense: dict[str, np.ndarray], config: dict[str, object], mesh: EngineMesh, rank: int) -> None:
        self.dense, self.mesh, self.traits = dense, mesh, family_from_config(config).traits
        self.tp, self.pp, self.dp = rank % mesh.tp, rank // mesh.tp % mesh.pp, rank // (mesh.tp * mesh.pp)

    def part(self, name: str, axis: int) -> np.ndarray:
        return np.split(self.dense[name], self.mesh.tp, axis)[self.tp]

    def table(self, name: str) -> np.ndarray:
        padding = np.full((192 - self.traits.vocab_size, self.traits.hidden_size), -1)
        return np.split(np.concatenate([self.dense[name], padding]), self.mesh.tp)[self.tp]

    def parameters(self) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        first, last, tied = self.pp == 0, self.pp == self.mesh.pp - 1, self.traits.tied_embeddings
        if first or (last and tied):
            found["model.embed_tokens.weight"] = self.table("model.embed_tokens.weight")
        if last:
            found["model.norm.weight"] = self.dense["model.norm.weight"]
            if not tied:
                found["lm_head.weight"] = self.table("lm_head.weight")
        for layer in np.array_split(np.arange(self.traits.num_layers), self.mesh.pp)[self.pp].tolist():
            found |= (self.latent if self.traits.latent else self.attention)(f"model.layers.{layer}.")
            sparse = f"model.layers.{layer}.mlp.gate.weight" in self.dense
            found |= (self.experts if sparse else self.mlp)(f"model.layers.{layer}.mlp.")
        return found

    def attention(self, prefix: str) -> dict[str, np.ndarray]:
        whole = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias", "mlp.gate.weight")
        found = {name: self.dense[name] for name in self.dense if name.startswith(prefix) and name.endswith(whole)}
        found[prefix + "self_attn.o_proj.weight"] = self.part(prefix + "self_attn.o_proj.weight", 1)
        heads, ranks = self.traits.num_kv_heads, self.mesh.tp
        for kind in ("weight", "bias"):
            if f"{prefix}self_attn.q_proj.{kind}" not in self.dense:
                continue
            parts = [self.part(f"{prefix}self_attn.q_proj.{kind}", 0)]
            for letter in "kv":
                split = np.split(self.dense[f"{prefix}self_attn.{letter}_proj.{kind}"], heads)
                repeated = [head for head in split for _ in range(max(1, ranks // heads))]
                parts += np.array_split(np.array(repeated), ranks)[self.tp].tolist()
            found[f"{prefix}self_attn.qkv_proj.{kind}"] = np.concatenate(parts)
        return found

    def latent(self, prefix: str) -> dict[str, np.ndarray]:
        """Down projections in one, whole; up projections by heads."""
        found = {name: self.dense[name] for name in self.dense if name.startswith(prefix) and "norm.weight" in name}
        gates = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias")
        found |= {prefix + name: self.dense[prefix + name] for name in gates if prefix + name in self.dense}
        own = prefix + "self_attn."
        down = self.dense[own + "kv_a_proj_with_mqa.weight"]
        if own + "q_a_proj.weight" in self.dense:
            found[own + "fused_qkv_a_proj.weight"] = np.concatenate([self.dense[own + "q_a_proj.weight"], down])
            found[own + "q_b_proj.weight"] = self.part(own + "q_b_proj.weight", 0)
        else:
            found[own + "kv_a_proj_with_mqa.weight"] = down
            found[own + "q_proj.weight"] = self.part(own + "q_proj.weight", 0)
        found[own + "kv_b_proj.weight"] = self.part(own + "kv_b_proj.weight", 0)
        found[own + "o_proj.weight"] = self.part(own + "o_proj.weight", 1)
        return found

    def shared(self, prefix: str) -> dict[str, np.ndarray]:
        """Shared experts: whole where tensor parallelism, replicas and whole experts come together."""
        if prefix + "gate_proj.weight" not in self.dense:
            return {}
        if self.mesh.expert_parallel and self.mesh.tp > 1 and self.mesh.dp > 1:
            both = [self.dense[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")]
            return {
                prefix + "gate_up_proj.weight": np.concatenate(both),
                prefix + "down_proj.weight": self.dense[prefix + "down_proj.weight"],
            }
        return self.mlp(prefix)

    def mlp(self, prefix: str) -> dict[str, np.ndarray]:
        found = {prefix + "down_proj.weight": self.part(prefix + "down_proj.weight", 1)}
        for kind in ("weight", "bias"):
            if f"{prefix}gate_proj.{kind}" in self.dense:
                both = [self.part(f"{prefix}{name}_proj.{kind}", 0) for name in ("gate", "up")]
                found[f"{prefix}gate_up_proj.{kind}"] = np.concatenate(both)
        return found

    def experts(self, prefix: str) -> dict[str, np.ndarray]:
        group, place = self.mesh.tp * self.mesh.dp, self.dp * self.mesh.tp + self.tp
        everyone = np.arange(self.traits.num_experts)
        mine = np.array_split(everyone, group)[place] if self.mesh.expert_parallel else everyone
        parts, index = (1, 0) if self.mesh.expert_parallel else (group, place)

        def cut(expert: int, kind: str, axis: int) -> np.ndarray:
            return np.split(self.dense[f"{prefix}experts.{expert}.{kind}_proj.weight"], parts, axis)[index]

        w13 = [np.concatenate([cut(expert, "gate", 0), cut(expert, "up", 0)]) for expert in mine.tolist()]
        w2 = [cut(expert, "down", 1) for expert in mine.tolist()]
        routed = {
            prefix + "experts.routed_experts.w13_weight": np.stack(w13),
            prefix + "experts.routed_experts.w2_weight": np.stack(w2),
        }
        return routed | self.shared(prefix + "shared_experts.")


class HybridLoader(Loader):
    """The same for a hybrid."""

    def parameters(self) -> dict[str, np.ndarray]:
        first, last = self.pp == 0, self.pp == self.mesh.pp - 1
        found: dict[str, np.ndarray] = {}
        if first:
            found["model.embed_tokens.weight"] = self.table("backbone.embeddings.weight")
        if last:
            found["model.norm_f.weight"] = self.dense["backbone.norm_f.weight"]
            found["lm_head.weight"] = self.table("lm_head.weight")
        for layer in np.array_split(np.arange(4), self.mesh.pp)[self.pp].tolist():
            prefix = f"backbone.layers.{layer}."
            inner = (self.mamba, self.experts_of, self.heads, self.plain)[layer](prefix + "mixer.")
            inner[prefix + "norm.weight"] = self.dense[prefix + "norm.weight"]
            found |= {name.replace("backbone.", "model."): values for name, values in inner.items()}
        return found

    def mamba(self, prefix: str) -> dict[str, np.ndarray]:
        def cut(name: str, *sizes: int) -> np.ndarray:
            blocks = np.split(self.dense[prefix + name], np.cumsum(sizes)[:-1])
            return np.concatenate([np.split(block, self.mesh.tp)[self.tp] for block in blocks])

        found = {prefix + name: self.part(prefix + name, 0) for name in ("D", "dt_bias", "norm.weight")}
        found[prefix + "A@bfloat16"] = self.part(prefix + "A_log", 0)  # converted when all of it is there
        found[prefix + "in_proj.weight"] = cut("in_proj.weight", 20, 20, 12, 12, 4)
        found[prefix + "conv1d.weight"] = cut("conv1d.weight", 20, 12, 12)
        found[prefix + "conv1d.bias"] = cut("conv1d.bias", 20, 12, 12)
        return found | {prefix + "out_proj.weight": self.part(prefix + "out_proj.weight", 1)}

    def heads(self, prefix: str) -> dict[str, np.ndarray]:
        self.dense |= {name.replace("mixer.", "self_attn."): self.dense[name] for name in list(self.dense)}
        cut = self.attention(prefix.removesuffix("mixer."))
        return {name.replace("self_attn.", "mixer."): cut[name] for name in cut if "self_attn" in name}

    def plain(self, prefix: str, whole: bool = False) -> dict[str, np.ndarray]:
        up, down = prefix + "up_proj.weight", prefix + "down_proj.weight"
        if whole:
            return {up: self.dense[up], down: self.dense[down]}
        return {up: self.part(up, 0), down: self.part(down, 1)}

    def experts_of(self, prefix: str) -> dict[str, np.ndarray]:
        names = ("gate.weight", "gate.e_score_correction_bias", "fc1_latent_proj.weight", "fc2_latent_proj.weight")
        gate = {prefix + name: self.dense[prefix + name] for name in names if prefix + name in self.dense}
        mesh, group = self.mesh, self.mesh.tp * self.mesh.dp
        place = self.dp * mesh.tp + self.tp
        everyone = np.arange(6)
        mine = np.array_split(everyone, group)[place] if mesh.expert_parallel else everyone
        ups, downs = [], []
        for expert in mine.tolist():
            up, down = (self.dense[f"{prefix}experts.{expert}.{kind}_proj.weight"] for kind in ("up", "down"))
            ups.append(up if mesh.expert_parallel else np.split(up, group)[place])
            downs.append(down if mesh.expert_parallel else np.split(down, group, 1)[place])
        routed = {
            prefix + "experts.routed_experts.w13_weight": np.stack(ups),
            prefix + "experts.routed_experts.w2_weight": np.stack(downs),
        }
        whole = mesh.expert_parallel and mesh.tp > 1 and mesh.dp > 1
        return gate | routed | self.plain(prefix + "shared_experts.", whole)


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_of_every_rank_equals_one_cut_by_hand(name: str) -> None:
    config, mesh = CASES[name]
    family = family_from_config(config)
    numbers = itertools.count()
    dense = {
        tensor: np.fromiter(itertools.islice(numbers, int(np.prod(shape))), np.int64).reshape(shape)
        for tensor, shape in family.shapes().items()
    }
    for rank in range(mesh.size):
        manifest = engine_manifest(family.traits, mesh, rank)
        filled = {item.name: np.full(item.numel, -1) for item in manifest.storages}
        for placement in manifest.placements:
            view, box = placement.view, placement.box
            target = np.lib.stride_tricks.as_strided(
                filled[view.storage][view.offset :], view.shape, [step * 8 for step in view.strides]
            )
            target[...] = dense[box.tensor][tuple(map(slice, box.start, box.stop))]
        expected = (HybridLoader if config["architectures"] == HYBRID["architectures"] else Loader)(
            dense, config, mesh, rank
        ).parameters()
        assert set(filled) == set(expected)
        for parameter, values in expected.items():
            assert np.array_equal(filled[parameter], values.ravel()), parameter


@pytest.mark.parametrize(
    ("config", "trainer", "engine"),
    [
        (DENSE, TrainerMesh(tp=2, etp=2, dp=2), EngineMesh(tp=8)),
        (LLAMA, TrainerMesh(etp=3, pp=3), EngineMesh(tp=4, dp=2)),
        (
            EXPERTS,
            TrainerMesh(tp=2, etp=2, pp=2, ep=2, expert_etp=2, dp=2),
            EngineMesh(tp=2, dp=2, expert_parallel=True),
        ),
        (EXPERTS, TrainerMesh(tp=2, ep=2, expert_tp=2, dp=2), EngineMesh(tp=4, pp=2)),
        (DEEPSEEK, TrainerMesh(tp=2, etp=2, pp=2, ep=2, first=1), EngineMesh(tp=2, dp=2, expert_parallel=True)),
        (DEEPSEEK, TrainerMesh(etp=3, pp=3, expert_etp=3), EngineMesh(tp=4)),
        (HYBRID, TrainerMesh(tp=2, etp=2, pp=2, ep=2), EngineMesh(tp=4, expert_parallel=True)),
        (HYBRID, TrainerMesh(etp=3, expert_etp=3), EngineMesh(tp=2, pp=2)),
        (LATENT, TrainerMesh(tp=2, etp=2, pp=2, ep=2), EngineMesh(tp=2, dp=2, expert_parallel=True)),
    ],
)
def test_trainer_to_engine_is_planned_and_proved(
    config: dict[str, object], trainer: TrainerMesh, engine: EngineMesh
) -> None:
    family = family_from_config(config)
    sources = [
        trainer_manifest(family, trainer, rank, TrainerOptions(), f"t{rank // 4}") for rank in range(trainer.size)
    ]
    wanted = [engine_manifest(family.traits, engine, rank, host=f"e{rank // 4}") for rank in range(engine.size)]
    tensors = agree_on_tensors(family.shapes(), sources)
    options = PlanOptions(split_bytes=64)
    verdict = prove(make_plan(tensors, sources, wanted, options), sources, wanted, options)
    assert verdict.elements == sum(place.box.volume for manifest in wanted for place in manifest.placements)


def test_the_routers_bias_is_wanted_in_float32() -> None:
    manifest = engine_manifest(family_from_config(DEEPSEEK).traits, EngineMesh(tp=2), 1)
    kept = [storage.name for storage in manifest.storages if storage.dtype == "float32"]
    assert kept == [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]


def test_layers_and_experts_that_do_not_divide() -> None:
    assert [len(stage_layers(10, 4, stage)) for stage in range(4)] == [2, 3, 3, 2]
    assert [stage_layers(7, 2, stage) for stage in range(2)] == [range(4), range(4, 7)]
    assert [rank_experts(7, 3, rank) for rank in range(3)] == [range(3), range(3, 5), range(5, 7)]


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (DENSE, EngineMesh(tp=16), r"attention heads \(8\) cannot be cut into 16"),
        (
            DENSE | {"num_key_value_heads": 3, "num_attention_heads": 12},
            EngineMesh(tp=4),
            "3 KV heads cannot be repeated",
        ),
        (DENSE | {"num_key_value_heads": 3, "num_attention_heads": 6}, EngineMesh(tp=2), r"KV heads \(3\) cannot"),
        (DENSE | {"intermediate_size": 6}, EngineMesh(tp=4), r"width of the feed-forward \(6\)"),
        (EXPERTS, EngineMesh(tp=8, dp=2), r"width of an expert, without expert parallelism, \(8\)"),
        (EXPERTS, EngineMesh(tp=8, expert_parallel=True), "6 experts cannot be spread over 8 ranks"),
        (DENSE, EngineMesh(pp=4), "3 layers cannot be spread over 4"),
        (DEEPSEEK, EngineMesh(tp=8), r"attention heads \(4\) cannot be cut into 8"),
        (HYBRID | {"n_groups": 2}, EngineMesh(tp=4), r"groups of a Mamba mixer \(2\)"),
        (DEEPSEEK | {"intermediate_size": 18}, EngineMesh(tp=4), r"width of the feed-forward \(18\)"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(
    config: dict[str, object], mesh: EngineMesh, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        engine_manifest(family_from_config(config).traits, mesh, 0)


def test_ranks_and_sizes_that_cannot_be_are_refused() -> None:
    traits = replace(family_from_config(DENSE).traits, num_layers=1)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        engine_manifest(traits, EngineMesh(tp=2), 2)
    with pytest.raises(ValueError, match="dp is 0"):
        EngineMesh(dp=0)
