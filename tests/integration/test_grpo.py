"""``make grpo``, in a shorter form, and what ends it: each with one line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.grpo import sums
from examples.grpo.__main__ import LENGTH, MODEL, SEED, engines

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40


def run(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )


def steps_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def rewards(step: dict[str, Any]) -> float:
    return sum(sample["reward"] for sample in step["samples"]) / len(step["samples"])


def test_reward_rises_with_pushes_and_without_them_it_does_not(tmp_path: Path) -> None:
    done = run("-m", "examples.grpo", "--output", str(tmp_path), "--steps", str(STEPS), "--ranks", "2", "--stale")
    assert done.returncode == 0, done.stdout + done.stderr
    with_pushes, without = steps_of(tmp_path / "grpo.jsonl"), steps_of(tmp_path / "stale.jsonl")
    assert [step["step"] for step in with_pushes] == list(range(STEPS))
    first, last = rewards(with_pushes[0]), sum(map(rewards, with_pushes[-5:])) / 5
    assert first < 0.45  # pretraining ends a little differently on each kind of processor
    assert last > 0.8
    assert sum(map(rewards, without[-5:])) / 5 < 0.5
    # Every sample says who wrote it: the weights that it then trains.
    for step in with_pushes:
        assert {tuple(sample["versions"]) for sample in step["samples"]} == {(step["step"],)}
    assert {tuple(sample["versions"]) for step in without for sample in step["samples"]} == {(0,)}
    assert (tmp_path / "grpo.png").stat().st_size > 10_000
    grown, rounding = (
        float(line.split("\u2502")[-2].split(",")[1])
        for line in reversed(done.stdout.splitlines())
        if "median, largest, last" in line
    )
    assert rounding < 1e-5
    assert grown > 1e-2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with engines(tmp_path_factory.mktemp("grpo") / "vllm", 1) as started:
        yield started.urls[0]


def failing(folder: Path, url: Sequence[str], *more: str, prompt: str = "\n1+1=") -> str:
    """The line with which a training ends that must not go on."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": prompt, "answer": "2"}))
    flags = (
        f"{MODEL} --seq-length {LENGTH} --micro-batch-size 8 --global-batch-size 8 --lr 1e-3 --train-iters 2 "
        f"--dataloader-type external --refit-wait --refit-timeout 120 --grpo-tokens 6 --grpo-prompts {prompts}"
    )
    engine = ["--refit-engines", *url] if url else []
    done = run(
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "megatron_patches"],
        "examples/grpo/train.py",
        *flags.split(),
        *engine,
        *more,
    )
    assert done.returncode != 0
    lines = [line.removeprefix("megatron_patches: ") for line in done.stderr.splitlines()]
    (told,) = [line for line in lines if line.startswith("error: ")]
    return told.removeprefix("error: ")


def test_a_training_without_an_engine_does_not_begin(tmp_path: Path) -> None:
    assert failing(tmp_path, []) == "no engine to ask: give --refit-engines"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"prompt": "1+1=" * 20}, "refused a request with 400: "),
        ({"more": ["--grpo-reward", "operator:truediv"]}, "the reward raised TypeError: "),
        ({"more": ["--num-attention-heads", "2"]}, "num_attention_heads"),
        ({"more": ["--seq-length", "8"]}, "--seq-length is 8, which takes 9; make it longer"),
    ],
)
def test_what_cannot_go_well_ends_the_training_with_one_line_and_the_server_goes_on(
    tmp_path: Path, server: str, how: dict[str, Any], message: str
) -> None:
    more = how.pop("more", [])
    assert message in failing(tmp_path, [server], *more, **how)
    # The next of these tests finds it well.


def test_the_problems_are_sums_and_the_sheet_has_them_all() -> None:
    asked, held_out = sums.split(SEED)
    assert len({*asked, *held_out}) == len(asked) + len(held_out) == 36
    lines = sums.sheet(5000, SEED).decode().split()
    assert {f"{a}+{b}={a + b}" for a in range(1, 7) for b in range(1, 7)} == set(lines)
