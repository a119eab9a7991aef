"""A Megatron run, spread every way, pushes its weights into vLLM, which runs in processes of its own.

Each engine is started from a checkpoint of model 2, so that its parameters as vLLM loads them are known. Then every
mesh pushes model 1 and model 2: after the second push all of the engine's parameters must have the bits of the fresh
engine again, and its answers to prompts must be the same numbers. Engines of one worker have a second fresh one beside
them, of model 1, for the first push.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.trainer.session import PushReport
from tests.integration.live_refit import (
    PROMPTS,
    export_all_body,
    export_body,
    in_place_body,
    narrowing_body,
    push_body,
    train_body,
)
from tests.integration.tiny_models import DEEPSEEK_V3, LLAMA, NEMOTRON_H, QWEN3, QWEN3_MOE
from tests.support.launch import run_megatron
from tests.support.live_models import Case
from tests.support.prepared import engine_release
from tests.support.vllm_host import VllmHost

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(600),
]

YARN: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3_yarn": QWEN3 | {"rope_scaling": YARN},
    "llama_tied": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_yarn": DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "nemotron_h": NEMOTRON_H,
    "qwen3_in_float32": QWEN3,
}
ENGINE_OPTIONS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"worker_extension_cls": "tests.support.vllm_mamba.CpuKernels"},
    "qwen3_in_float32": {"dtype": "float32"},  # the trainer has bfloat16
}
# What the engine makes of weights, or sees them through.
DERIVED = {"nemotron_h": {"model.layers.0.mixer.A", "model.layers.0.mixer.conv_weights"}}
MESHES = {
    "qwen3": (
        TrainerMesh(etp=2),
        TrainerMesh(tp=2),
        TrainerMesh(tp=4),  # more ranks than KV heads
        TrainerMesh(tp=2, etp=2),
        TrainerMesh(etp=3),  # pads every weight
        TrainerMesh(pp=2, vpp=2),
        TrainerMesh(pp=2, etp=2),
    ),
    "llama_tied": (TrainerMesh(pp=2), TrainerMesh(pp=2, etp=2), TrainerMesh(dp=2, etp=2)),
    "qwen3_moe": (
        TrainerMesh(ep=2, dp=2),
        TrainerMesh(etp=2, expert_etp=2),
        TrainerMesh(ep=2, etp=2, expert_etp=2, dp=2),
        TrainerMesh(tp=2, expert_tp=2),
    ),
    "deepseek_v3": (TrainerMesh(etp=2, expert_etp=2), TrainerMesh(tp=2, etp=2, ep=2), TrainerMesh(pp=2, dp=2, ep=2)),
    "nemotron_h": (
        TrainerMesh(etp=2),
        TrainerMesh(tp=2),
        TrainerMesh(etp=3),  # pads every weight
        TrainerMesh(tp=2, etp=2),
        TrainerMesh(pp=2, etp=2),
    ),
    "qwen3_in_float32": (TrainerMesh(etp=2),),
}
# Of a mesh whose pushes are repeated in place, and what arrives beside all the same, as it is converted.
IN_PLACE = {
    "llama_tied": (TrainerMesh(pp=2, etp=2), 0),
    "qwen3_moe": (TrainerMesh(etp=2, expert_etp=2), 0),
    "nemotron_h": (TrainerMesh(tp=2), 2 * 2 * 4),  # A of two mixers with four heads, from bfloat16
}
PIPELINE_MESHES = {"qwen3": (TrainerMesh(etp=2), TrainerMesh(pp=2))}
"""Of trainers that push into engines with a pipeline."""


class Engine(NamedTuple):
    """How an engine is spread."""

    tp: int = 1
    pp: int = 1

    def __str__(self) -> str:
        return f"engine_pp{self.pp}" if self.pp > 1 else f"engine_tp{self.tp}"

    def options(self, model: str) -> dict[str, Any]:
        """Of vLLM."""
        sizes = {"tensor_parallel_size": self.tp, "pipeline_parallel_size": self.pp}
        return {**sizes, **ENGINE_OPTIONS.get(model, {})}

    def meshes(self, model: str) -> tuple[TrainerMesh, ...]:
        """Of the trainers that push into it."""
        return (PIPELINE_MESHES if self.pp > 1 else MESHES).get(model, ())

    def skip_unless_it_runs(self) -> None:
        """VLLM since 0.32.0 on CPUs: the last stage of a pipeline has no memory for what the first one sends."""
        if self.pp > 1 and engine_release() != "0.26.0":
            pytest.skip("from 0.32.0 on, vLLM answers nothing with a pipeline on CPUs (its last stage fails)")


ENGINES = (Engine(), Engine(tp=2), Engine(pp=2))
CASES = [(model, engine, mesh) for model in CONFIGS for engine in ENGINES for mesh in engine.meshes(model)]


Answer = tuple[list[dict[str, str]], list[list[float]]]


def name(mesh: TrainerMesh) -> str:
    return "_".join(f"{k}{v}" for k, v in vars(mesh).items() if v not in (0, 1)) or "alone"


@dataclass
class Pushed:
    """What fresh engines held and answered, and what one of them did after each push, by mesh."""

    fresh: dict[int, Answer]
    """By the seeds of the checkpoints that there were."""
    after: dict[TrainerMesh, list[Answer]]
    in_place: list[Answer]
    reports: list[PushReport]


def push_all(model: str, engine: Engine, folder: Path) -> Pushed:
    """Pushes from all meshes of one model into one engine."""
    config, all_meshes = CONFIGS[model], engine.meshes(model)
    seeds = (2, 1) if engine == Engine() else (2,)
    paths = {seed: str(folder / f"model_{seed}") for seed in seeds}
    run_megatron(export_all_body, 1, args=(Case(TrainerMesh(), (), config), paths), timeout_s=180)
    after: dict[TrainerMesh, list[Answer]] = {}
    fresh: dict[int, Answer] = {}
    with contextlib.ExitStack() as stack:
        hosts = {}
        for seed, path in paths.items():
            (place := folder / f"engine_{seed}").mkdir()
            hosts[seed] = stack.enter_context(VllmHost(Path(path), place, **engine.options(model)))
        for seed, host in hosts.items():
            connection = host.connect()
            fresh[seed] = connection.parameters(), connection.log_probabilities(PROMPTS)
        host = hosts[2]
        versions = itertools.count(1, 10)
        for size in sorted({mesh.size for mesh in all_meshes}):
            meshes = [mesh for mesh in all_meshes if mesh.size == size]
            cases = [(Case(mesh, (), config), next(versions)) for mesh in meshes]
            found = run_megatron(push_body, size, args=(cases, host.address, (1, 2)), timeout_s=420)[0]
            after |= dict(zip(meshes, found, strict=True))
        in_place: tuple[list[Answer], list[PushReport]] = [], []
        if model in IN_PLACE:
            mesh, _ = IN_PLACE[model]
            again = (Case(mesh, (), config), host.address, next(versions), (1, 2))
            in_place = run_megatron(in_place_body, mesh.size, args=again, timeout_s=420)[0]
    return Pushed(fresh, after, *in_place)


@pytest.fixture(scope="module")
def pushed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Engine], Pushed]:
    """What :func:`push_all` found, run once for each model and engine."""
    return functools.cache(lambda model, engine: push_all(model, engine, tmp_path_factory.mktemp(f"{model}_{engine}")))


@pytest.mark.parametrize(
    ("model", "engine", "mesh"), CASES, ids=[f"{model}-{name(mesh)}-{engine}" for model, engine, mesh in CASES]
)
def test_a_push_leaves_the_bits_of_a_fresh_engine(
    model: str, engine: Engine, mesh: TrainerMesh, pushed: Callable[[str, Engine], Pushed]
) -> None:
    engine.skip_unless_it_runs()
    found = pushed(model, engine)
    (other, other_answers), (same, same_answers) = found.after[mesh]
    fresh, fresh_answers = found.fresh[2]
    for worker, tensors in enumerate(fresh):
        assert DERIVED.get(model, set()) <= set(tensors)
        computed = [key for key in tensors if "cos_sin" in key]
        assert all(other[worker][key] != tensors[key] for key in tensors if key not in computed)
        assert same[worker] == tensors
    assert other_answers != fresh_answers
    assert same_answers == fresh_answers
    if 1 in found.fresh:
        assert (other, other_answers) == found.fresh[1]


@pytest.mark.parametrize(("model", "tp"), [(model, tp) for model in IN_PLACE for tp in (1, 2)])
def test_a_push_in_place_leaves_the_same_bits(model: str, tp: int, pushed: Callable[[str, Engine], Pushed]) -> None:
    found = pushed(model, Engine(tp=tp))
    other, same = found.in_place
    assert other == found.after[IN_PLACE[model][0]][0] != found.fresh[2]
    assert same == found.fresh[2]
    for report in found.reports:
        assert report.beside_bytes == IN_PLACE[model][1] // tp
        assert report.backup_bytes * tp >= report.nbytes
        # By clocks of different ranks, which begin before the engine is paused.
        assert 0 < report.seconds["move"] <= report.seconds["send"]
        assert report.seconds["paused"] > 0


@pytest.mark.parametrize(
    ("model", "mesh", "engine"),
    [
        pytest.param("qwen3", TrainerMesh(etp=2), Engine(), marks=pytest.mark.quick),
        ("qwen3_yarn", TrainerMesh(etp=2), Engine()),
        ("llama_tied", TrainerMesh(etp=2), Engine(pp=2)),
        ("qwen3_moe", TrainerMesh(etp=2, expert_etp=2), Engine()),
        ("deepseek_v3", TrainerMesh(etp=2, expert_etp=2), Engine()),
        ("deepseek_v3_yarn", TrainerMesh(etp=2, expert_etp=2), Engine()),
        ("nemotron_h", TrainerMesh(etp=2), Engine()),
        ("nemotron_h", TrainerMesh(tp=2, etp=2), Engine(tp=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, str | Engine) else name(value),
)
def test_after_training_a_push_equals_a_fresh_engine_with_the_export(
    model: str, mesh: TrainerMesh, engine: Engine, tmp_path: Path
) -> None:
    engine.skip_unless_it_runs()
    case, options = Case(mesh, (), CONFIGS[model]), engine.options(model)
    checkpoint = tmp_path / "first"
    run_megatron(export_body, 1, args=(Case(TrainerMesh(), (), CONFIGS[model]), 2, str(checkpoint)))
    with VllmHost(checkpoint, tmp_path, load_format="dummy", **options) as host:
        host.connect()
        args = (case, host.address, 1, str(tmp_path / "trained"))
        losses, parameters, answers = run_megatron(train_body, mesh.size, args=args, timeout_s=300)[0]
    assert losses[-1] < losses[0]
    (folder := tmp_path / "fresh").mkdir()
    with VllmHost(tmp_path / "trained", folder, **options) as host:
        fresh = host.connect()
        assert fresh.parameters() == parameters
        assert fresh.log_probabilities(PROMPTS) == answers


def test_rounding_to_the_engines_type_is_refused_unless_allowed(tmp_path: Path) -> None:
    """Then the engine has the bits of one that rounds a checkpoint in float32 while it loads."""
    checkpoint, options = tmp_path / "first", ENGINE_OPTIONS["nemotron_h"]
    run_megatron(export_body, 1, args=(Case(TrainerMesh(), (), NEMOTRON_H), 2, str(checkpoint)))
    with VllmHost(checkpoint, tmp_path, **options) as host:
        before = host.connect().parameters()
        args = (Case(TrainerMesh(etp=2), (), NEMOTRON_H), host.address, 1, str(tmp_path / "wide"))
        reason, parameters = run_megatron(narrowing_body, 2, args=args, timeout_s=180)[0]
    assert "is float32 in the trainer" in reason
    assert "makes bfloat16 of it (to bfloat16)" in reason
    assert parameters != before
    (folder := tmp_path / "fresh").mkdir()
    with VllmHost(tmp_path / "wide", folder, **options) as host:
        assert host.connect().parameters() == parameters
