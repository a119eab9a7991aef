"""Real Megatron trainings that start from an exported model: their losses, and how they resume or end."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from unittest import mock

import pytest

from megatron_patches import command_line
from tests.integration.cases import BF16_TOLERANCE, LLAMA, SCHEDULE
from tests.integration.megatron_run import MegatronPool, Trajectory, train
from tests.support.program import run_program

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.cpu_only("the export runs on the CPU"),
]

STEPS = 3
BASE = (
    f"{LLAMA} {SCHEDULE} --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--ckpt-format torch_dist --no-save-rng --no-load-rng --override-opt-param-scheduler"
)
SHARDED = "--etp-size 2"


@pytest.fixture(scope="module")
def trained(megatron: MegatronPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint of a short training, and the same weights as Hugging Face has them."""
    folder = tmp_path_factory.mktemp("trained")
    saved, exported = folder / "saved", folder / "exported"
    megatron.train(2, f"{BASE} {SHARDED} --train-iters 2 --save {saved} --save-interval 2".split())
    where = ["--load", str(saved), "--output", str(exported)]
    run_program("-m", "megatron_patches.refit", "export", *where, "--max-shard-size", "100KB").check_returncode()
    return saved, exported


def last(trajectories: list[Trajectory]) -> list[float]:
    """Losses, as the last stage saw them."""
    return trajectories[-1].losses


def test_a_run_from_the_export_is_the_run_from_the_checkpoint(
    megatron: MegatronPool, trained: tuple[Path, Path]
) -> None:
    saved, exported = trained
    from_hf = f"--train-iters {STEPS} --init-method-std 0.5 --load-hf {exported}"
    continued = megatron.train(2, f"{BASE} {SHARDED} --train-iters {STEPS} --load {saved} --finetune".split())
    started = megatron.train(2, f"{BASE} {SHARDED} {from_hf}".split())
    spread = megatron.train(2, f"{BASE} --tensor-model-parallel-size 2 {from_hf}".split())
    assert len(last(started)) == STEPS
    assert last(started) == last(continued)
    assert last(spread) == pytest.approx(last(continued), rel=BF16_TOLERANCE)
    assert "load-hf: read, 0.1 MB on this rank\nload-hf: verify, 0.1 MB on this rank\n" in started[0].log
    assert "load-hf: LlamaForCausalLM, 21 tensors of 0.2 MB in" in started[0].log
    assert "were converted" not in started[0].log
    assert "load-hf" not in continued[0].log


def test_a_checkpoint_in_load_is_preferred(megatron: MegatronPool, trained: tuple[Path, Path], tmp_path: Path) -> None:
    saved, exported = trained
    flags = f"{BASE} {SHARDED} --train-iters {STEPS} --load-hf {exported}"
    resumed = megatron.train(2, f"{flags} --load {saved}".split())
    assert len(last(resumed)) == STEPS - 2
    assert f"load-hf: the run continues from the checkpoint in --load {saved}; {exported} is not read" in resumed[0].log
    first = megatron.train(2, f"{flags} --load {tmp_path} --save {tmp_path} --save-interval {STEPS}".split())
    assert len(last(first)) == STEPS
    assert f"load-hf: --load {tmp_path} has no checkpoint; the weights come from {exported}" in first[0].log


def ends(rank: int, world_size: int, arguments: tuple[str, ...]) -> tuple[object, str]:
    """How a training ends that must not begin: status, and what stderr says."""
    errors = io.StringIO()
    with (
        mock.patch.object(command_line, "RANK_0_HEAD_START_S", 0.0),  # nothing here ends one rank when another ends
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        train(rank, world_size, arguments)
    return ended.value.code, errors.getvalue()


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        ("--norm-epsilon 1e-6", 1, "rms_norm_eps is 1e-05 in config.json and 1e-06 in this run"),
        ("--vocab-size 252", 1, "vocab_size is 250 in config.json, and the run's tokenizer has 252 tokens"),
        (
            "--load-hf /nowhere",
            2,
            "--load-hf /nowhere has no config.json; name the folder of a Hugging Face checkpoint",
        ),
        ("--load-hf /nowhere --load {0} --save {0}", 2, "--load-hf /nowhere has no config.json"),
        ("--moe-use-upcycling", 2, "--load-hf does not work with --moe-use-upcycling, which needs other weights"),
    ],
)
def test_what_does_not_fit_ends_the_run_with_one_line(
    megatron: MegatronPool, trained: tuple[Path, Path], tmp_path: Path, flags: str, status: int, message: str
) -> None:
    arguments = tuple(f"{BASE} --load-hf {trained[1]} {flags.format(tmp_path)}".split())
    (code, errors), _ = megatron.run(ends, 2, 240.0, (arguments,))
    assert code == status
    (line,) = [line for line in errors.splitlines() if "error: " in line]
    assert message in line
