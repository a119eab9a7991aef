"""``python -m megatron_patches.refit export``: a Megatron checkpoint as a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_patches.refit.checkpoints import checkpoint_model
from megatron_patches.refit.checkpoints.checkpoint_dir import CheckpointDirectory
from megatron_patches.refit.checkpoints.export import ExportOptions, export_checkpoint
from megatron_patches.refit.checkpoints.megatron_checkpoint import find_iteration
from megatron_patches.refit.command import is_first, run_together
from megatron_patches.refit.errors import ExportError
from megatron_patches.refit.layout.dtypes import FLOAT_DTYPES
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.size_text import parse_size


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``export``."""
    export = commands.add_parser(
        "export",
        help="write a Megatron checkpoint as a Hugging Face checkpoint",
        description="Writes a Megatron checkpoint (torch_dist) as a Hugging Face checkpoint. Alone, one process holds "
        "the model; under torchrun it is sharded as asked, and no process ever holds a full tensor.",
    )
    checkpoint_model.add_checkpoint_options(export, "exporting")
    export.add_argument("--output", type=Path, required=True, help="directory for the Hugging Face checkpoint")
    export.add_argument("--max-shard-size", type=parse_size, default=parse_size("5GB"), help="most bytes in a file")
    export.add_argument("--overwrite", action="store_true", help="replace an earlier checkpoint at --output")
    export.add_argument("--dtype", choices=FLOAT_DTYPES, help="element type of the checkpoint; kept by default")
    export.add_argument(
        "--weight-format",
        choices=[kind.value for kind in WeightFormat],
        default=WeightFormat.TRAINED.value,
        help="format of the weights: as they are trained, or fp8_block, which quantizes linear layers with a scale for "
        "each block of 128 x 128; %(default)s by default",
    )
    export.add_argument("--bos-token-id", type=int, help="token that begins a text, for the configuration")
    export.add_argument("--eos-token-id", type=int, help="token that ends a text, for the configuration")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    return run_together(lambda progress: _export(options, progress))


def _export(options: argparse.Namespace, progress: Progress) -> str:
    """Builds the model, loads it and exports it as the command line says. Returns what was written, in words.

    Raises:
        RefitError: on any user error or machine failure, with one line that names it.
    """
    try:
        how = ExportOptions(
            max_shard_bytes=options.max_shard_size,
            overwrite=options.overwrite,
            dtype=options.dtype,
            weight_format=WeightFormat(options.weight_format),
            bos_token_id=options.bos_token_id,
            eos_token_id=options.eos_token_id,
        )
    except ValueError as error:
        raise ExportError(str(error)) from error
    find_iteration(options.load, options.iteration)  # before a folder is made
    probe = CheckpointDirectory(options.output, f"probe-{os.getpid()}", options.overwrite)
    if is_first():  # before minutes of loading
        probe.create()
        probe.discard()
    with checkpoint_model.loaded(options, progress, how.check_tokens) as found:
        report = export_checkpoint(
            found.chunks, options.output, vocab_size=found.vocab_size, options=how, progress=progress
        )
    seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
    return (
        f"{report.architecture} at {report.path}: {report.tensors} tensors, {report.nbytes / 1e6:.1f} MB in "
        f"{report.files} files ({seconds})"
    )
