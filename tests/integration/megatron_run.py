"""Runs real Megatron trainings one after the other in one process, and records what they report.

Starting Megatron costs some eight seconds a process; a training of 20 steps of a tiny model costs one. So a worker
imports Megatron once, and :func:`train` gives it a fresh start for each command line: process groups, global
variables, microbatch calculator, random state and the seam's own state are built anew by Megatron itself and taken
down afterwards.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import megatron_patches
from tests.support.launch import RanksFailedError, WorkerPool, on_gpus, session_backend, skip_without_gpus
from tests.support.prepared import patched_megatron

T = TypeVar("T")

PRETRAIN_GPT = Path(__file__).resolve().parents[2] / "examples" / "pretrain_gpt.py"
PRETRAIN_FROZEN = Path(__file__).with_name("pretrain_frozen.py")
PRETRAIN_DELTA_RULE = Path(__file__).with_name("pretrain_delta_rule.py")
PRETRAIN_HYBRID = Path(__file__).with_name("pretrain_hybrid.py")


DATA_VARIABLE = "ETP_TESTS_DATA"
"""Says to workers where Megatron keeps the order of its samples: with mock data too it shuffles millions of them."""


@dataclass
class Trajectory:
    """What one rank of a training saw.

    Attributes:
        losses: loss of each step, over all data; on the last pipeline stage only, else empty.
        grad_norms: gradient norm of each step, before clipping; -1 of one that was skipped.
        zeros: elements of the gradient that are zero, of each step; 0 without ``--log-num-zeros-in-grad``.
        parameter_norms: norm of all parameters after each step; none without ``--log-params-norm``.
        evaluations: loss of each evaluation, over all data; on the last pipeline stage only.
        parameter_bytes: bytes of the model's parameters on this rank.
        log: what the rank printed.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    zeros: list[float] = field(default_factory=list)
    parameter_norms: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    parameter_bytes: int = 0
    log: str = ""


class MegatronPool:
    """Worker processes that keep Megatron loaded, and the trajectories of command lines that they have run.

    Their backend is the session's (``pytest --device``).

    Args:
        prepare: what the processes have run before; one of :mod:`tests.support.prepared`.
    """

    def __init__(self, prepare: Callable[[], None] = patched_megatron) -> None:
        self._prepare = prepare
        self._data = tempfile.TemporaryDirectory()
        # One pool for each number of ranks on GPUs: see tests.support.launch.session_pool.
        self._workers: dict[int, WorkerPool] = {}
        self._known: dict[tuple[int, tuple[str, ...], Path], list[Trajectory]] = {}

    def train(
        self, ranks: int, arguments: Sequence[str], script: Path = PRETRAIN_GPT, timeout_s: float = 240.0
    ) -> list[Trajectory]:
        """What each of ``ranks`` ranks saw in a training by ``script`` with these arguments; run once for each."""
        key = (ranks, tuple(arguments), script)
        if key not in self._known:
            self._known[key] = self.run(train, ranks, timeout_s, (key[1], script))
        return self._known[key]

    def run(self, body: Callable[..., T], ranks: int, timeout_s: float, args: tuple[Any, ...]) -> list[T]:
        """Run ``body(rank, world_size, *args)`` on every rank, with Megatron loaded or to be loaded."""
        if on_gpus():
            skip_without_gpus(ranks)
        workers = self._workers.setdefault(
            ranks if on_gpus() else 0, WorkerPool(self._prepare, {DATA_VARIABLE: self._data.name})
        )
        # Some ranks may have allocated symmetric memory more often than others: torch counts in each process.
        uneven = on_gpus() and "--pipeline-model-parallel-size" in str(args)
        try:
            return workers.run(body, ranks, session_backend(), timeout_s, args)
        except RanksFailedError:
            uneven = on_gpus()
            raise
        finally:
            if uneven:
                workers.close()

    def close(self) -> None:
        """End the processes."""
        for workers in self._workers.values():
            workers.close()
        self._data.cleanup()


def train(rank: int, world_size: int, arguments: Sequence[str], script: Path = PRETRAIN_GPT) -> Trajectory:
    """Run ``script`` with ``arguments`` as one of ``world_size`` ranks.

    A body for :mod:`tests.support.launch`: the default process group exists.

    Returns:
        What this rank saw.
    """
    megatron_patches.apply()
    return _train(rank, world_size, arguments, script)


