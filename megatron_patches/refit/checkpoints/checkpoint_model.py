"""Loads the model of a Megatron checkpoint, sharded as a command line says."""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_patches.refit.checkpoints.checkpoint_build import build_chunks, refuse_unbuildable
from megatron_patches.refit.checkpoints.checkpoint_sizes import ParallelSizes
from megatron_patches.refit.checkpoints.megatron_checkpoint import (
    find_iteration,
    load_weights,
    process_groups,
    saved_arguments,
    vocabulary_of,
)
from megatron_patches.refit.control.exchange import default_exchange, together
from megatron_patches.refit.errors import ExportError, RefitError
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.source.live import describe_rank

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CheckpointModel:
    """A loaded model.

    Attributes:
        chunks: this rank's part, one module per virtual pipeline stage.
        vocab_size: number of tokens, without padding.
        iteration: training steps of the weights; 0 if neither arguments nor directory name say.
    """

    chunks: list[torch.nn.Module]
    vocab_size: int
    iteration: int


def add_checkpoint_options(parser: argparse.ArgumentParser, while_doing: str) -> None:
    """Adds the options that select a checkpoint and its sharding.

    Args:
        parser: parser of the command.
        while_doing: verb for the help, such as "exporting".
    """
    parser.add_argument("--load", type=Path, required=True, help="directory that Megatron's --save wrote")
    parser.add_argument("--iteration", type=int, help="which iteration; the latest by default")
    parser.add_argument(
        "--vocab-size",
        type=partial(positive, of=" of tokens"),
        help="tokens without padding; from the run's tokenizer by default",
    )
    ParallelSizes.add_options(parser, while_doing)
    parser.add_argument("--timeout-minutes", type=minutes, default=30.0, help="longest wait for another process")


def positive(text: str, of: str = "") -> int:
    """Parses a positive number.

    Args:
        text: what was given.
        of: ends the message, such as " of tokens".

    Raises:
        argparse.ArgumentTypeError: if it is not positive.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number{of}")
    return int(text)


def minutes(text: str) -> float:
    """Parses a timeout in minutes.

    Raises:
        argparse.ArgumentTypeError: if it is not positive, or too long.
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
    options: argparse.Namespace, progress: Progress, check: Callable[[int], None] = lambda _: None
) -> Iterator[CheckpointModel]:
    """Builds the model and loads its weights; destroys the process groups afterwards.

    Args:
        options: the options of :func:`add_checkpoint_options`.
        progress: receives the phase.
        check: called with the vocabulary size on all ranks, before the model is built; raises a RefitError if the
            planned use of the model is not possible.

    Raises:
        RefitError: on any user error or machine failure, with one line that names it.
    """
    directory = find_iteration(options.load, options.iteration)
    sizes = ParallelSizes.from_options(options)
    sizes.check(int(os.environ.get("WORLD_SIZE", "1")))
    patch_megatron()
    args = saved_arguments(directory)
    refuse_unbuildable(args)
    sizes.check_model(args)
    progress.phase("load", 0)
    with process_groups(sizes, timedelta(minutes=options.timeout_minutes)):
        vocab_size = vocabulary_of(args) if options.vocab_size is None else options.vocab_size
        check(vocab_size)
        _check_rows(args, vocab_size)
        chunks = build_chunks(args, sizes)
        exchange = default_exchange()
        # Refuse unsupported models before the weights are read.
        together(exchange, f"describing {directory}", lambda: describe_rank(chunks, vocab_size, exchange.rank, None))
        load_weights(chunks, directory)
        yield CheckpointModel(chunks, vocab_size, int(getattr(args, "iteration", 0) or _number(directory)))


def _check_rows(args: argparse.Namespace, vocab_size: int) -> None:
    """Refuses tokens beyond the saved embedding: these parallel sizes may add rows, which nothing fills.

    Raises:
        ExportError: with both numbers.
    """
    rows = args.padded_vocab_size
    if rows is not None and vocab_size > rows:
        raise ExportError(
            f"the checkpoint cannot be read: its embedding has {rows} rows, padding included, which cannot hold "
            f"{vocab_size} tokens; pass --vocab-size with the tokens that it was trained on"
        )


def patch_megatron() -> None:
    """Applies this package's patches, which sharded weights and machines without GPUs need.

    Raises:
        RefitError: if Megatron is another version than the one that is patched.
    """
    import megatron_patches

    try:
        megatron_patches.apply()
    except megatron_patches.IncompatibleMegatronError as error:
        raise RefitError(str(error)) from error


def _number(directory: Path) -> int:
    digits = directory.name.removeprefix("iter_")
    return int(digits) if digits.isdigit() else 0
