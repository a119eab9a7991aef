"""``export`` and ``push`` build every family from a checkpoint's arguments, spread otherwise than it was saved."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from tests.integration.checkpoint_families import CONFIGS, command_body, parallel_flags, save_body
from tests.integration.live_refit import PROMPTS, value
from tests.support.launch import run_megatron
from tests.support.ports import free_ports
from tests.support.vllm_host import VllmHost

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

SAVED = {
    "llama": TrainerMesh(tp=2),
    "qwen2": TrainerMesh(etp=2),
    "qwen3": TrainerMesh(pp=2),
    "qwen3_moe": TrainerMesh(ep=2, dp=2),
    "deepseek_v3": TrainerMesh(pp=2),
    "nemotron_h": TrainerMesh(etp=2, expert_etp=2),
}
EXPORTED = {
    "llama": (TrainerMesh(pp=2, vpp=2), TrainerMesh(etp=2)),
    "qwen2": (TrainerMesh(pp=2, first=1, last=3),),
    "qwen3": (TrainerMesh(tp=2),),
    "qwen3_moe": (TrainerMesh(etp=2, expert_etp=2), TrainerMesh(tp=2, expert_tp=2), TrainerMesh(tp=2, etp=2, ep=4)),
    "deepseek_v3": (
        TrainerMesh(tp=2, ep=2),
        TrainerMesh(pp=2, vpp=2),
        TrainerMesh(pp=2, etp=2, ep=2),
        TrainerMesh(tp=2, etp=2, ep=2, expert_etp=2),
    ),
    "nemotron_h": (
        TrainerMesh(tp=2, ep=2),
        TrainerMesh(pp=2, vpp=2),
        TrainerMesh(pp=2, first=3, last=5),
        TrainerMesh(pp=2, etp=2, expert_tp=2),
    ),
}
OTHER_NAMES = ("qwen3_moe", "deepseek_v3")
# One weight of Megatron's, filled last under the name of the layer that predicts one more token.
COPIES = {
    "model.embed_tokens.weight": "model.layers.4.embed_tokens.weight",
    "lm_head.weight": "model.layers.4.shared_head.head.weight",
}
CASES = [(name, mesh) for name, meshes in EXPORTED.items() for mesh in meshes]


def called(mesh: TrainerMesh) -> str:
    return "_".join(f"{key}{size}" for key, size in vars_of(mesh).items() if size not in (0, 1))


def vars_of(mesh: TrainerMesh) -> dict[str, int]:
    return {name: getattr(mesh, name) for name in TrainerMesh.__dataclass_fields__}


def run_commands(
    ranks: int, commands: Sequence[Sequence[str]], address: str = "", *, fresh: bool = False
) -> list[list[tuple[int, str]]]:
    """Status and output of each command, by rank; ``fresh`` where processes may still have groups of another test."""
    numbered = list(zip(free_ports(len(commands)), commands, strict=True))
    found = run_megatron(command_body, ranks, None, 240.0, (numbered, address), fresh=fresh)
    return [[rank[number] for rank in found] for number in range(len(commands))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family, saved by two ranks and exported from their memory."""
    folder = tmp_path_factory.mktemp("families")
    models = [(name, mesh, 1) for name, mesh in SAVED.items()]
    models += [("qwen3_moe", SAVED["qwen3_moe"], 2), *((name, TrainerMesh(etp=2), 3) for name in OTHER_NAMES)]
    run_megatron(save_body, 2, timeout_s=240.0, args=(models, str(folder)))
    return folder


