"""``python -m megatron_patches.refit import``: a Hugging Face checkpoint as a Megatron checkpoint."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from megatron_patches.refit.checkpoints.checkpoint_build import build_chunks, refuse_unbuildable
from megatron_patches.refit.checkpoints.checkpoint_model import minutes, patch_megatron
from megatron_patches.refit.checkpoints.checkpoint_sizes import ParallelSizes
from megatron_patches.refit.checkpoints.hf_flags import flags_of
from megatron_patches.refit.checkpoints.load_hf import load_hf_checkpoint
from megatron_patches.refit.checkpoints.megatron_checkpoint import process_groups
from megatron_patches.refit.command import run_together
from megatron_patches.refit.control.exchange import describe_error, free_text
from megatron_patches.refit.errors import LoadError, UnsupportedModelError
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.models.config_traits import dtype_of, family_from_config, read_config
from megatron_patches.refit.progress import Progress

if TYPE_CHECKING:
    import torch

# Flags that Megatron requires of every run, and on which no model depends.
_RUN = (
    "--seq-length 1 --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1"
    " --no-save-optim --no-save-rng --ckpt-format torch_dist"
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``import``."""
    parser = commands.add_parser(
        "import",
        help="write a Hugging Face checkpoint as a Megatron checkpoint",
        description="Writes a Hugging Face checkpoint as a Megatron checkpoint (torch_dist), from which --load starts "
        "a run of any parallel sizes. Alone, one process holds the model; under torchrun it is sharded as asked, and "
        "no process ever holds a full tensor.",
    )
    parser.add_argument("--hf", type=Path, required=True, metavar="DIR", help="the Hugging Face checkpoint")
    parser.add_argument("--save", type=Path, required=True, metavar="DIR", help="directory for the Megatron checkpoint")
    ParallelSizes.add_options(parser, "importing")
    parser.add_argument("--timeout-minutes", type=minutes, default=30.0, help="longest wait for another process")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    return run_together(lambda progress: _import(options, progress))


def _import(options: argparse.Namespace, progress: Progress) -> str:
    """Does what the command line says. Returns what was written, in words."""
    sizes = ParallelSizes.from_options(options)
    sizes.check(int(os.environ.get("WORLD_SIZE", "1")))
    _check_target(options.save, options.hf)
    config = read_config(options.hf)
    flags = flags_of(config, options.hf.absolute())  # saved: a later run may start elsewhere
    family = family_from_config(config)
    _check_room(options.save, sum(map(math.prod, family.shapes().values())) * itemsize(dtype_of(config)))
    patch_megatron()
    args = _arguments(flags, options.save)
    refuse_unbuildable(args)
    sizes.check_model(args)
    with process_groups(sizes, timedelta(minutes=options.timeout_minutes)):
        with redirect_stdout(StringIO()):
            chunks = build_chunks(args, sizes)
        report = load_hf_checkpoint(chunks, options.hf, tokens=family.traits.vocab_size, progress=progress)
        progress.phase("write", 0)
        _save(chunks, args)
    return "\n".join([*report.lines(), f"written to {options.save}"])


def _check_target(directory: Path, hf: Path) -> None:
    """Raises LoadError if something is in the directory already, or it cannot be written."""
    if directory.resolve() == hf.resolve():
        raise LoadError(f"--save and --hf are both {directory}; name a new directory to write to")
    try:
        if directory.exists() and any(directory.iterdir()):
            raise LoadError(f"--save {directory} is not empty; name a new directory, or remove what is in it")
        with TemporaryFile(dir=_existing(directory)):
            pass
    except OSError as error:
        raise LoadError(f"--save {directory}: {error.strerror}; name a directory that can be written") from error


def _check_room(directory: Path, needed: int) -> None:
    """Raises LoadError if so many bytes have no room there."""
    folder = _existing(directory)
    if shutil.disk_usage(folder).free < needed:
        raise LoadError(
            f"--save {directory}: the weights take {needed / 1e6:.1f} MB, and {free_text(folder)} there; make room, or "
            "name another directory"
        )


def _existing(directory: Path) -> Path:
    """The directory, or the closest of its parents that exists."""
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def _arguments(flags: Sequence[str], save: Path) -> argparse.Namespace:
    """Megatron's arguments of the model, as a training run would save them."""
    from megatron.training.arguments import parse_args, validate_args

    said = StringIO()
    with _command_line([*flags, *_RUN.split()]), redirect_stdout(StringIO()), redirect_stderr(said):
        try:
            args: argparse.Namespace = parse_args()
            validate_args(args)
        except (AssertionError, SystemExit, ValueError) as error:
            reason = said.getvalue().strip() if isinstance(error, SystemExit) else describe_error(error)
            raise UnsupportedModelError(f"Megatron does not take this model: {reason}") from error
    args.save = str(save)
    return args


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """Replaces ``sys.argv``, which Megatron parses, and the number of processes, which it checks against the flags."""
    argv, world = sys.argv, os.environ.get("WORLD_SIZE")
    sys.argv = ["import", *arguments]
    os.environ["WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        sys.argv = argv
        if world is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = world


def _save(chunks: Sequence[torch.nn.Module], args: argparse.Namespace) -> None:
    """Writes what Megatron calls a release: weights of no iteration, with which a run starts at step 0.

    Raises:
        LoadError: if that fails. Megatron writes in subprocesses, and reports little more than that one has failed.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.training.checkpointing import save_checkpoint
    from megatron.training.global_vars import set_args
    from torch.distributed.checkpoint.api import CheckpointException

    set_args(args)
    try:
        with redirect_stdout(StringIO()):
            save_checkpoint(0, list(chunks), None, None, 0, release=True)
    except (OSError, CheckpointException, CheckpointingException) as error:
        told = error.__cause__ or error  # that of the patch names a rank, of which there is one here
        causes = [cause for cause, _ in told.failures.values()] if isinstance(told, CheckpointException) else [told]
        reasons = "; ".join(dict.fromkeys(map(describe_error, causes)))
        free = free_text(_existing(Path(args.save)))
        raise LoadError(f"--save {args.save}: writing failed, and {free} there ({reasons})") from error
