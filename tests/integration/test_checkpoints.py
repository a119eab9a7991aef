"""Checkpoints saved at one (TP, ETP, PP, DP) and loaded at others, with real Megatron trainings."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import checkpoint_runs
from tests.integration.cases import GPU, UNFUSED_ACCUMULATION
from tests.integration.checkpoint_runs import Run
from tests.integration.megatron_run import PRETRAIN_DELTA_RULE, MegatronPool
from tests.integration.whole_state import as_stored
from tests.support.launch import on_gpus

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

RANKS = 4
TRACKER = "latest_checkpointed_iteration.txt"
SAVED_STEP = 3
STEPS = 6

# 24 hidden rows over 4 shards of a multiple of 4 rows: the last shard of two of the four weights is all padding.
# 72 rows of gate and up over shards of 20: one shard has rows of both.
LLAMA = (
    "--num-layers 4 --hidden-size 24 --ffn-hidden-size 36 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --seq-length 16 --max-position-embeddings 16 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --untie-embeddings-and-output-weights --vocab-size 100 "
    "--make-vocab-size-divisible-by 2 --attention-dropout 0 --hidden-dropout 0"
)
# In each layer the first weight is six matrices on top of each other, 72 rows over two shards of 40.
DELTA_RULE = (
    f"{LLAMA} --experimental-attention-variant gated_delta_net --linear-attention-freq [1]*4 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 5 --linear-conv-kernel-dim 3"
)
TIED = LLAMA.replace("--untie-embeddings-and-output-weights ", "")
MOE = (
    f"{LLAMA} --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
SCHEDULE = (
    "--mock-data --no-create-attention-mask-in-dataloader --micro-batch-size 1 --global-batch-size 8 --lr 5e-3 "
    f"--lr-decay-style constant --train-iters {STEPS} --log-interval 1000 --eval-iters 0 --eval-interval 1000 "
    "--ckpt-format torch_dist --no-save-rng --no-load-rng"
    f"{f' {GPU} {UNFUSED_ACCUMULATION}' if on_gpus() else ''}"
)
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
MUON = "--optimizer muon --muon-fp32-matmul-prec high"
PAD = "--etp-pad-for-alignment 4"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"

FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 5e-3


@dataclass(frozen=True)
class Case:
    """One checkpoint and the runs that load it.

    Attributes:
        name: what it covers.
        model: the model's flags.
        common: flags of all runs.
        saved: flags of the run that saves.
        loaded: flags of each run that loads.
        tolerance: relative, on the losses after the load; on GPUs all runs are in bf16.
        ranks: processes of all runs.
        needs: a package without which Megatron cannot run the case; empty for none.
        needs_gpus: whether Megatron refuses the case on a CPU.
    """

    name: str
    saved: str
    loaded: tuple[str, ...]
    model: str = LLAMA
    common: str = ""
    tolerance: float = BF16_TOLERANCE if on_gpus() else FP32_TOLERANCE
    ranks: int = RANKS
    needs: str = ""
    needs_gpus: bool = False


CASES = (
    Case("from_etp2", f"--etp-size 2 {PAD}", ("", TP2, f"--etp-size 2 {PAD}"), common=DISTRIBUTED, ranks=2),
    Case("from_etp4", f"--etp-size 4 {PAD}", ("", f"--etp-size 2 {TP2}", f"--etp-size 2 {PP2} {PAD}")),
    Case("from_stock", f"{TP2}", (f"--etp-size 4 {PAD}", f"--etp-size 2 {PAD}")),
    Case(
        "from_tp2_etp2_distributed",
        f"--etp-size 2 {TP2} {PAD}",
        ("", f"--etp-size 4 {PAD}", "--etp-size 2"),
        common=DISTRIBUTED,
    ),
    Case(
        "from_dp2_etp2_distributed_parallel_files",
        f"--etp-size 2 {PAD}",
        (f"--etp-size 2 {PP2}", f"--etp-size 4 {PAD}", "--etp-size 2"),
        common=f"{DISTRIBUTED} --ckpt-fully-parallel-load",
    ),
    Case(
        "from_pp2_etp2_tied_bf16",
        f"--etp-size 2 {PP2} {PAD}",
        (f"--etp-size 4 {PAD}", TP2),
        model=TIED,
        common="--bf16",
        tolerance=BF16_TOLERANCE,
    ),
    Case(
        "from_etp4_tied_bf16_distributed",
        f"--etp-size 4 {PAD}",
        (f"--etp-size 2 {PP2} {PAD}",),
        model=TIED,
        common=f"--bf16 {DISTRIBUTED}",
        tolerance=BF16_TOLERANCE,
    ),
    # Buckets of gradients end with padding.
    Case(
        "from_dp2_etp2_distributed_buckets",
        f"--etp-size 2 {PAD}",
        ("", f"--etp-size 2 {PAD}"),
        common=f"{DISTRIBUTED} --overlap-grad-reduce --ddp-bucket-size 2000",
    ),
    Case(
        "from_moe_ep2_distributed",
        f"--etp-size 2 --expert-etp-size 2 {EP2} {PAD}",
        (EP2, f"--etp-size 4 {EP4}", f"--expert-etp-size 4 {PAD}"),
        model=MOE,
        common=DISTRIBUTED,
    ),
    Case("from_moe_ep2", f"--etp-size 2 --expert-etp-size 2 {EP2} {PAD}", (f"--expert-etp-size 4 {PAD}",), model=MOE),
    # Experts that are parallel in no way share the optimizer of the dense weights.
    Case(
        "from_moe_ep2_distributed_to_no_expert_parallelism",
        f"--etp-size 2 --expert-etp-size 2 {EP2} {PAD}",
        ("", PP2),
        model=MOE,
        common=f"{DISTRIBUTED} --ckpt-fully-parallel-load",
    ),
    Case(
        "from_moe_distributed_to_expert_parallelism",
        "",
        (f"--etp-size 2 --expert-etp-size 2 {EP2} {PAD}", f"--expert-etp-size 4 {PAD}"),
        model=MOE,
        common=DISTRIBUTED,
    ),
    Case(
        "from_etp2_muon",
        f"--etp-size 2 {PAD}",
        ("", f"--etp-size 2 {PAD}"),
        common=MUON,
        ranks=2,
        needs="emerging_optimizers",
    ),
    Case(
        "from_etp2_lion",
        f"--etp-size 2 {PAD}",
        ("", f"--etp-size 2 {PAD}"),
        common="--optimizer lion",
        ranks=2,
        needs="emerging_optimizers",
    ),
    Case(
        "from_etp2_distributed_async",
        f"--etp-size 2 {PAD} --async-save --use-persistent-ckpt-worker --async-strategy mcore",
        (f"--etp-size 2 {PAD}", ""),
        common=DISTRIBUTED,
        ranks=2,
        needs_gpus=True,
    ),
    Case("from_etp2_sgd", f"--etp-size 2 {PAD}", ("", f"--etp-size 2 {PAD}"), common="--optimizer sgd", ranks=2),
    Case("from_moe_ep2_to_no_expert_parallelism", f"--etp-size 2 {EP2} {PAD}", ("",), model=MOE),
    Case(
        "from_moe_bf16_to_expert_parallelism",
        "",
        (f"--etp-size 4 --expert-etp-size 2 {EP2} {PAD}",),
        model=MOE,
        common="--bf16",
        tolerance=BF16_TOLERANCE,
    ),
)


def _run(megatron: MegatronPool, *flags: str, ranks: int = RANKS) -> Run:
    arguments = tuple(f"{SCHEDULE} {' '.join(flags)}".split())
    found = megatron.run(checkpoint_runs.run, ranks, 280.0, (arguments,))[-1]
    assert found is not None
    return found


def _save(megatron: MegatronPool, folder: Path, *flags: str, ranks: int = RANKS) -> Run:
    return _run(megatron, *flags, f"--save {folder} --save-interval {SAVED_STEP}", ranks=ranks)


def _stored(megatron: MegatronPool, folder: Path) -> dict[str, torch.Tensor]:
    packed = megatron.run(checkpoint_runs.stored, 1, 120.0, (str(folder / f"iter_{SAVED_STEP:07d}"),))[0]
    return checkpoint_runs.unpack(packed)


def _check_equal(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.ranks}ranks-{case.name}")
def test_a_checkpoint_is_loaded_at_other_sizes(megatron: MegatronPool, tmp_path: Path, case: Case) -> None:
    if case.needs:
        pytest.importorskip(case.needs)
    if case.needs_gpus and not on_gpus():
        pytest.skip("runs on GPUs with --device cuda")
    saved = _save(megatron, tmp_path, case.model, case.common, case.saved, ranks=case.ranks)
    assert len(saved.losses) == STEPS
    assert saved.padding_is_zero

    stored = _stored(megatron, tmp_path)
    held = as_stored(saved.state, local_layers=not on_gpus())
    _check_equal({key: stored[key] for key in held}, held)
    masters = {key for key in stored if key.startswith(("optimizer.state.param.", "optimizer.state.fp32_param."))}
    assert stored.keys() - held.keys() == masters

    for flags in case.loaded:
        load = f"--load {tmp_path} --ckpt-step {SAVED_STEP}"
        loaded = _run(megatron, case.model, case.common, flags, load, ranks=case.ranks)
        _check_equal(loaded.state, saved.state)
        assert loaded.padding_is_zero
        assert loaded.losses == pytest.approx(saved.losses[SAVED_STEP:], rel=case.tolerance, abs=0.0), flags


def test_a_sharded_checkpoint_has_the_tensors_of_a_stock_one(megatron: MegatronPool, tmp_path: Path) -> None:
    descriptions = []
    for name, flags in (("stock", ""), ("sharded", f"--etp-size 4 {PAD}")):
        _save(megatron, tmp_path / name, LLAMA, DISTRIBUTED, flags)
        stored = _stored(megatron, tmp_path / name)
        descriptions.append({key: (tuple(tensor.shape), tensor.dtype) for key, tensor in stored.items()})
    assert descriptions[0] == descriptions[1]
    assert descriptions[0]["decoder.layers.mlp.linear_fc1.weight"] == (
        (4, 72, 24),
        torch.bfloat16 if on_gpus() else torch.float32,
    )


@pytest.mark.skipif(on_gpus(), reason="its script is for a CPU")
def test_layers_of_the_gated_delta_rule_are_loaded_at_other_sizes(megatron: MegatronPool, tmp_path: Path) -> None:
    def losses(*flags: str) -> list[float]:
        arguments = tuple(f"{SCHEDULE} {DELTA_RULE} {' '.join(flags)}".split())
        return megatron.train(2, arguments, PRETRAIN_DELTA_RULE)[-1].losses

    sharded = "--etp-size 2 --etp-pad-for-alignment 8"
    for name, saved, loaded in (("stock", TP2, sharded), ("sharded", sharded, TP2)):
        folder = tmp_path / name
        before = losses(saved, f"--save {folder} --save-interval {SAVED_STEP}")
        assert len(before) == STEPS
        after = losses(loaded, f"--load {folder} --ckpt-step {SAVED_STEP}")
        assert after == pytest.approx(before[SAVED_STEP:], rel=FP32_TOLERANCE, abs=0.0), name


@pytest.mark.parametrize(
    ("layers", "dtype", "optimizer"),
    [
        ("[0]*2+[1]*2", "", ""),
        ("[0]*2+[1]*2", "--bf16", ""),
        ("[1]*2+[0]*2", "--bf16", ""),
        ("[0]*2+[1]*2", "", DISTRIBUTED),
        ("[1]*2+[0]*2", "--bf16", DISTRIBUTED),
    ],
)
def test_experts_on_one_stage_alone_are_loaded(
    megatron: MegatronPool, tmp_path: Path, layers: str, dtype: str, optimizer: str
) -> None:
    """The first stage writes for all what is no tensor. On one of the stages, an optimizer has nothing to step."""
    model = f"{MOE} --moe-layer-freq {layers} {dtype} {optimizer}"
    sharded = f"--etp-size 2 --expert-etp-size 2 {PP2} {PAD}"
    saved = _save(megatron, tmp_path, model, sharded)
    for flags in (sharded, f"--etp-size 4 {EP2} {PAD}", f"{PP2} {EP2}"):
        loaded = _run(megatron, model, flags, f"--load {tmp_path} --ckpt-step {SAVED_STEP}")
        tolerance = BF16_TOLERANCE if dtype or on_gpus() else FP32_TOLERANCE
        assert loaded.losses == pytest.approx(saved.losses[SAVED_STEP:], rel=tolerance, abs=0.0), flags


@pytest.mark.parametrize("dtype", ["", "--bf16"])
def test_experts_on_one_stage_alone_get_an_optimizer_of_their_own(
    megatron: MegatronPool, tmp_path: Path, dtype: str
) -> None:
    """SGD has no steps, so the optimizer of experts has nothing to load on a stage without experts."""
    model = f"{MOE} --moe-layer-freq [0]*2+[1]*2 {dtype} --optimizer sgd {PP2}"
    saved = _save(megatron, tmp_path, model)
    sharded = f"--etp-size 2 --expert-etp-size 2 {PAD}"
    loaded = _run(megatron, model, sharded, f"--load {tmp_path} --ckpt-step {SAVED_STEP}")
    tolerance = BF16_TOLERANCE if dtype or on_gpus() else FP32_TOLERANCE
    assert loaded.losses == pytest.approx(saved.losses[SAVED_STEP:], rel=tolerance, abs=0.0)


@pytest.mark.cpu_only("GPUs have another Adam")
@pytest.mark.parametrize("dtype", ["", "--bf16"])
def test_without_shards_megatrons_default_layout_is_loaded(megatron: MegatronPool, tmp_path: Path, dtype: str) -> None:
    """The layout contains no steps; those of torch's Adam continue from the checkpoint's."""
    common = f"{MOE} --use-distributed-optimizer {dtype}"
    saved = _save(megatron, tmp_path, common, ranks=2)
    loaded = _run(megatron, common, f"--load {tmp_path} --ckpt-step {SAVED_STEP}", ranks=2)
    assert len(loaded.losses) == STEPS - SAVED_STEP
    assert loaded.losses == saved.losses[SAVED_STEP:]


@pytest.mark.quick
@pytest.mark.cpu_only("GPUs have a random state that no data loader draws from")
def test_a_resumed_run_continues_with_the_same_random_numbers(megatron: MegatronPool, tmp_path: Path) -> None:
    model = LLAMA.replace("--hidden-dropout 0", "--hidden-dropout 0.1")
    schedule = SCHEDULE.replace("--no-save-rng --no-load-rng", "")

    def losses(flags: str) -> list[float]:
        return megatron.train(2, tuple(f"{schedule} {model} --etp-size 2 {PAD} {flags}".split()))[-1].losses

    before = losses(f"--save {tmp_path} --save-interval {SAVED_STEP}")
    assert losses(f"--load {tmp_path} --ckpt-step {SAVED_STEP}") == before[SAVED_STEP:]


def test_a_vocabulary_padded_by_megatron_changes_its_padding(megatron: MegatronPool, tmp_path: Path) -> None:
    """101 words make 102 rows without tensor parallelism and 104 with 2 ranks of it; Megatron's rows, not shards'."""
    model = LLAMA.replace("--vocab-size 100", "--vocab-size 101")
    saved = _save(megatron, tmp_path, model, f"--etp-size 4 {PAD}")
    loaded = _run(megatron, model, f"--etp-size 2 {TP2}", f"--load {tmp_path} --ckpt-step {SAVED_STEP}")
    for key, tensor in saved.state.items():
        if key[1] in ("embedding.word_embeddings.weight", "output_layer.weight"):
            assert (tensor.shape[0], loaded.state[key].shape[0]) == (102, 104)
            assert torch.equal(loaded.state[key][:102], tensor)
            assert not loaded.state[key][102:].any()
        else:
            assert torch.equal(loaded.state[key], tensor)


def test_optimizer_state_that_cannot_be_resharded_is_refused(megatron: MegatronPool, tmp_path: Path) -> None:
    _save(megatron, tmp_path, LLAMA, "--use-distributed-optimizer")
    arguments = f"{SCHEDULE} {LLAMA} {DISTRIBUTED} --etp-size 2 --load {tmp_path} --ckpt-step {SAVED_STEP}"
    answers = megatron.run(checkpoint_runs.run_refused, RANKS, 280.0, (tuple(arguments.split()),))
    for message, unchanged in answers:
        assert "'dp_reshardable'" in message
        assert "--dist-ckpt-optim-fully-reshardable" in message
        assert unchanged


def test_optimizer_state_without_a_group_of_this_run_is_refused(megatron: MegatronPool, tmp_path: Path) -> None:
    """Experts get an optimizer of their own, and each group of parameters its own maximal learning rate; both new."""
    _save(megatron, tmp_path, MOE, DISTRIBUTED)
    arguments = (
        f"{SCHEDULE} {MOE} {DISTRIBUTED} --etp-size 2 {EP2} --decoupled-lr 1e-3 "
        f"--load {tmp_path} --ckpt-step {SAVED_STEP}"
    )
    answers = megatron.run(checkpoint_runs.run_refused, RANKS, 280.0, (tuple(arguments.split()),))
    for message, unchanged in answers:
        assert str(tmp_path) in message
        assert re.search(r"no group of its optimizer state has this run.s .*max_lr 0\.00[15]", message), message
        assert "--no-load-optim" in message
        assert "\n" not in message
        assert unchanged


@pytest.mark.parametrize(
    ("full", "what"), [(0, "its part"), (1, "its part"), (0, "the index"), (0, "metadata.json"), (0, TRACKER)]
)
def test_a_full_disk_is_named_by_all_ranks_and_leaves_the_checkpoint_before_it(
    megatron: MegatronPool, tmp_path: Path, full: int, what: str
) -> None:
    common = f"{SCHEDULE} {LLAMA} {DISTRIBUTED} --etp-size 2 {PAD}"
    arguments = f"{common} --save {tmp_path} --save-interval 2"
    answers = megatron.run(checkpoint_runs.run_on_a_full_disk, 2, 240.0, (tuple(arguments.split()), full, what))
    where = tmp_path if what == TRACKER else tmp_path / "iter_0000004"
    expected = (
        rf"CheckpointNotWrittenError: checkpoint {where}: rank {full} on \S+ could not write {what}, "
        rf"and [\d.]+ \w+ are free there; its log has the error. Make room, and go on from a whole checkpoint with "
        rf"--load {tmp_path}"
    )
    for losses, error in answers:
        assert len(losses) in {0, 4}
        assert re.fullmatch(expected, error), error
    loaded = megatron.train(2, tuple(f"{common} --load {tmp_path}".split()))[-1].losses
    assert len(loaded) == STEPS - 2
    assert loaded[:2] == answers[-1][0][2:]


def test_an_asynchronous_save_on_a_full_disk_is_told_by_all_ranks(megatron: MegatronPool, tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("8")
    for told, before, then, after in megatron.run(checkpoint_runs.finalize_on_a_full_disk, 2, 60.0, (str(tmp_path),)):
        assert told.startswith(f"CheckpointNotWrittenError: checkpoint {tmp_path}: rank 0 on ")
        assert f" could not write {TRACKER}, and " in told
        assert (before, then, after) == ("8", "", "12")
    assert [path.name for path in tmp_path.iterdir()] == [TRACKER]


def _damage(folder: Path, what: str) -> str:
    """Spoil one file of the checkpoint; return the name that the error must give."""
    step = folder / f"iter_{SAVED_STEP:07d}"
    largest = max(step.glob("*.distcp"), key=lambda path: path.stat().st_size)
    if what == "missing":
        largest.unlink()
        return largest.name
    if what == "short":
        size = largest.stat().st_size
        with largest.open("r+b") as file:
            file.truncate(size - 100)
        return f"{largest.name} has {size - 100} bytes of {size}"
    if what == "no metadata.json":
        (step / "metadata.json").unlink()
        return "metadata.json is missing"
    if what == "short index":
        index = step / ".metadata"
        index.write_bytes(index.read_bytes()[: index.stat().st_size // 2])
        return ".metadata cannot be read"
    step.rename(step.with_name("gone"))
    return "the directory is missing"


@pytest.mark.cpu_only("the format is looked at before a device is used")
def test_a_checkpoint_in_the_old_format_is_refused(megatron: MegatronPool, tmp_path: Path) -> None:
    _save(megatron, tmp_path, LLAMA, "--ckpt-format torch", ranks=2)
    arguments = f"{SCHEDULE} {LLAMA} --etp-size 2 --load {tmp_path} --ckpt-step {SAVED_STEP} --no-load-optim"
    for message, unchanged in megatron.run(checkpoint_runs.run_refused, 2, 280.0, (tuple(arguments.split()),)):
        assert f"{tmp_path}/iter_{SAVED_STEP:07d}" in message
        assert "--ckpt-convert-format torch_dist" in message
        assert unchanged


@pytest.mark.cpu_only("files are compared before a device is used")
@pytest.mark.timeout(900)
def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(megatron: MegatronPool, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    _save(megatron, whole, LLAMA, f"--etp-size 4 {PAD}")
    for number, what in enumerate(("missing", "short", "no metadata.json", "short index", "no directory")):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        name = _damage(folder, what)
        arguments = f"{SCHEDULE} {LLAMA} --etp-size 2 {PAD} --load {folder} --ckpt-step {SAVED_STEP}"
        answers = megatron.run(checkpoint_runs.run_refused, RANKS, 280.0, (tuple(arguments.split()),))
        assert len({message for message, _ in answers}) == 1, "all ranks say the same"
        for message, unchanged in answers:
            assert name in message
            assert str(folder) in message
            assert "\n" not in message
            assert unchanged
