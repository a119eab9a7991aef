"""Block FP8 of what Megatron holds: its interleaved weights, and what keeps its type beside them."""

from __future__ import annotations

import pytest
import torch

from etp.formats import quantize_blocks
from megatron_patches.refit.control.exchange import Exchange
from megatron_patches.refit.layout.weight_format import WeightFormat, quantized_weights, scales_of
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import trainer_manifest
from megatron_patches.refit.source.block_quantizer import BlockQuantizer
from megatron_patches.refit.source.fp8_block import Fp8BlockSource
from megatron_patches.refit.source.modules import ModuleSource
from tests.integration.tiny_models import DEEPSEEK_V3, QWEN3

CPU = torch.device("cpu")
ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize("tp", [1, 2])
def test_interleaved_heads_become_the_bytes_of_the_checkpoints_weights_and_of_the_trainers_gemms(tp: int) -> None:
    sizes = {"num_hidden_layers": 1, "head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 2}
    family = family_from_config(QWEN3 | sizes | {"hidden_size": 256})
    names, shapes, compared = [f"{ATTENTION}.{kind}_proj.weight" for kind in "qkv"], family.shapes(), 0
    generator = torch.Generator().manual_seed(3)
    checkpoint = {
        name: torch.randn(shapes[name], generator=generator).mul(torch.randn(shapes[name], generator=generator).exp2())
        for name in names
    }
    for rank in range(tp):
        held = trainer_manifest(family, TrainerMesh(tp=tp), rank)
        memory = {one.name: torch.ones(one.numel, dtype=getattr(torch, one.dtype)) for one in held.storages}
        mine = [one for one in held.placements if one.box.tensor in names]
        (storage,) = {one.view.storage for one in mine}  # Megatron's linear_qkv
        assert len(mine) == 3 * 2 // tp  # q, k and v of each group of heads
        for one in mine:
            one.view.tensor(memory[storage]).copy_(checkpoint[one.box.tensor][slice(one.box.start[0], one.box.stop[0])])
        quantizer = BlockQuantizer(dict(shapes), held, power_of_two=True, device=CPU, exchange=Exchange())
        quantizer.measure(memory)
        quantizer.agree()
        quantizer.cast(memory)
        quantizer.check()
        of_gemms, _ = quantize_blocks(memory[storage].view(-1, 256))
        views = {one.box: one.view for one in quantizer.manifest.placements}
        first = min(views[one.box].offset - one.view.offset for one in mine)
        sent = quantizer.quantized[views[mine[0].box].storage].view(torch.uint8)
        assert torch.equal(sent[first : first + of_gemms.numel()].view(-1, 256), of_gemms)
        for name in names:
            bytes_, scales = quantize_blocks(checkpoint[name].bfloat16())
            for wanted, tensor in ((bytes_, name), (scales, scales_of(name))):
                for one in quantizer.manifest.placements:
                    if one.box.tensor == tensor:
                        found = one.view.tensor(quantizer.quantized[one.view.storage]).view(wanted.dtype)
                        assert torch.equal(found, wanted[slice(one.box.start[0], one.box.stop[0])])
                        compared += found.numel()
    assert compared == 10 * (128 * 256 + 2)


def test_what_is_not_quantized_is_held_as_before_and_the_routers_bias_in_fp32() -> None:
    family = family_from_config(DEEPSEEK_V3)
    held, shapes = trainer_manifest(family, TrainerMesh(), 0), dict(family.shapes())
    found = BlockQuantizer(shapes, held, power_of_two=True, device=CPU, exchange=Exchange()).manifest
    names = set(quantized_weights(shapes))
    kept = {one.view.storage for one in held.placements if one.box.tensor not in names}
    assert {name: found.storage[name] for name in kept} == {name: held.storage[name] for name in kept}
    fp32 = {one.box.tensor for one in found.placements if found.storage[one.view.storage].dtype == "float32"}
    biases = {name for name in shapes if name.endswith("e_score_correction_bias")}
    assert len(biases) == sum(name.endswith("mlp.gate.weight") for name in shapes)
    assert fp32 == biases | {scales_of(name) for name in names}


def test_a_bias_in_fp32_is_sent_in_fp32_beside_quantized_weights() -> None:
    layer = torch.nn.Linear(128, 256, dtype=torch.bfloat16)
    layer.bias = torch.nn.Parameter(torch.randn(256))  # which bf16 cannot hold
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": layer})])})
    weight, bias = "layers.0.q_proj.weight", "layers.0.q_proj.bias"
    source = Fp8BlockSource(ModuleSource(model, {}), WeightFormat.FP8_BLOCK, Exchange())
    manifest = source.describe(0).manifest
    source.settle()
    assert {one.box.tensor: manifest.storage[one.view.storage].dtype for one in manifest.placements} == {
        weight: "float8_e4m3fn",
        scales_of(weight): "float32",
        bias: "float32",
    }
    assert source.look_up().keys() == manifest.storage.keys()
    assert torch.equal(source.look_up()[bias], layer.bias.detach())
