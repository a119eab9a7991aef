"""A model is added by a mapping file alone: it is found, exported, and planned for from its configuration."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron_patches.refit import models
from megatron_patches.refit.checkpoints.export import export_checkpoint
from megatron_patches.refit.checkpoints.safetensors_layout import layout_checkpoint
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.config_traits import family_from_config, read_config
from megatron_patches.refit.models.families import declared, family_of
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.offline import param_shards, trainer_manifest
from megatron_patches.refit.planning.plan import PlanOptions, make_plan
from megatron_patches.refit.planning.proof import prove
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.simulation.cluster import Sides, describe_cluster
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.target.vllm_layout import EngineMesh
from tests.unit.refit.test_hf_config import fake_model

TOKENS, PADDED = 251, 256

TOY = '''
"""Llama with norms centred at zero, and one more of them in each layer; with a property that others do not have."""

from dataclasses import dataclass, fields

from megatron_patches.refit.models.config_fields import integer
from megatron_patches.refit.models.family import Declaration
from megatron_patches.refit.models.gpt import gpt_traits, may_be_gpt
from megatron_patches.refit.models.llama import LlamaFamily, traits_from_config
from megatron_patches.refit.models.params import alike
from megatron_patches.refit.models.traits import ModelTraits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyTraits(ModelTraits):
    period: int


class ToyFamily(LlamaFamily):
    architecture = "ToyForCausalLM"

    def config(self):
        return {**super().config(), "model_type": "toy", "period": self.traits.period}

    def weights(self, layer, fused_norms):
        yield from super().weights(layer, fused_norms)
        yield alike("behind.weight", "behind.weight", (self.traits.hidden_size,))


def toy(traits, period):
    return ToyFamily(ToyTraits(**{item.name: getattr(traits, item.name) for item in fields(traits)}, period=period))


def refusals(model, vocab_size):
    if model.config.refused:
        yield model.config.refused


FAMILY = Declaration(
    architecture="ToyForCausalLM",
    claims=lambda model: may_be_gpt(model) and hasattr(model.config, "period"),
    refusals=refusals,
    read=lambda model, vocab_size: toy(gpt_traits(model, vocab_size), model.config.period),
    from_config=lambda config: toy(traits_from_config(config), integer(config, "period")),
)
'''


class Layer(nn.Module):
    """One of Megatron's layers, with a norm more."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.input_layernorm, self.pre_mlp_layernorm, self.behind = (nn.RMSNorm(64) for _ in range(3))
        self.self_attention, self.mlp = nn.Module(), nn.Module()
        self.self_attention.linear_qkv = nn.Linear(64, (4 + 2 * 2) * 16, bias=False)
        self.self_attention.linear_proj = nn.Linear(4 * 16, 64, bias=False)
        self.mlp.linear_fc1, self.mlp.linear_fc2 = nn.Linear(64, 2 * 96, bias=False), nn.Linear(96, 64, bias=False)


