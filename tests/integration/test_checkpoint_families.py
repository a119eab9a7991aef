"""``export`` and ``push`` build every family from a checkpoint's arguments, spread otherwise than it was saved."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.source.config_traits import family_from_config
from megatron_patches.refit.source.mesh import TrainerMesh
from tests.integration.checkpoint_families import CONFIGS, command_body, parallel_flags, save_body
from tests.integration.live_refit import PROMPTS, value
from tests.support.launch import run_distributed
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


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def run_commands(ranks: int, commands: Sequence[Sequence[str]], address: str = "") -> list[list[tuple[int, str]]]:
    """Status and output of each command, by rank."""
    numbered = list(zip(free_ports(len(commands)), commands, strict=True))
    found = run_distributed(command_body, ranks, None, 240.0, (numbered, address))
    return [[rank[number] for rank in found] for number in range(len(commands))]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every family, saved by two ranks and exported from their memory."""
    folder = tmp_path_factory.mktemp("families")
    models = [(name, mesh, 1) for name, mesh in SAVED.items()] + [("qwen3_moe", SAVED["qwen3_moe"], 2)]
    run_distributed(save_body, 2, timeout_s=240.0, args=(models, str(folder)))
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
    live, output = root / f"{name}-1" / "live", root / f"{name}-1" / called(mesh)
    assert sorted(path.name for path in output.iterdir()) == sorted(path.name for path in live.iterdir())
    for path in live.iterdir():
        assert (output / path.name).read_bytes() == path.read_bytes(), path.name
    found = load_file(output / "model.safetensors")
    shapes = family_from_config(CONFIGS[name]).shapes()
    assert found.keys() == shapes.keys()
    for tensor, shape in shapes.items():
        source = COPIES.get(tensor, tensor) if COPIES.get(tensor) in shapes else tensor
        full = value(Box(source, (0,) * len(shape), shape), shape, 1)
        assert torch.equal(found[tensor], full.to(found[tensor].dtype)), tensor


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_push_of_a_checkpoint_with_experts_leaves_the_bits_of_a_fresh_engine(root: Path, tmp_path: Path) -> None:
    with VllmHost(root / "qwen3_moe-2" / "live", tmp_path) as host:
        engine = host.connect()
        fresh = engine.parameters(), engine.log_probabilities(PROMPTS)
        for seed, mesh in ((1, TrainerMesh(ep=2, dp=2)), (2, TrainerMesh(etp=2, expert_etp=2))):
            words = f"push --load {root}/qwen3_moe-{seed}/saved --engines http://engine --version {seed}".split()
            (results,) = run_commands(2, [[*words, *parallel_flags(mesh)]], host.address)
            assert [status for status, _ in results] == [0, 0], results
            assert f"version {seed} serves on 1 engine(s)" in results[0][1]
            found = engine.parameters(), engine.log_probabilities(PROMPTS)
            assert (found == fresh) is (seed == 2)
