"""``python -m megatron_patches.refit``: its commands. Those that hold a model run alone or under torchrun."""

from __future__ import annotations

import argparse
import logging
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_patches.refit import (
    check_command,
    export_command,
    hf_flags,
    import_command,
    plan_command,
    push_command,
    simulate_command,
)

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
    export_command.add_command(commands, parse_size)
    import_command.add_command(commands)
    hf_flags.add_command(commands)
    push_command.add_command(commands)
    check_command.add_command(commands)
    plan_command.add_commands(commands, parse_size)
    simulate_command.add_command(commands, parse_size)
    return parser


_WITHOUT_MODEL: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {
        "flags": hf_flags.main,
        "plan": plan_command.main,
        "verify": plan_command.main,
        "simulate": simulate_command.main,
    }
)
_WITH_MODEL: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {
        "export": export_command.main,
        "import": import_command.main,
        "push": push_command.main,
        "check": check_command.main,
    }
)


def _silence_imports() -> None:
    """Silences what every rank would print while Megatron is imported: missing optional dependencies, and no GPU.

    Warnings of refit itself are shown.
    """
    warnings.simplefilter("ignore")
    for name in ("megatron", "megatron_patches.cpu", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = build_parser().parse_args(arguments)
    if options.command in _WITHOUT_MODEL:
        return _WITHOUT_MODEL[options.command](options)
    _silence_imports()
    return _WITH_MODEL[options.command](options)


if __name__ == "__main__":
    sys.exit(main())
