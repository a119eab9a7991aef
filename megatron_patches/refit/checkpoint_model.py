"""The model of a Megatron checkpoint, sharded as a command line asks: what ``export`` and ``push`` begin with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patches.refit.errors import ExportError
from megatron_patches.refit.megatron_checkpoint import (
    ParallelSizes,
    build_model,
    find_iteration,
    load_weights,
    process_groups,
    saved_arguments,
    vocabulary_of,
)
from megatron_patches.refit.progress import Progress

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckpointModel:
    """A loaded model.

    Attributes:
        model: this rank's part.
        vocab_size: tokens, without padding.
        iteration: steps that the weights have seen; 0 where the checkpoint's folder does not say.
    """

    model: torch.nn.Module
    vocab_size: int
    iteration: int


def add_options(parser: argparse.ArgumentParser, while_doing: str) -> None:
    """Adds what says which checkpoint, and how to shard it.

    Args:
        parser: of the command.
        while_doing: "exporting", for the help.
    """
    parser.add_argument("--load", type=Path, required=True, help="directory that Megatron's --save wrote")
    parser.add_argument("--iteration", type=int, help="which iteration; the latest by default")
    parser.add_argument("--vocab-size", type=int, help="tokens without padding; from the run's tokenizer by default")
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, default=1, help=f"tensor-parallel size while {while_doing}"
    )
    parser.add_argument(
        "--pipeline-model-parallel-size", type=int, default=1, help=f"pipeline stages while {while_doing}"
    )
    parser.add_argument(
        "--etp-size", type=int, default=1, help="extended-tensor-parallel size (not expert tensor parallelism)"
    )
    parser.add_argument("--timeout-minutes", type=float, default=30.0, help="longest wait for another process")


@contextmanager
def loaded(options: argparse.Namespace, directory: Path, progress: Progress) -> Iterator[CheckpointModel]:
    """Builds the model and loads its weights; takes the process groups down afterwards.

    Args:
        options: with what :func:`add_options` added.
        directory: of the iteration, from :func:`directory_of`.
        progress: told of the phase.

    Raises:
        RefitError: on any mistake of the user's or failure of the machine, with one line that says which.
    """
    sizes = ParallelSizes(
        tensor=options.tensor_model_parallel_size,
        pipeline=options.pipeline_model_parallel_size,
        etp=options.etp_size,
    )
    sizes.check(int(os.environ.get("WORLD_SIZE", "1")))
    import megatron_patches

    try:
        megatron_patches.apply()
    except megatron_patches.IncompatibleMegatronError as error:
        raise ExportError(str(error)) from error
    progress.phase("load", 0)
    with process_groups(sizes, timedelta(minutes=options.timeout_minutes)):
        args = saved_arguments(directory)
        vocab_size = options.vocab_size or vocabulary_of(args)
        model = build_model(args, sizes)
        load_weights(model, directory)
        yield CheckpointModel(model, vocab_size, int(getattr(args, "iteration", 0) or _number(directory)))


def directory_of(options: argparse.Namespace) -> Path:
    """The iteration's directory.

    Raises:
        RefitError: if there is none.
    """
    return find_iteration(options.load, options.iteration)


def _number(directory: Path) -> int:
    digits = directory.name.removeprefix("iter_")
    return int(digits) if digits.isdigit() else 0
