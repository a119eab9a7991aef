"""The offline model of vLLM's layout against what vLLM's own loaders do, for every family, rank by rank."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.layout.weight_format import (
    BLOCK,
    QUANTIZED,
    Shape,
    blocks_of,
    is_scale,
    quantization_config,
    quantized_weights,
    scales_of,
    with_scales,
)
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import trainer_manifest
from megatron_patches.refit.planning.tensors import agree_on_tensors
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
    "nemotron_h_latent": HYBRID
    | {"moe_latent_size": 128, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
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
    """The tensors of a checkpoint; the main model leaves those that predict further tokens to the draft model."""
    family = family_from_config(CONFIGS[name])
    return list(agree_on_tensors(family.shapes(), [trainer_manifest(family, TrainerMesh(), 0)]))


def draft_differences(path: Path) -> list[str]:
    """Parameters of NemotronH's draft model that a checkpoint does not fill, and tensors that it does not take."""
    from megatron_patches.refit.vllm.recording import record_loading
    from tests.support.vllm_meta import built

    tensors = {spec.name: spec for spec in specs_for("nemotron_h_latent") if spec.name.startswith("mtp.")}
    with built(path, 1, 0, False) as model:
        parameters = {name: value for name, value in model.named_parameters() if "embed_tokens" not in name}
        done = record_loading(model.load_weights, parameters, tensors.values())
    manifest = recorded_manifest(0, "", done, tensors)
    filled = dict.fromkeys(parameters, 0)
    for item in manifest.placements:
        filled[manifest.storage[item.view.storage].target] += item.box.volume
    wrong = [name for name, value in parameters.items() if filled[name] != value.numel()]
    return wrong + sorted(tensors.keys() - {item.box.tensor for item in manifest.placements})


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
                theirs = recorded_manifest(place, "", done, tensors)
                mesh = EngineMesh(tp=tp, expert_parallel=expert_parallel)
                ours = engine_manifest(family.traits, mesh, place)
                difference = [*sorted(places(ours) ^ places(theirs)), *sorted(rules(ours) ^ rules(theirs))][:5]
                found[f"{name} tp={tp} expert_parallel={expert_parallel} rank={place}"] = list(map(str, difference))
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "architectures": ["NemotronHMTPModel"]}))
    return found | {f"draft of {path.name}": draft_differences(path)}


@pytest.mark.integration
def test_every_box_lies_where_the_engines_loaders_put_it(tmp_path: Path) -> None:
    (found,) = run_distributed(compare, 1, None, 360.0, args=(str(tmp_path),), fresh=True)
    assert len(found) == 3 * 3 + 4 * 5 + 1
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


IN_BLOCKS: dict[str, dict[str, object]] = {
    "qwen3_moe": CONFIGS["qwen3_moe"] | {"hidden_size": 320, "num_key_value_heads": 4, "moe_intermediate_size": 256},
    "deepseek_v3": CONFIGS["deepseek_v3"]
    | {
        "hidden_size": 320,
        "q_lora_rank": 128,
        "kv_lora_rank": 160,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
    },
}
"""With blocks for each of two ranks; hidden sizes and latents are no multiples of 128."""


