"""The offline model of vLLM's layout against what vLLM's own loaders do, for every family, rank by rank."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_patches.refit.boxes import TensorSpec
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.source.config_traits import family_from_config
from megatron_patches.refit.source.mesh import TrainerMesh
from megatron_patches.refit.source.offline import trainer_manifest
from megatron_patches.refit.target.recorded import recorded_manifest
from megatron_patches.refit.target.vllm_layout import EngineMesh, engine_manifest
from tests.support.launch import run_distributed

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(400),
]

COMMON: dict[str, object] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "vocab_size": 517,
    "max_position_embeddings": 256,
}
HYBRID: dict[str, object] = COMMON | {
    "architectures": ["NemotronHForCausalLM"],
    "hybrid_override_pattern": "M-*E",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 64,
}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": COMMON | {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "head_dim": 64},
    "qwen2": COMMON | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "head_dim": 64},
    "qwen3_one_kv_head": COMMON | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 1, "head_dim": 64},
    "qwen3_moe": COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    "deepseek_v3": COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    "nemotron_h": HYBRID,
}
SIZES = ((1, False), (2, False), (2, True))

Places = set[tuple[str, str, int, tuple[tuple[int, int], ...]]]


def places(manifest: Manifest) -> Places:
    """Which box lies where; strides of extents of one do not count."""
    return {
        (
            str(item.box),
            manifest.storage[item.view.storage].target,
            item.view.offset,
            tuple(pair for pair in zip(item.view.shape, item.view.strides, strict=True) if pair[0] > 1),
        )
        for item in manifest.placements
    }


def rules(manifest: Manifest) -> set[tuple[str, str]]:
    """What is converted; on a CPU the engine widens routers, which it does not for the GPUs that are modelled."""
    return {(item.storage, str(item)) for item in manifest.conversions if not item.rule.target.endswith("gate.weight")}


def specs_for(name: str) -> list[TensorSpec]:
    """The tensors that the main model loads."""
    family = family_from_config(CONFIGS[name])
    specs = agree_on_tensors(family.shapes(), [trainer_manifest(family, TrainerMesh(), 0)])
    return [spec for spec in specs if not spec.name.startswith("model.layers.2.")]  # further tokens: the draft model's


def compare(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """How the two differ, by model, sizes and rank."""
    del rank, world_size
    from megatron_patches.refit.vllm.recording import record_loading
    from tests.support.vllm_meta import built, start_vllm

    torch.manual_seed(0)
    start_vllm()
    found: dict[str, list[str]] = {}
    for name, config in CONFIGS.items():
        family, specs = family_from_config(config), specs_for(name)
        path = Path(folder) / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({**family.config(), "torch_dtype": "bfloat16"}))
        for tp, expert_parallel in SIZES:
            if expert_parallel and not family.traits.num_experts:
                continue
            for place in range(tp):
                with built(path, tp, place, expert_parallel) as model:
                    done = record_loading(model.load_weights, dict(model.named_parameters()), specs)
                tensors = {spec.name: spec for spec in specs}
                theirs = recorded_manifest(place, "", done.parameters, done.copies, done.fills, tensors)
                mesh = EngineMesh(tp=tp, expert_parallel=expert_parallel)
                ours = engine_manifest(family.traits, mesh, place)
                difference = [*sorted(places(ours) ^ places(theirs)), *sorted(rules(ours) ^ rules(theirs))][:5]
                found[f"{name} tp={tp} expert_parallel={expert_parallel} rank={place}"] = list(map(str, difference))
    return found


@pytest.mark.integration
def test_every_box_lies_where_the_engines_loaders_put_it(tmp_path: Path) -> None:
    (found,) = run_distributed(compare, 1, None, 360.0, args=(str(tmp_path),), fresh=True)
    assert len(found) == 3 * 3 + 3 * 5
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