class ToyModel(nn.Module):
    """As much of a GPTModel as is read, with random weights."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        settings: dict[str, Any] = {
            "kv_channels": 16,
            "num_layers": 2,
            "init_method_std": 0.02,
            "layernorm_zero_centered_gamma": True,
            "refused": "",
            "period": 3,
        }
        for name, value in vars(fake_model(**settings | changes)).items():
            if name != "decoder":
                setattr(self, name, value)
        self.share_embeddings_and_output_weights = False
        self.embedding, self.decoder = nn.Module(), nn.Module()
        self.embedding.word_embeddings = nn.Embedding(PADDED, 64)
        self.decoder.layers = nn.ModuleList([Layer(1), Layer(2)])
        self.decoder.final_layernorm = nn.RMSNorm(64)
        self.output_layer = nn.Linear(64, PADDED, bias=False)
        for number, weight in enumerate(self.parameters()):
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(number))


MappingFile = Callable[[str, str], None]


@pytest.fixture
def mapping_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MappingFile]:
    """Adds a mapping file to the package, by name and text."""
    folder = tmp_path / "added"
    folder.mkdir()
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    added: list[str] = []

    def add(name: str, text: str) -> None:
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        added.append(name)

    yield add
    for name in added:
        sys.modules.pop(f"{models.__name__}.{name}", None)
        if hasattr(models, name):
            delattr(models, name)


def test_a_mapping_file_is_enough_for_an_export_and_for_plans(mapping_file: MappingFile, tmp_path: Path) -> None:
    model: Any = ToyModel()
    path = tmp_path / "exported"
    with pytest.raises(Exception, match="its norm weights are centred at zero"):
        export_checkpoint([model], path, vocab_size=TOKENS)
    mapping_file("toy", TOY)
    report = export_checkpoint([model], path, vocab_size=TOKENS)
    assert report.architecture == "ToyForCausalLM"

    config = read_config(path)
    assert (config["architectures"], config["model_type"], config["period"]) == (["ToyForCausalLM"], "toy", 3)
    tensors = load_file(path / "model.safetensors")
    assert len(tensors) == 3 + 2 * 10
    for number, layer in enumerate(model.decoder.layers):
        assert torch.equal(tensors[f"model.layers.{number}.behind.weight"], layer.behind.weight)
        assert torch.equal(tensors[f"model.layers.{number}.mlp.up_proj.weight"], layer.mlp.linear_fc1.weight[96:])
    assert torch.equal(tensors["lm_head.weight"], model.output_layer.weight[:TOKENS])

    family = family_from_config(config)
    assert family.traits == family_of(model, TOKENS).traits
    live = {item.shard.storage: item.shard.shape for item in describe_model([model])}
    assert {shard.storage: shard.shape for shard in param_shards(family, TrainerMesh(), 0)} == live

    mesh = TrainerMesh(tp=2, etp=2, pp=2)
    sources = [trainer_manifest(family, mesh, rank) for rank in range(mesh.size)]
    specs = agree_on_tensors(family.shapes(), sources)
    wanted, options = [layout_checkpoint(specs, 1 << 30).manifest()], PlanOptions()
    plan = make_plan(specs, sources, wanted, options)
    prove(plan, sources, wanted, options)
    assert sum(1 for spec in plan.tensors if ".behind." in spec.name) == 2
    with pytest.raises(UnsupportedModelError, match=r"no place for model\.layers\.0\.behind\.weight \(and 1 more"):
        describe_cluster(Sides(family=family, trainer=mesh, engine=EngineMesh()))


def test_without_its_mapping_file_an_architecture_is_not_planned_for(mapping_file: MappingFile) -> None:
    config: dict[str, object] = {"architectures": ["ToyForCausalLM"]}
    with pytest.raises(UnsupportedModelError, match="the architecture is ToyForCausalLM; known are"):
        family_from_config(config)
    mapping_file("toy", "\n".join(line for line in TOY.splitlines() if "    from_config=" not in line))
    assert "ToyForCausalLM" in [family.architecture for family in declared()]
    with pytest.raises(UnsupportedModelError, match="the architecture is ToyForCausalLM; known are"):
        family_from_config(config)


def test_what_every_family_refuses_is_told_family_by_family(mapping_file: MappingFile) -> None:
    mapping_file("toy", TOY)
    wrong = r"as LlamaForCausalLM, its norm weights are .*--apply-layernorm-1p.; as ToyForCausalLM, it has --odd"
    with pytest.raises(UnsupportedModelError, match=f"cannot export this model: {wrong}$"):
        family_of(ToyModel(refused="it has --odd"), TOKENS)


def test_a_model_that_two_families_express_is_not_guessed_at(mapping_file: MappingFile) -> None:
    mapping_file("toy", TOY)
    with pytest.raises(UnsupportedModelError, match="may be LlamaForCausalLM or ToyForCausalLM; the mapping files of"):
        family_of(ToyModel(layernorm_zero_centered_gamma=False), TOKENS)


def test_a_model_that_no_mapping_file_is_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "__path__", [])
    with pytest.raises(UnsupportedModelError, match="no mapping file is for such a ToyModel"):
        family_of(ToyModel(), TOKENS)


def test_two_files_for_one_architecture_are_refused(mapping_file: MappingFile) -> None:
    mapping_file("toy", TOY)
    mapping_file("other_toy", TOY)
    with pytest.raises(ValueError, match=r"both other_toy and toy in .*models are for ToyForCausalLM; remove one"):
        declared()
