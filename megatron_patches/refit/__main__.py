"""``python -m megatron_patches.refit``: its commands; ``export``, ``push``, ``check`` run alone or under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from megatron_patches.refit import check_command, checkpoint_model, plan_command, push_command, simulate_command
from megatron_patches.refit.dtypes import FLOAT_DTYPES
from megatron_patches.refit.errors import CheckpointReadError, ExportError, RefitError
from megatron_patches.refit.export import ExportOptions, ExportReport, export_checkpoint
from megatron_patches.refit.failing import fail
from megatron_patches.refit.progress import Progress, Quiet, TerminalProgress
from megatron_patches.refit.transports.checkpoint_dir import CheckpointDirectory

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """Bytes from a number with an optional unit: ``5GB``, ``512MiB``, ``1000``.

    Raises:
        argparse.ArgumentTypeError: if the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 5GB or 512MiB")
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size > sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text[:32]!r} is more than any memory has")
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte")
    return int(size)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m megatron_patches.refit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="write a Megatron checkpoint as a Hugging Face checkpoint",
        description="Writes a Megatron checkpoint (torch_dist) as a Hugging Face checkpoint. Alone, one process holds "
        "the model; under torchrun it is sharded as asked, and no process ever holds a full tensor.",
    )
    checkpoint_model.add_options(export, "exporting")
    export.add_argument("--output", type=Path, required=True, help="directory for the Hugging Face checkpoint")
    export.add_argument("--max-shard-size", type=parse_size, default=parse_size("5GB"), help="most bytes in a file")
    export.add_argument("--overwrite", action="store_true", help="replace an earlier checkpoint at --output")
    export.add_argument("--dtype", choices=FLOAT_DTYPES, help="element type of the checkpoint; kept by default")
    export.add_argument("--bos-token-id", type=int, help="token that begins a text, for the configuration")
    export.add_argument("--eos-token-id", type=int, help="token that ends a text, for the configuration")
    push_command.add_command(commands)
    check_command.add_command(commands)
    plan_command.add_commands(commands, parse_size)
    simulate_command.add_command(commands, parse_size)
    return parser


def run_export(options: argparse.Namespace, progress: Progress) -> ExportReport:
    """Builds the model, loads it and exports it as the command line says.

    Raises:
        RefitError: on any user error or machine failure, with one line that names it.
    """
    try:
        how = ExportOptions(
            max_shard_bytes=options.max_shard_size,
            overwrite=options.overwrite,
            dtype=options.dtype,
            bos_token_id=options.bos_token_id,
            eos_token_id=options.eos_token_id,
        )
    except ValueError as error:
        raise ExportError(str(error)) from error
    directory = checkpoint_model.directory_of(options)
    probe = CheckpointDirectory(options.output, f"probe-{os.getpid()}", options.overwrite)
    if int(os.environ.get("RANK", "0")) == 0:  # before minutes of loading
        probe.create()
        probe.discard()
    with checkpoint_model.loaded(options, directory, progress, how.check_tokens) as found:
        return export_checkpoint(
            found.chunks, options.output, vocab_size=found.vocab_size, options=how, progress=progress
        )


def _silence_imports() -> None:
    """Silences import warnings of Megatron and torch about missing optional dependencies, which every rank prints."""
    warnings.simplefilter("ignore")
    for name in ("megatron", "megatron_patches", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    if options.command in {"plan", "verify"}:
        return plan_command.main(options)
    if options.command == "simulate":
        return simulate_command.main(options)
    first = int(os.environ.get("RANK", "0")) == 0
    _silence_imports()
    if options.command == "push":
        return push_command.main(options)
    if options.command == "check":
        return check_command.main(options)
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(TerminalProgress()) if first else Quiet()
            report = run_export(options, progress)
    except RefitError as error:
        return fail(error, speaks=first or isinstance(error, CheckpointReadError), leads=first)
    if first:
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in report.seconds.items())
        sys.stdout.write(
            f"{report.architecture} at {report.path}: {report.tensors} tensors, {report.nbytes / 1e6:.1f} MB in "
            f"{report.files} files ({seconds})\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