@pytest.fixture(scope="module")
def outcomes(root: Path) -> dict[tuple[str, TrainerMesh], list[tuple[int, str]]]:
    """What the command said, on every rank, for each case."""
    found: dict[tuple[str, TrainerMesh], list[tuple[int, str]]] = {}
    for size in sorted({mesh.size for _, mesh in CASES}):
        cases = [(name, mesh) for name, mesh in CASES if mesh.size == size]
        commands = [
            [*f"export --load {root}/{name}-1/saved --output {root}/{name}-1/{called(mesh)}".split(), *flags]
            for name, flags, mesh in ((name, parallel_flags(mesh), mesh) for name, mesh in cases)
        ]
        found |= dict(zip(cases, run_commands(size, commands), strict=True))
    return found


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=[f"{name}-{called(mesh)}" for name, mesh in CASES])
def test_the_export_of_a_checkpoint_is_that_of_the_live_model(
    root: Path, outcomes: dict[tuple[str, TrainerMesh], list[tuple[int, str]]], name: str, mesh: TrainerMesh
) -> None:
    """To the byte, configuration included; and every tensor is what it was filled with."""
    results = outcomes[name, mesh]
    assert [status for status, _ in results] == [0] * mesh.size, results
    assert_same_files(root / f"{name}-1" / called(mesh), root / f"{name}-1" / "live")
    assert_filled(root / f"{name}-1" / called(mesh), name)


def assert_same_files(folder: Path, other: Path) -> None:
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def assert_filled(folder: Path, name: str) -> None:
    """Every tensor of the architecture is there, and holds the values of seed 1."""
    found = load_file(folder / "model.safetensors")
    shapes = family_from_config(CONFIGS[name]).shapes()
    assert found.keys() == shapes.keys()
    for tensor, shape in shapes.items():
        source = COPIES.get(tensor, tensor) if COPIES.get(tensor) in shapes else tensor
        full = value(Box(source, (0,) * len(shape), shape), shape, 1)
        assert torch.equal(found[tensor], full.to(found[tensor].dtype)), tensor


def test_a_checkpoint_of_other_layers_is_read_by_its_own_names(root: Path) -> None:
    """Transformer Engine's layers keep some norms elsewhere; here those of Megatron's own are built."""
    commands = [
        f"export --load {root}/{name}-3/saved --output {root}/{name}-3/out --expert-model-parallel-size 2".split()
        for name in OTHER_NAMES
    ]
    for name, results in zip(OTHER_NAMES, run_commands(2, commands), strict=True):
        assert [status for status, _ in results] == [0, 0], results
        assert_same_files(root / f"{name}-3" / "out", root / f"{name}-3" / "live")


def test_what_cannot_be_built_is_refused_before_the_weights_are_read(root: Path, tmp_path: Path) -> None:
    refusals = {
        "qwen3 --expert-model-parallel-size 2": "--expert-model-parallel-size is 2, but it has no experts",
        "qwen3 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 4": "4 on the last stage, leave 0",
        "nemotron_h --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 3": "cut into 3 chunks",
        "deepseek_v3 --vocab-size 41": "its embedding has 40 rows, padding included, which cannot hold 41 tokens",
    }
    commands = []
    for number, words in enumerate(refusals):
        name, *flags = words.split()
        folder = tmp_path / str(number)
        shutil.copytree(root / f"{name}-1" / "saved", folder)
        # What is left holds the arguments, and not all of the weights.
        (one_of_two,) = folder.glob("iter_*/__1_0.distcp")
        one_of_two.unlink()
        commands.append([*f"export --load {folder} --output {tmp_path}/out".split(), *flags])
    for message, results in zip(refusals.values(), run_commands(2, commands), strict=True):
        assert [status for status, _ in results] == [1, 1]
        assert message in results[0][1]
        assert "Traceback" not in results[0][1]
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_push_of_a_checkpoint_with_experts_leaves_the_bits_of_a_fresh_engine(root: Path, tmp_path: Path) -> None:
    with VllmHost(root / "qwen3_moe-2" / "live", tmp_path) as host:
        engine = host.connect()
        fresh = engine.parameters(), engine.log_probabilities(PROMPTS)
        for seed, mesh, memory in (
            (1, TrainerMesh(ep=2, dp=2), "beside"),
            (2, TrainerMesh(etp=2, expert_etp=2), "in_place"),
        ):
            words = f"push --load {root}/qwen3_moe-{seed}/saved --engines http://engine --version {seed}".split()
            words += f"--memory {memory} --staging-bytes 65536".split()
            (results,) = run_commands(2, [[*words, *parallel_flags(mesh)]], host.address)
            assert [status for status, _ in results] == [0, 0], results
            assert f"version {seed} serves on 1 engine(s)" in results[0][1]
            found = engine.parameters(), engine.log_probabilities(PROMPTS)
            assert (found == fresh) is (seed == 2)
