"""Real Megatron trainings with Transformer Engine's layers and sharded weights follow those without, on CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import te_on_cpu, test_checkpoints
from tests.integration.cases import (
    CASES,
    FP8_MODEL,
    MOE,
    ONE_MICROBATCH,
    UNFUSED_ACCUMULATION,
    Case,
)
from tests.integration.megatron_run import MegatronPool, Trajectory
from tests.support.prepared import megatron_with_te_on_cpu
from tests.support.te_site import MARKS, SHARED, on_path

pytestmark = [
    pytest.mark.integration,
    pytest.mark.multiproc,
    pytest.mark.cpu_only("test_trajectories.py and test_checkpoints.py run with Transformer Engine's layers on GPUs"),
    *MARKS,
]

STEPS = 3
# The first loss of a resumed training depends on the weights alone, the second one on the optimizer's state as well.
SAVED_STEP, RESUMED_STEPS = 2, 4
SHORT = f"--transformer-impl transformer_engine --train-iters {STEPS} --eval-iters 1"
LONGER = ("--train-iters", str(RESUMED_STEPS))
DENSE = {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "VocabParallelEmbedding", "ColumnParallelLinear"}
GROUPED = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
# Two sharded layers of each kind in every case; what differs is who else works on their weights and gradients.
CHOSEN = {
    "etp2_selective_recompute_exact": DENSE,
    "etp2_fused_accumulation": DENSE,
    "etp2_tied_fused_accumulation": DENSE - {"ColumnParallelLinear"},
    "moe_etp2_expert_etp2_recomputed": DENSE | GROUPED,
    "tp2_etp2_sequence": DENSE,
    "dp2_etp2_fused_accumulation": DENSE,
    "fp8_blockwise_overlapped": DENSE,
    "fp8_blockwise_ends_in_bf16": DENSE,
    "fp8_blockwise_experts": DENSE | GROUPED,
    "fp8_blockwise_experts_ep2": DENSE | GROUPED,
    "fp8_blockwise_experts_routed_padded": DENSE | GROUPED,
    "fp8_blockwise_tp2": DENSE,
    "fp8_blockwise_stages": DENSE,
    "fp8_blockwise_accumulated": DENSE,
    "fp8_blockwise_vpp": DENSE,
}


ENDS = "--first-last-layers-bf16 --num-layers-at-start-in-bf16 2"
MXFP8, NVFP4 = "--fp8-format e4m3 --fp8-recipe mxfp8", "--fp4-format e2m1"
APART = [
    Case(
        name,
        2,
        sharded,
        model=FP8_MODEL,
        common=f"{precision} {ONE_MICROBATCH} {common}",
        tolerance=0.0,
    )
    for name, precision, sharded, common in (
        (
            "mxfp8_overlapped",
            MXFP8,
            "--etp-size 2",
            f"--use-distributed-optimizer --overlap-grad-reduce {ENDS} --num-layers-at-end-in-bf16 0",
        ),
        ("nvfp4_experts", NVFP4, "--etp-size 2 --expert-etp-size 2", f"{MOE} {ENDS}"),
    )
]
"""In formats that no GPU of the tests can multiply."""


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronPool]:
    """Processes that find Transformer Engine and see no GPU missing."""
    pool = MegatronPool(megatron_with_te_on_cpu)
    with on_path(tmp_path_factory.mktemp("site")):
        yield pool
    pool.close()


def train(megatron: MegatronPool, case: Case, *flags: str) -> tuple[list[Trajectory], set[str]]:
    arguments = (*case.stock_arguments, *SHORT.split(), *flags)
    arguments += ("--moe-grouped-gemm",) if MOE in case.common else ()
    answers = megatron.run(te_on_cpu.train, case.ranks, 240.0, (arguments, str(SHARED), case.script))
    return [trajectory for trajectory, _ in answers], set.union(*(classes for _, classes in answers))


@pytest.mark.parametrize("case", [*(case for case in CASES if case.name in CHOSEN), *APART], ids=lambda case: case.name)
def test_sharded_training_follows_stock(megatron: MegatronPool, case: Case) -> None:
    stock, none = train(megatron, case, UNFUSED_ACCUMULATION)
    accumulation = () if case.fused_accumulation else (UNFUSED_ACCUMULATION,)
    sharded, classes = train(megatron, case, *accumulation, *case.sharded.split())
    assert not none
    assert classes == CHOSEN.get(case.name, DENSE | GROUPED if MOE in case.common else DENSE)
    # Of a pipeline, only the last stage has losses.
    assert {len(expected.losses) for expected in stock} in ({STEPS}, {0, STEPS})
    for expected, found in zip(stock, sharded, strict=True):
        assert len(expected.grad_norms) == STEPS
        assert found.losses == pytest.approx(expected.losses, rel=case.tolerance, abs=0.0)
        assert found.grad_norms == pytest.approx(expected.grad_norms, rel=case.norm_tolerance, abs=0.0)


@pytest.mark.timeout(600)
def test_grouped_experts_are_loaded_at_other_sizes(megatron: MegatronPool, tmp_path: Path) -> None:
    schedule = test_checkpoints.SCHEDULE
    common = f"{schedule} --transformer-impl transformer_engine {UNFUSED_ACCUMULATION} --moe-grouped-gemm"
    common += f" {test_checkpoints.MOE} {test_checkpoints.DISTRIBUTED}"
    ep2, pad = test_checkpoints.EP2, test_checkpoints.PAD
    step = test_checkpoints.SAVED_STEP

    def losses(flags: str) -> list[float]:
        arguments = tuple(f"{common} {flags}".split())
        return megatron.run(te_on_cpu.train, 4, 280.0, (arguments, str(SHARED)))[-1][0].losses

    saved = losses(f"--etp-size 2 --expert-etp-size 2 {ep2} {pad} --save {tmp_path} --save-interval {step}")
    assert len(saved) == test_checkpoints.STEPS
    for flags in (ep2, f"--expert-etp-size 4 {pad}"):
        loaded = losses(f"{flags} --load {tmp_path} --ckpt-step {step}")
        assert loaded == pytest.approx(saved[step:], rel=test_checkpoints.FP32_TOLERANCE, abs=0.0)


def test_a_training_in_fp8_resumes_at_other_sizes_and_in_another_precision(
    megatron: MegatronPool, tmp_path: Path
) -> None:
    """Checkpoints know nothing of formats."""
    (case,) = [case for case in CASES if case.name == "fp8_blockwise_overlapped"]
    saved, _ = train(megatron, case, UNFUSED_ACCUMULATION, *case.sharded.split(), *_saving(tmp_path))
    loading = (*LONGER, UNFUSED_ACCUMULATION, "--load", str(tmp_path), "--ckpt-step", str(SAVED_STEP))
    for flags in (case.sharded.split(), ()):
        loaded, _ = train(megatron, case, *loading, *flags)
        for before, after in zip(saved, loaded, strict=True):
            assert len(before.losses) == RESUMED_STEPS
            assert after.losses == before.losses[SAVED_STEP:]
    in_fp32 = dataclasses.replace(case, common=case.common.replace("--fp8-format e4m3 --fp8-recipe blockwise", ""))
    for after in train(megatron, in_fp32, *loading, *case.sharded.split())[0]:
        # Weights of three bits, and weights as they are.
        assert after.losses[0] == pytest.approx(saved[0].losses[SAVED_STEP], rel=0.05)
        assert after.losses[0] != saved[0].losses[SAVED_STEP]


def _saving(folder: Path) -> tuple[str, ...]:
    return (*LONGER, "--save", str(folder), "--save-interval", str(SAVED_STEP))
