"""Megatron runs push in block FP8 into vLLM engines whose checkpoints are in block FP8.

The oracle is a fresh engine, loaded from the checkpoint that is exported in this format. vLLM's own kernels need AMX on
CPUs, so engines have those of :mod:`tests.support.vllm_fp8`.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_patches.refit import OnEngineFailure, RefitOptions, WeightPublisher
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from tests.integration.live_fp8 import After, Step, export_body, push_body
from tests.integration.live_refit import PROMPTS, STAGING
from tests.integration.tiny_models import QWEN2, QWEN3, QWEN3_MOE
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.prepared import engine_release
from tests.support.vllm_host import VllmHost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

# Heads of 64 rows, of which two make a block, and 192 columns: one block and a half.
SIZES = {"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 384, "head_dim": 64}
DENSE = QWEN3 | SIZES
EXPERTS = QWEN3_MOE | SIZES | {"moe_intermediate_size": 128}
WIDE = QWEN3 | SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4}
"""With a block for each of two ranks of an engine in every weight."""
BIASED = QWEN2 | SIZES
WIDE_EXPERTS = QWEN3_MOE | SIZES | {"hidden_size": 256, "moe_intermediate_size": 128}

FORMAT = WeightFormat.FP8_BLOCK
ALONE = TrainerMesh()


def export(
    config: dict[str, Any], folder: Path, weight_format: WeightFormat, seed: int, mesh: TrainerMesh = ALONE
) -> Path:
    path = folder / f"{weight_format}_{seed}"
    case = Case(mesh, tuple(range(mesh.size)), config)
    run_megatron(export_body, mesh.size, timeout_s=200.0, args=(case, weight_format, {seed: str(path)}))
    return path


def host(model: Path, folder: Path, **options: Any) -> VllmHost:
    folder.mkdir()
    return VllmHost(model, folder, worker_extension_cls="tests.support.vllm_fp8.CpuKernels", **options)


def push(
    config: dict[str, Any], mesh: TrainerMesh, engine: VllmHost, version: int, steps: list[Step], **options: Any
) -> list[After]:
    case = Case(mesh, tuple(range(mesh.size)), config)
    args = (case, engine.address, version, steps, {"weight_format": FORMAT, **options})
    return run_megatron(push_body, mesh.size, timeout_s=200.0, args=args)[0]


@pytest.mark.parametrize(
    ("config", "beside", "in_place"),
    [
        (DENSE, TrainerMesh(etp=3), TrainerMesh(tp=2, etp=2)),
        (EXPERTS, TrainerMesh(etp=2, expert_etp=2), TrainerMesh(ep=2, dp=2)),
    ],
    ids=["dense", "experts"],
)
def test_an_engine_holds_and_answers_what_one_of_the_exported_checkpoint_does(
    config: dict[str, Any], beside: TrainerMesh, in_place: TrainerMesh, tmp_path: Path
) -> None:
    """Beside and in place; and what it did before, if a weight is not a number or a commit fails half done."""
    paths = {1: export(config, tmp_path, FORMAT, 1), 2: export(config, tmp_path, FORMAT, 2, beside)}
    with host(paths[1], tmp_path / "first") as one:
        first = After(one.connect().parameters(), one.connect().log_probabilities(PROMPTS))
    with host(paths[2], tmp_path / "second") as engine:
        second = After(engine.connect().parameters(), engine.connect().log_probabilities(PROMPTS))
        steps = [Step(1), Step(2, "nan"), Step(2, "apply"), Step(2)]
        pushed = push(config, beside, engine, 1, steps)
        steps = [Step(1), Step(2, "replace"), Step(2)]
        pushed += push(config, in_place, engine, 9, steps, memory=MemoryMode.IN_PLACE)
    assert first.parameters != second.parameters
    held = [first, first, first, second, first, first, second]
    assert [(after.parameters, after.answers) for after in pushed] == [(one.parameters, one.answers) for one in held]
    reasons = [after.reason for after in pushed if after.reason]
    assert "cannot be quantized: a weight in it is infinite or not a number" in reasons[0]
    assert "down_proj.weight[" in reasons[0]
    assert len(reasons) == 3
    assert all("a worker of this engine failed to replace its weights" in reason for reason in reasons[1:])


@pytest.mark.variant
def test_an_engine_of_two_ranks_holds_what_one_of_the_exported_checkpoint_does(tmp_path: Path) -> None:
    """With scales in fp32, too; and what changed alone is enough."""
    fp32 = WeightFormat.FP8_BLOCK_FP32_SCALES
    paths = {1: export(WIDE, tmp_path, FORMAT, 1), 2: export(WIDE, tmp_path, fp32, 2)}
    fresh = {}
    for seed, path in paths.items():
        with host(path, tmp_path / f"engine_{seed}", tensor_parallel_size=2) as engine:
            fresh[seed] = engine.connect().parameters(), engine.connect().log_probabilities(PROMPTS)
            if seed == 2:
                pushed = push(WIDE, TrainerMesh(etp=3), engine, 1, [Step(1)])
                options = {"weight_format": fp32, "payload": PayloadKind.DELTA}
                pushed += push(WIDE, TrainerMesh(tp=2), engine, 2, [Step(1), Step(2)], **options)
    assert [(pushed[at].parameters, pushed[at].answers) for at in (0, 2)] == [fresh[1], fresh[2]]
    assert fresh[1] != fresh[2]


@pytest.mark.parametrize(
    ("config", "quantization", "workers"),
    [
        pytest.param(WIDE, "fp8_per_tensor", 2, id="tensor"),
        pytest.param(BIASED, "fp8_per_channel", 1, id="channel"),
        pytest.param(WIDE_EXPERTS, "fp8_per_block", 1, id="block"),
        pytest.param(WIDE, "fp8_per_block", 2, id="block-tp2", marks=pytest.mark.variant),
    ],
)
def test_an_engine_that_quantizes_what_it_loads_holds_and_answers_what_a_fresh_one_does(
    config: dict[str, Any], quantization: str, workers: int, tmp_path: Path
) -> None:
    """Pushes in bfloat16, beside, and in place as deltas.

    A commit that fails half done, a weight that is no number, of which its scale would be one, and blocks change
    nothing.
    """
    if quantization == "fp8_per_tensor" and engine_release() != "0.26.0":
        workers = 1  # several would agree on scales while they quantize, which is refused
    trained = WeightFormat.TRAINED
    options = {"quantization": quantization, "tensor_parallel_size": workers}
    paths = {seed: export(config, tmp_path, trained, seed) for seed in (1, 2)}
    with host(paths[1], tmp_path / "first", **options) as one:
        first = After(one.connect().parameters(), one.connect().log_probabilities(PROMPTS))
    with host(paths[2], tmp_path / "second", **options) as engine:
        second = After(engine.connect().parameters(), engine.connect().log_probabilities(PROMPTS))
        steps = [Step(1), Step(2, "nan"), Step(2, "apply"), Step(2)]
        pushed = push(config, TrainerMesh(etp=2), engine, 1, steps, weight_format=trained)
        steps = [Step(1), Step(2, "nan"), Step(2, "replace"), Step(2)]
        delta = {"memory": MemoryMode.IN_PLACE, "payload": PayloadKind.DELTA}
        pushed += push(config, ALONE, engine, 9, steps, weight_format=trained, **delta)
        (blocks,) = push(config, ALONE, engine, 20, [Step(1)])
        after = After(engine.connect().parameters(), engine.connect().log_probabilities(PROMPTS))
    assert first.parameters != second.parameters
    held = [first, first, first, second, first, first, first, second, second]
    assert [(one.parameters, one.answers) for one in [*pushed, after]] == [
        (one.parameters, one.answers) for one in held
    ]
    assert len([one.reason for one in pushed if "failed to replace its weights" in one.reason]) == 2
    unusable = [one.reason for one in pushed if "has a weight of nan; this engine quantizes weights" in one.reason]
    assert len(unusable) == 2
    assert not any("\n" in reason for reason in unusable)
    assert "q_proj.weight is float8_e4m3fn in the trainer and bfloat16 in the engine" in blocks.reason


def module_of(checkpoint: Path) -> torch.nn.Module:
    """A module with the tensors of a checkpoint as parameters, under the same names."""
    root = torch.nn.Module()
    for file in checkpoint.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            *path, last = name.split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def test_a_trainer_that_holds_blocks_itself_sends_them_as_they_are(tmp_path: Path) -> None:
    """With scales that are positive and finite: others are refused in one line, and the old weights serve."""
    paths = {seed: export(DENSE, tmp_path, FORMAT, seed) for seed in (1, 2)}
    with host(paths[2], tmp_path / "second") as one:
        second = After(one.connect().parameters(), one.connect().log_probabilities(PROMPTS))
    model, config = module_of(paths[2]), json.loads((paths[2] / "config.json").read_text())
    layer: Any = model.get_submodule("model.layers.1.mlp.down_proj")
    options = RefitOptions(timeout_s=60.0, staging_bytes=STAGING, on_engine_failure=OnEngineFailure.DROP)
    with host(paths[1], tmp_path / "first") as running:
        engine = running.connect()

        def reason_of(version: int) -> str:
            with WeightPublisher(model, config=config, options=options) as publisher:
                publisher.attach(engine)
                try:
                    reason = str(publisher.publish(version).result(60.0).engines[engine.name].reason)
                except RefitError as error:
                    reason = str(error)
            assert After(engine.parameters(), engine.log_probabilities(PROMPTS)) == second
            return reason

        assert reason_of(1) == "None"
        for version, value in enumerate((0.0, math.nan, -0.5, math.inf), 2):
            kept = layer.weight_scale_inv.clone()
            layer.weight_scale_inv[1, 2] = value
            reason = reason_of(version)
            assert f"down_proj.weight_scale_inv[0:2, 0:3] has a scale of {value}; it must be positive" in reason
            assert "\n" not in reason
            layer.weight_scale_inv.copy_(kept)
        assert reason_of(8) == "None"
        del layer.weight_scale_inv
        reason = reason_of(9)
        assert "down_proj.weight is float8_e4m3fn, and the trainer has no model.layers.1.mlp.down_proj" in reason
        assert "\n" not in reason


def test_weights_that_only_one_side_quantizes_are_refused_by_name(tmp_path: Path) -> None:
    """A layer or all that the engine keeps in bfloat16, and a trainer that sends bfloat16; the old weights serve."""
    trained, quantized = (export(DENSE, tmp_path, kind, 1) for kind in (WeightFormat.TRAINED, FORMAT))
    content = json.loads((quantized / "config.json").read_text())
    content["quantization_config"]["modules_to_not_convert"].append("model.layers.1.mlp.down_proj")
    (quantized / "config.json").write_text(json.dumps(content))
    with host(quantized, tmp_path / "mixed", load_format="dummy") as engine:
        before = engine.connect().parameters()
        (kept,) = push(DENSE, ALONE, engine, 1, [Step(1)])
        (plain,) = push(DENSE, ALONE, engine, 1, [Step(1)], weight_format=WeightFormat.TRAINED)
        assert engine.connect().parameters() == before
    with host(trained, tmp_path / "plain") as engine:
        before = engine.connect().parameters()
        (none,) = push(DENSE, ALONE, engine, 1, [Step(1)])
        assert engine.connect().parameters() == before
    assert not any("\n" in one.reason for one in (kept, plain, none))
    assert (
        "model.layers.1.mlp.down_proj.weight is float8_e4m3fn in the trainer and bfloat16 in the engine" in kept.reason
    )
    assert "self_attn.q_proj.weight is bfloat16 in the trainer and float8_e4m3fn in the engine" in plain.reason
    assert "self_attn.q_proj.weight is float8_e4m3fn in the trainer and bfloat16 in the engine" in none.reason