def compare_in_fp8(rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """Weights whose scales do not lie as they do, by model, sizes and rank."""
    del rank, world_size
    from megatron_patches.refit.vllm.engine_refusals import wanted_parameters
    from megatron_patches.refit.vllm.quantized import check_scales, record_in_one_format
    from tests.support import vllm_fp8
    from tests.support.vllm_meta import built, start_vllm

    del vllm_fp8  # importing it adds kernels for CPUs
    torch.manual_seed(0)
    start_vllm()
    found: dict[str, list[str]] = {}
    for name, config in IN_BLOCKS.items():
        family = family_from_config(config)
        shapes = family.shapes()
        trained = agree_on_tensors(shapes, [trainer_manifest(family, TrainerMesh(), 0)])
        dtypes = {spec.name: spec.dtype for spec in trained} | dict.fromkeys(quantized_weights(shapes), QUANTIZED)
        specs = [
            TensorSpec(tensor, shape, dtypes.get(tensor, "float32"))
            for tensor, shape in with_scales(shapes).items()
            if not tensor.startswith("model.layers.2.")
        ]
        check_scales(specs)
        path = Path(folder) / name
        path.mkdir()
        content = {**family.config(), "torch_dtype": "bfloat16", "quantization_config": quantization_config(shapes)}
        (path / "config.json").write_text(json.dumps(content))
        for tp, expert_parallel in SIZES:
            for place in range(tp):
                with built(path, tp, place, expert_parallel) as model:
                    done = record_in_one_format(model.load_weights, dict(model.named_parameters()), specs)
                    missing = wanted_parameters(model) - {parameter.name for parameter in done.parameters}
                # The experts' view of the router's parameter.
                missing = {parameter for parameter in missing if not parameter.endswith("e_score_correction_bias")}
                tensors = {spec.name: spec for spec in specs}
                manifest = recorded_manifest(place, "", done, tensors)
                weights = {
                    (
                        scales_of(item.box.tensor),
                        tuple(low // BLOCK for low in item.box.start),
                        blocks_of(item.box.stop),
                        scales_of(item.view.storage),
                    )
                    for item in manifest.placements
                    if tensors[item.box.tensor].dtype == QUANTIZED
                }
                scales = {
                    (item.box.tensor, item.box.start, item.box.stop, item.view.storage)
                    for item in manifest.placements
                    if is_scale(item.box.tensor)
                }
                assert len(scales) > 20
                found[f"{name} tp={tp} expert_parallel={expert_parallel} rank={place}"] = [
                    *sorted(missing),
                    *map(str, sorted(weights ^ scales)[:5]),
                ]
    return found


@pytest.mark.integration
def test_scales_of_blocks_lie_where_their_weights_do(tmp_path: Path) -> None:
    """Of experts and of multi-latent attention, in parameters that several tensors are loaded into."""
    (found,) = run_distributed(compare_in_fp8, 1, None, 360.0, args=(str(tmp_path),), fresh=True)
    assert len(found) == 2 * 5
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def trained_as(
    specs: list[TensorSpec], weight: str, dtype: str, scales: str = "", shape: Shape = ()
) -> list[TensorSpec]:
    """The same tensors, with one weight in another type, and perhaps scales of it."""
    found = [replace(spec, dtype=dtype) if spec.name == weight else spec for spec in specs]
    return [*found, TensorSpec(weight + scales, shape, "float32")] if scales else found


def recipes_of(config: dict[str, object]) -> dict[str, tuple[list[TensorSpec], dict[str, list[TensorSpec]]]]:
    """By the format of an engine: what it takes, and trainers of other recipes, for a linear layer and an expert."""
    family = family_from_config(config)
    shapes = family.shapes()
    plain = agree_on_tensors(shapes, [trainer_manifest(family, TrainerMesh(), 0)])
    names = quantized_weights(shapes)
    dtypes = {spec.name: spec.dtype for spec in plain} | dict.fromkeys(names, QUANTIZED)
    blocks = [TensorSpec(name, shape, dtypes.get(name, "float32")) for name, shape in with_scales(shapes).items()]
    ours: dict[str, list[TensorSpec]] = {"blocks": blocks}
    theirs: dict[str, list[TensorSpec]] = {"plain": plain}
    for weight in (next(name for name in names if name.endswith(end)) for end in ("o_proj.weight", "down_proj.weight")):
        scales, of_blocks = scales_of(weight), blocks_of(shapes[weight])
        for dtype in (QUANTIZED, "float8_e5m2", "float8_e8m0fnu", "int8"):
            ours[f"{dtype} {weight}"] = trained_as(plain, weight, dtype)
            ours[f"{dtype}, one scale {weight}"] = trained_as(plain, weight, dtype, "_scale", (1,))
            ours[f"{dtype}, blocks {weight}"] = trained_as(plain, weight, dtype, "_scale_inv", of_blocks)
        for kind in ("_scale", "_scale_inv"):
            ours[f"plain, {kind} {weight}"] = trained_as(plain, weight, "bfloat16", kind, of_blocks)
        theirs[f"no scales {weight}"] = [spec for spec in blocks if spec.name != scales]
        theirs[f"one scale more {weight}"] = trained_as(blocks, weight, QUANTIZED, "_scale", (1,))
        for dtype in ("bfloat16", "float8_e5m2", "int8"):
            theirs[f"{dtype} {weight}"] = trained_as(blocks, weight, dtype)
            without = [spec for spec in blocks if spec.name != scales]
            theirs[f"{dtype}, no scales {weight}"] = trained_as(without, weight, dtype)
        theirs[f"scales in bfloat16 {weight}"] = trained_as(blocks, scales, "bfloat16")
        theirs[f"smaller blocks {weight}"] = [
            replace(spec, shape=tuple(2 * extent for extent in spec.shape)) if spec.name == scales else spec
            for spec in blocks
        ]
    return {"plain": (plain, ours), "blocks": (blocks, theirs)}


def take_recipes(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """What engines say of trainers with another recipe than theirs; empty if they would take the weights."""
    del rank, world_size
    from megatron_patches.refit.vllm.quantized import check_scales, record_in_one_format
    from tests.support import vllm_fp8
    from tests.support.vllm_meta import built, start_vllm

    del vllm_fp8  # importing it adds kernels for CPUs
    torch.manual_seed(0)
    start_vllm()

    def said(model: Any, specs: list[TensorSpec]) -> str:
        try:
            check_scales(specs)
            record_in_one_format(model.load_weights, dict(model.named_parameters()), specs)
        except RefitError as error:
            return str(error)
        return ""

    found = {}
    config = IN_BLOCKS["qwen3_moe"]
    family = family_from_config(config)
    for kind, (own, others) in recipes_of(config).items():
        path = Path(folder) / kind
        path.mkdir()
        content: dict[str, object] = {**family.config(), "torch_dtype": "bfloat16"}
        if kind == "blocks":
            content["quantization_config"] = quantization_config(family.shapes())
        (path / "config.json").write_text(json.dumps(content))
        with built(path, 1, 0, False) as model:
            found[f"{kind} into {kind}"] = said(model, own)
            found |= {f"{name} into {kind}": said(model, specs) for name, specs in others.items()}
    return found


@pytest.mark.integration
def test_weights_of_another_recipe_are_refused_in_one_line_that_names_one(tmp_path: Path) -> None:
    """Of a linear layer and of an expert, by engines in bfloat16 and in block FP8."""
    (found,) = run_distributed(take_recipes, 1, None, 360.0, args=(str(tmp_path),), fresh=True)
    assert (found.pop("plain into plain"), found.pop("blocks into blocks")) == ("", "")
    assert len(found) == 2 + 2 * (14 + 10)
    assert [name for name, reason in found.items() if not reason] == []
    assert [name for name, reason in found.items() if "\n" in reason or ".weight" not in reason] == []
