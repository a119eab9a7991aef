"""``benchmarks.sweep``: which configurations it tries, what it keeps of its runs, and what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.long_run_training import Step
from benchmarks.refit import QWEN3_8B
from benchmarks.sweep.__main__ import main
from benchmarks.sweep.configurations import ParallelConfiguration, configurations, obstacle
from benchmarks.sweep.memory import Training
from benchmarks.sweep.model import Model, read_model
from benchmarks.sweep.report import best
from benchmarks.sweep.runs import Outcome, StateFile, Status, measured, why
from benchmarks.sweep.search import Question, Sweep, candidates
from benchmarks.sweep.step_time import Machine, step_seconds
from benchmarks.train_shapes import GIB
from megatron_patches.refit.checkpoints.hf_flags import model_flags
from megatron_patches.refit.errors import UnsupportedModelError
from tests.integration.tiny_models import DEEPSEEK_V3, LLAMA, QWEN2, QWEN3, QWEN3_MOE


def read(folder: Path, config: dict[str, object], sequence: int = 64) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder, sequence)


def test_configurations_are_all_that_nothing_forbids(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3_MOE)
    found = configurations(model, 4, 8, [1, 2], ranks_per_host=4)
    every = [
        ParallelConfiguration(
            gpus=4, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, expert_etp=expert_etp, micro_batch=batch, recompute=again
        )
        for tp, pp, cp, ep, etp, expert_etp in product((1, 2, 4), repeat=6)
        for batch, again in product((1, 2), (False, True))
        if 4 % (tp * pp * cp) == 0
    ]
    assert len(found) == len(set(found))
    assert set(found) == {parallel for parallel in every if not obstacle(model, parallel, 8)}
    assert any(parallel.etp == 2 and parallel.ep == 2 and parallel.expert_etp == 2 for parallel in found)
    for parallel in found:
        assert parallel.microbatches(8) * parallel.micro_batch * parallel.dp == 8
        assert parallel.replicas * parallel.etp * parallel.tp * parallel.pp == 4
    assert {parallel.tp for parallel in configurations(model, 4, 8, [1], ranks_per_host=1)} == {1}
    few = configurations(model, 4, 8, [1, 2], ranks_per_host=4, max_tokens=64)
    assert {(parallel.micro_batch, parallel.cp) for parallel in few} == {(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)}


@pytest.mark.parametrize(
    ("parallel", "reason"),
    [
        (ParallelConfiguration(gpus=4, tp=8), "4 GPUs do not divide by tp x pp x cp"),
        (ParallelConfiguration(gpus=4, etp=8), "etp 8 does not divide the data-parallel size 4"),
        (ParallelConfiguration(gpus=4, micro_batch=4), "a global batch of 8 does not divide by microbatch 4 x dp 4"),
        (ParallelConfiguration(gpus=8, pp=8), "4 layers do not divide over 8 stages"),
        (ParallelConfiguration(gpus=4, tp=4), "heads, KV heads or MLP do not divide by tp 4"),
        (ParallelConfiguration(gpus=4, ep=2), "0 experts do not divide by ep 2"),
        (ParallelConfiguration(gpus=4, tp=2, etp=2), ""),
    ],
    ids=str,
)
def test_what_cannot_run_is_told(tmp_path: Path, parallel: ParallelConfiguration, reason: str) -> None:
    assert obstacle(read(tmp_path, QWEN3), parallel, 8) == reason


def test_flags_say_what_the_configuration_and_the_model_are(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3_MOE)
    training = Training(8, grad_bytes=2, precision="fp8_block", transport="c10d")
    question = Question(model, training, 8, 1.0, [1])
    parallel = ParallelConfiguration(gpus=8, tp=2, ep=2, etp=2, expert_etp=4, micro_batch=2, recompute=True)
    command = question.command(parallel, ranks_per_host=8)
    assert command.startswith(
        "torchrun --nproc-per-node 8 -m megatron_patches examples/pretrain_gpt.py --num-layers 4 "
    )
    for flag in (
        "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --etp-size 2 --expert-etp-size 4",
        "--sequence-parallel --expert-tensor-parallel-size 1 --recompute-granularity full",
        "--micro-batch-size 2 --global-batch-size 8",
        "--grad-reduce-in-bf16 --etp-transport c10d --etp-prefetch-depth 1 --fp8-format e4m3 --fp8-recipe blockwise",
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64",
        "--moe-grouped-gemm",
        "--qk-layernorm",
        "--vocab-size 37",
    ):
        assert flag in command, flag
    assert "--nnodes 2 --rdzv-backend c10d" in question.command(parallel, ranks_per_host=4)
    plain = " ".join(replace(question, training=Training(8)).arguments(ParallelConfiguration(gpus=8), 8))
    assert not any(word in plain for word in ("etp", "parallel-size", "fp8", "reduce-in-bf16", "recompute"))


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3, QWEN3_MOE], ids=lambda config: str(config["model_type"]))
def test_flags_of_a_model_are_those_of_refit_flags(tmp_path: Path, config: dict[str, object]) -> None:
    flags = model_flags(config)
    assert read(tmp_path, config).flags[: len(flags)] == tuple(flags)


@pytest.mark.parametrize(
    ("changes", "sequence", "message"),
    [
        ({"sliding_window": 8}, 64, r"Megatron cannot build this LlamaForCausalLM: .*\(sliding_window 8\)"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, 64, "cannot build .* scaled by .*longrope"),
        ({}, 65, "--sequence is 65, and the model's max_position_embeddings is 64"),
    ],
)
def test_a_model_that_megatron_cannot_train_is_refused(
    tmp_path: Path, changes: dict[str, object], sequence: int, message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, LLAMA | changes, sequence)


@pytest.mark.parametrize(
    ("parallel", "spans"),
    [
        (ParallelConfiguration(gpus=16, etp=8), False),
        (ParallelConfiguration(gpus=16, etp=16), True),
        (ParallelConfiguration(gpus=16, tp=4, etp=4), True),
        (ParallelConfiguration(gpus=16, ep=8), False),
        (ParallelConfiguration(gpus=16, ep=8, expert_etp=2), True),
    ],
    ids=str,
)
def test_shards_that_span_hosts_do_not_ask_for_peer_copies(
    tmp_path: Path, parallel: ParallelConfiguration, *, spans: bool
) -> None:
    """``copy_engine`` is refused there; they are reckoned with what NCCL moves."""
    question = Question(read(tmp_path, QWEN3_MOE), Training(16), 16, 1.0, [1])
    assert ("--etp-transport auto" in question.command(parallel, ranks_per_host=8)) is spans
    assert "--etp-transport auto" not in question.command(parallel, ranks_per_host=16)
    near, far = (
        step_seconds(question.model, parallel, question.training, Machine(ranks_per_host=ranks)).hidden
        for ranks in (16, 8)
    )
    assert far > near or not spans


@pytest.mark.parametrize("on_cpu", [False, True])
def test_context_parallelism_is_for_gpus(tmp_path: Path, on_cpu: bool) -> None:
    question = Question(read(tmp_path, QWEN3), Training(8, transport="c10d"), 2, 1.0, [1, 2], on_cpu=on_cpu)
    assert {found.parallel.cp for found in candidates(question, Machine())} == ({1} if on_cpu else {1, 2})


# Runs ------------------------------------------------------------------------------------------------------------


def sweep(folder: Path, outcomes: Sequence[tuple[Status, float | None]], gpus: int = 2) -> tuple[Sweep, list[str]]:
    """A sweep whose runs end one after the other as told, and the list of those that it starts."""
    question = Question(read(folder, QWEN3), Training(8, transport="c10d"), gpus, 1.0, [1, 2], on_cpu=True)
    machine, started, left = Machine(), list[str](), list(outcomes)

    def start(command: str, arguments: Sequence[str], timeout_s: float) -> Outcome:
        assert command.endswith(" ".join(arguments))
        assert 0 < timeout_s <= 30
        started.append(command)
        status, seconds = left.pop(0)
        return Outcome(command, "cpu", status, seconds)

    state = StateFile(folder / "state.jsonl")
    said: list[str] = []
    return Sweep(question, machine, candidates(question, machine), state, "cpu", start, said.append), started


def test_runs_out_of_memory_do_not_end_a_sweep_and_a_rerun_goes_on(tmp_path: Path) -> None:
    first, started = sweep(tmp_path, [(Status.OUT_OF_MEMORY, None), (Status.OK, 0.5), (Status.FAILED, None)])
    first.run(3, 60.0, 30.0)
    assert len(set(started)) == 3
    fastest = best(first.candidates)
    assert fastest is not None
    assert fastest.command == started[1]
    # Calibrated on the run that ended well.
    assert fastest.seconds.total() == pytest.approx(0.5, rel=1e-6)
    again, restarted = sweep(tmp_path, [(Status.TIMEOUT, None)])
    again.run(4, 60.0, 30.0)
    assert len(restarted) == 1
    assert restarted[0] not in started
    assert [outcome.status for outcome in StateFile(tmp_path / "state.jsonl").outcomes] == [
        Status.OUT_OF_MEMORY, Status.OK, Status.FAILED, Status.TIMEOUT,
    ]  # fmt: skip
    assert again.machine == first.machine


def test_a_line_that_a_crash_has_cut_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    state = StateFile(path)
    state.add(Outcome("one", "cpu", Status.OK, 1.0))
    state.add(Outcome("two", "cpu", Status.OK, 2.0))
    path.write_bytes(path.read_bytes()[:-20])
    state = StateFile(path)
    assert state.known("one", "cpu") == Outcome("one", "cpu", Status.OK, 1.0)
    assert state.known("one", "NVIDIA H100") is None
    assert state.known("two", "cpu") is None
    state.add(Outcome("two", "cpu", Status.OK, 3.0))
    assert [outcome.seconds for outcome in StateFile(path).outcomes] == [1.0, 3.0]


@pytest.mark.parametrize("content", ['{"a": 1}\n', '{"a": 1}', "notes\nto keep", '{"command":\n{"command":', "{}\n{"])
def test_a_file_that_is_no_state_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(ValueError, match="is not the state of a sweep"):
        StateFile(path)
    assert path.read_text() == content


def test_time_that_is_over_ends_a_sweep(tmp_path: Path) -> None:
    begun, started = sweep(tmp_path, [])
    begun.run(3, 1e-9, 30.0)
    assert started == []
    assert best(begun.candidates) is None


def test_a_run_that_the_end_of_a_sweep_cuts_short_is_run_again(tmp_path: Path) -> None:
    cut, started = sweep(tmp_path, [(Status.TIMEOUT, None)])
    cut.run(3, 29.0, 30.0)
    assert len(started) == 1
    assert StateFile(tmp_path / "state.jsonl").outcomes == []
    again, restarted = sweep(tmp_path, [(Status.OK, 0.5)])
    again.run(1, 60.0, 30.0)
    assert restarted == started


def test_a_run_is_judged_by_its_slowest_and_its_fullest_rank() -> None:
    def steps(seconds: float, peak: int, symmetric: int) -> list[Step]:
        first = [Step(step, 1.0, 1.0, 100.0, 0, 9 * GIB, 0, 0, 0) for step in range(2)]
        return first + [Step(step, 1.0, 1.0, seconds + step % 2, 0, peak, 0, symmetric, 0) for step in range(2, 7)]

    found = measured("command", "cuda", [steps(1.0, GIB, 2 * GIB), steps(2.0, 2 * GIB, 0)])
    assert found == Outcome("command", "cuda", Status.OK, 2.0, 3.0)
    assert measured("command", "cpu", [steps(1.0, 0, 0)]).gib is None


@pytest.mark.parametrize(
    ("outputs", "error", "status", "reason"),
    [
        ("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\nRuntimeError: NCCL", "run: rank 1 ended with status 1",
         Status.OUT_OF_MEMORY, "a rank ran out of memory"),
        ("working", "run: ranks [0, 1] did not end within 5 s\nlast lines", Status.TIMEOUT,
         "ranks [0, 1] did not end within 5 s"),
        ("a\n[rank0]: ValueError: no such thing\n", "run: rank 0 ended with status 1\na", Status.FAILED,
         "ValueError: no such thing"),
        ("error: --etp-size 3 does not divide\n", "run: rank 0 ended with status 2", Status.FAILED,
         "error: --etp-size 3 does not divide"),
        ("quiet", "run: rank 0 ended with status -6\nquiet", Status.FAILED, "rank 0 ended with status -6"),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_one_line(outputs: str, error: str, status: Status, reason: str) -> None:
    assert why(outputs, error) == (status, reason)


# Refusals --------------------------------------------------------------------------------------------------------

PREDICT = ["--predict-only", "--memory-gib", "1"]


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"architectures": ["PigeonForCausalLM"]}, PREDICT, "the architecture is PigeonForCausalLM; known are"),
        (DEEPSEEK_V3, PREDICT, "has multi-latent attention, dense layers before its experts, shared experts"),
        (QWEN3, ["--gpus", "0", *PREDICT], "--gpus: 0 is not above 0"),
        (QWEN3, ["--gpus", "12", *PREDICT], "--gpus 12 is no multiple of --ranks-per-host 8"),
        (QWEN3, ["--gpus", "7", *PREDICT], "no parallel configuration of 7 GPUs can run: 4 layers, 2 KV heads and"),
        (QWEN3, ["--predict-only", "--memory-gib", "0.0001"], "fits 0.00 GiB (--memory-gib less --margin)"),
        (QWEN3, ["--predict-only"], "--memory-gib is needed with --predict-only and --cpu"),
        (QWEN3, ["--margin", "1", *PREDICT], "--margin is 1; it must be at least 0 and below 1"),
        (QWEN3, ["--cpu", "--etp-transport", "copy_engine", "--memory-gib", "1"], "copy_engine needs GPUs"),
        (QWEN3, ["--state", ".", *PREDICT], "--state: . cannot be written: name a file in a folder that is there"),
        (QWEN3, ["--state", "none/x", *PREDICT], "--state: none/x cannot be written"),
        (QWEN3, ["--json", "none/x.json", *PREDICT], "--json: none/x.json cannot be written"),
        (QWEN3, ["--plot", "none/x.png", *PREDICT], "--plot: none/x.png cannot be written"),
        (QWEN3, ["--plot", "x.pong", *PREDICT], "--plot x.pong: its suffix must be one of "),
        pytest.param(
            QWEN3, [], "this measures GPUs, and there is none",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told_first(
    tmp_path: Path, config: dict[str, object], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = ["--model", str(tmp_path), "--gpus", "2", "--sequence", "64", "--global-batch-size", "8"]
    with pytest.raises(SystemExit) as stopped:
        main([*start, "--state", str(tmp_path / "state.jsonl"), *arguments])
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.splitlines()[-1].startswith("python -m benchmarks.sweep: error: ")
    assert (stopped.value.code, said.out) == (2, "")


def test_a_prediction_fits_80_columns_and_ends_with_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    report = tmp_path / "sweep.json"
    start = ["--model", str(tmp_path), "--gpus", "2", "--sequence", "64", "--global-batch-size", "8"]
    assert main([*start, "--state", str(tmp_path / "state.jsonl"), "--json", str(report), *PREDICT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    content = json.loads(report.read_text())
    assert lines[-1] == content["configurations"][0]["command"]
    seconds = [one["predicted"]["total_s"] for one in content["configurations"]]
    assert seconds == pytest.approx(sorted(seconds), abs=1e-6)
    assert not (tmp_path / "state.jsonl").exists()


def test_page_shows_what_the_command_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = (Path(__file__).resolve().parents[2] / "docs" / "sweep.md").read_text()
    (arguments,) = re.findall(r"predicted \(`([^`]*)`\)", page.replace("\n", " "))
    (shown,) = re.findall(r"(?ms)^```text\n(.*?)^```", page)
    (tmp_path / "config.json").write_text(json.dumps(dict(QWEN3_8B)))
    start = ["--model", str(tmp_path), "--state", str(tmp_path / "state.jsonl")]
    assert main([*start, *arguments.split()]) == 0
    printed = capsys.readouterr().out.partition("\nfastest")[0]
    assert [line.rstrip() for line in printed.splitlines()] == shown.splitlines()