def train_without_patches(rank: int, world_size: int, arguments: Sequence[str]) -> Trajectory:
    """:func:`train` with stock Megatron, in a pool of :func:`tests.support.prepared.stock_megatron`.

    ``arguments`` must suit a CPU.
    """
    return _train(rank, world_size, arguments, PRETRAIN_GPT)


def _train(rank: int, world_size: int, arguments: Sequence[str], script: Path) -> Trajectory:
    _describe_flags_once()
    arguments = [*arguments, "--data-cache-path", os.environ[DATA_VARIABLE]]
    gpu = rank % torch.cuda.device_count() if on_gpus() else rank
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": gpu, "LOCAL_WORLD_SIZE": world_size}
    trajectory = Trajectory()
    chunks: list[Any] = []
    output = io.StringIO()
    try:
        with (
            _environment({name: str(value) for name, value in environment.items()}),
            _arguments([str(script), *arguments]),
            _recorded(trajectory, chunks),
            contextlib.redirect_stdout(output),
        ):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        trajectory.log = output.getvalue()
        _take_down(chunks)
    return trajectory


def _describe_flags_once() -> None:
    """Keep the texts of ``--help``: for them Megatron parses the sources of its settings, twice in each training."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    describe = ArgumentGroupFactory._get_field_docstrings
    if hasattr(describe, "known"):
        return
    known: dict[type, dict[str, str]] = {}

    def describe_once(self: Any, settings: type) -> dict[str, str]:
        if settings not in known:
            known[settings] = describe(self, settings)
        return dict(known[settings])

    describe_once.known = known  # type: ignore[attr-defined]
    ArgumentGroupFactory._get_field_docstrings = describe_once


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables, and forget these and Megatron's own afterwards: it refuses one that another training has set."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _arguments(arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = arguments
    try:
        yield
    finally:
        sys.argv = before


@contextlib.contextmanager
def _recorded(trajectory: Trajectory, chunks: list[Any]) -> Iterator[None]:
    """Note what Megatron's steps, evaluations and norms return while ``pretrain`` runs, and its model chunks."""
    from megatron.training import training

    train_step, evaluate, setup = training.train_step, training.evaluate, training.setup_model_and_optimizer
    parameter_norm = training.calc_params_l2_norm

    def recording_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        losses, grad_norm, zeros = result[0], result[5], result[6]
        trajectory.losses.extend(float(loss) for loss in losses.values())
        trajectory.grad_norms.append(-1.0 if grad_norm is None else float(grad_norm))
        trajectory.zeros.append(float(zeros or 0))
        return result

    def recording_evaluation(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        trajectory.evaluations.extend(float(loss) for loss in result[0].values())
        return result

    def recording_setup(*args: Any, **kwargs: Any) -> Any:
        result = setup(*args, **kwargs)
        chunks.extend(result[0])
        parameters = (parameter for chunk in result[0] for parameter in chunk.parameters())
        trajectory.parameter_bytes = sum(parameter.nbytes for parameter in parameters)
        return result

    def recording_norm(*args: Any, **kwargs: Any) -> Any:
        trajectory.parameter_norms.append(parameter_norm(*args, **kwargs))
        return trajectory.parameter_norms[-1]

    training.train_step = recording_step
    training.calc_params_l2_norm = recording_norm
    training.evaluate = recording_evaluation
    training.setup_model_and_optimizer = recording_setup
    try:
        yield
    finally:
        training.train_step, training.evaluate, training.setup_model_and_optimizer = train_step, evaluate, setup
        training.calc_params_l2_norm = parameter_norm


def _take_down(chunks: list[Any]) -> None:
    """Forget everything that Megatron keeps for the life of a process.

    A model outlives its training, and with it the optimizer and every process group that they know, because
    DistributedDataParallel hangs hooks that refer to it on autograd's nodes, where Python's collector cannot see them.
    Emptied, it holds nothing. ``destroy_model_parallel`` forgets all but two of the groups, and a cache in a class
    keeps rotary embeddings, which know another.
    """
    from megatron.core import parallel_state, rerun_state_machine
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.training import global_vars, training

    # A rank that has these times reduces them over all ranks, and one that starts its first training has none yet.
    training._STARTUP_TIMESTAMPS.update(dict.fromkeys(training._STARTUP_TIMESTAMPS))
    global_vars.unset_global_variables()
    unset_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    # These have room for as many layers as the first model had.
    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker.clear()
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(parallel_state, name, None)
    for chunk in chunks:
        vars(chunk).clear()
    RotaryEmbedding.forward.cache_clear()
    gc.collect()
