"""Loads the model of a Megatron checkpoint, sharded as the command line of ``export`` or ``push`` says."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patches.refit.checkpoint_build import build_chunks
from megatron_patches.refit.checkpoint_refusals import refuse_unbuildable
from megatron_patches.refit.checkpoint_sizes import ParallelSizes
from megatron_patches.refit.errors import ExportError
from megatron_patches.refit.exchange import default_exchange, together
from megatron_patches.refit.megatron_checkpoint import (
    find_iteration,
    load_weights,
    process_groups,
    saved_arguments,
    vocabulary_of,
)
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.source.live import describe_rank

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckpointModel:
    """A loaded model.

    Attributes:
        chunks: this rank's part, one module a virtual pipeline stage.
        vocab_size: tokens, without padding.
        iteration: steps that the weights have seen; 0 where the checkpoint's folder does not say.
    """

    chunks: list[torch.nn.Module]
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
    parser.add_argument(
        "--vocab-size", type=_tokens, help="tokens without padding; from the run's tokenizer by default"
    )
    ParallelSizes.add_options(parser, while_doing)
    parser.add_argument("--timeout-minutes", type=_minutes, default=30.0, help="longest wait for another process")


def _tokens(text: str) -> int:
    """A number of tokens.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of tokens")
    return int(text)


def _minutes(text: str) -> float:
    """A time that a process can wait.

    Raises:
        argparse.ArgumentTypeError: if it is none.
    """
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes * 60 <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of minutes")
    return minutes


@contextmanager
def loaded(
    options: argparse.Namespace, directory: Path, progress: Progress, check: Callable[[int], None] = lambda _: None
) -> Iterator[CheckpointModel]:
    """Builds the model and loads its weights; takes the process groups down afterwards.

    Args:
        options: with what :func:`add_options` added.
        directory: of the iteration, from :func:`directory_of`.
        progress: told of the phase.
        check: raises a RefitError if what is to be done with the model does not fit its number of tokens.

    Raises:
        RefitError: on any mistake of the user's or failure of the machine, with one line that says which.
    """
    sizes = ParallelSizes.from_options(options)
    sizes.check(int(os.environ.get("WORLD_SIZE", "1")))
    import megatron_patches

    try:
        megatron_patches.apply()
    except megatron_patches.IncompatibleMegatronError as error:
        raise ExportError(str(error)) from error
    args = saved_arguments(directory)
    refuse_unbuildable(args)
    sizes.check_model(args)
    progress.phase("load", 0)
    with process_groups(sizes, timedelta(minutes=options.timeout_minutes)):
        vocab_size = vocabulary_of(args) if options.vocab_size is None else options.vocab_size
        check(vocab_size)
        chunks = build_chunks(args, sizes)
        exchange = default_exchange()
        # What has no form outside of Megatron is refused before the weights are read.
        together(exchange, f"describing {directory}", lambda: describe_rank(chunks, vocab_size, exchange.rank, None))
        load_weights(chunks, directory)
        yield CheckpointModel(chunks, vocab_size, int(getattr(args, "iteration", 0) or _number(directory)))


def directory_of(options: argparse.Namespace) -> Path:
    """The iteration's directory.

    Raises:
        RefitError: if there is none.
    """
    return find_iteration(options.load, options.iteration)


def _number(directory: Path) -> int:
    digits = directory.name.removeprefix("iter_")
    return int(digits) if digits.isdigit() else 0
