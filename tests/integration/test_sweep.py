"""``benchmarks.sweep`` against real Megatron on the CPU: its memory model to the byte, and the command as it is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks.sweep.configurations import ParallelConfiguration
from benchmarks.sweep.memory import Training, resident
from benchmarks.sweep.model import read_model
from benchmarks.sweep.search import Question
from tests.integration.megatron_run import MegatronPool, train
from tests.integration.tiny_models import LLAMA, QWEN2, QWEN3, QWEN3_MOE

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.cpu_only("on GPUs, run benchmarks.sweep itself"),
]

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE, GLOBAL_BATCH = 64, 8


def count_body(rank: int, world_size: int, arguments: list[str]) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states on this rank after a step."""
    from megatron.training import training

    found: list[tuple[int, int, int]] = []
    train_step = training.train_step

    def counting_step(forward_step: Any, data: Any, model: list[Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = train_step(forward_step, data, model, optimizer, *args, **kwargs)
        parameters = [p for chunk in model for p in chunk.parameters()]
        found.append(
            (
                sum(p.nbytes for p in parameters),
                sum(p.main_grad.nbytes for p in parameters),
                sum(map(_state_bytes, getattr(optimizer, "chained_optimizers", [optimizer]))),
            )
        )
        return result

    with mock.patch.object(training, "train_step", counting_step):
        train(rank, world_size, arguments)
    return found[-1]


def _state_bytes(optimizer: Any) -> int:
    """Of one of Megatron's optimizers: main weights, and both moments of each."""
    inner = optimizer.optimizer
    main = [p for group in inner.param_groups for p in group["params"]]
    moments = [inner.state[p][name] for p in main for name in ("exp_avg", "exp_avg_sq")]
    return sum(tensor.nbytes for tensor in [*main, *moments])


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (QWEN3, ParallelConfiguration(gpus=2, etp=2)),
        (QWEN2, ParallelConfiguration(gpus=2, tp=2)),
        (LLAMA, ParallelConfiguration(gpus=2, pp=2)),  # tied: the last stage has an embedding too
        (LLAMA, ParallelConfiguration(gpus=4, etp=2)),
        (QWEN3_MOE, ParallelConfiguration(gpus=4, tp=2, ep=2, etp=2)),
        (QWEN3_MOE, ParallelConfiguration(gpus=4, ep=2, etp=4, expert_etp=2)),
    ],
    ids=lambda value: str(value) if isinstance(value, ParallelConfiguration) else value["model_type"],
)
def test_bytes_are_those_of_megatron(
    megatron: MegatronPool, tmp_path: Path, config: dict[str, object], parallel: ParallelConfiguration
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, training = read_model(tmp_path, SEQUENCE), Training(GLOBAL_BATCH, transport="c10d")
    arguments = Question(model, training, parallel.gpus, 1.0, [1], on_cpu=True).arguments(parallel, 8)
    arguments[arguments.index("--train-iters") + 1] = "1"
    counted = megatron.run(count_body, parallel.gpus, 240.0, (arguments,))
    of_stage = parallel.gpus // parallel.pp
    expected = [resident(model, parallel, rank // of_stage, training) for rank in range(parallel.gpus)]
    assert [found[:2] for found in counted] == [(sizes["weights"], sizes["gradients"]) for sizes in expected]
    # A rank's part of the states begins and ends anywhere; what all have together is known.
    assert sum(found[2] for found in counted) == sum(sizes["optimizer"] for sizes in expected)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_runs_the_best_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    state = tmp_path / "sweep.jsonl"
    command = [sys.executable, "-m", "benchmarks.sweep", "--model", str(tmp_path), "--gpus", "2", "--cpu"]
    command += ["--sequence", "64", "--global-batch-size", "4", "--micro-batch-sizes", "2", "--memory-gib", "0.02"]
    command += ["--state", str(state), "--json", str(tmp_path / "sweep.json"), "--plot", str(tmp_path / "sweep.png")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    outputs = []
    for top in ("1", "2"):
        done = subprocess.run(
            [*command, "--top", top],
            check=False,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    assert [text.count("\nrun ") for text in outputs] == [1, 1]  # the second sweep ran only what was missing
    lines = [json.loads(line) for line in state.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "ok"]
    assert all(line["seconds"] > 0 for line in lines)
    assert max(len(line) for line in outputs[1].partition("\nfastest")[0].splitlines()) <= 80
    best = min(lines, key=lambda line: line["seconds"])
    assert outputs[1].splitlines()[-1] == best["command"]
    shown = json.loads((tmp_path / "sweep.json").read_text())["configurations"]
    measured = [one for one in shown if one["measured"] is not None]
    assert {one["command"] for one in measured} == {line["command"] for line in lines}
    # The first run says how fast arithmetic is, so that its own prediction is exact.
    first = next(one for one in measured if one["command"] == lines[0]["command"])
    assert first["predicted"]["total_s"] == pytest.approx(first["measured"]["seconds"], rel=1e-3)
    assert (tmp_path / "sweep.png").stat().st_size > 1000
