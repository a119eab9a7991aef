"""``python -m megatron_patches.refit``: its commands. Those that load a model run in one process or under torchrun."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_patches.refit.checkpoints import hf_flags
from megatron_patches.refit.tools import (
    check_command,
    export_command,
    import_command,
    plan_command,
    push_command,
    simulate_command,
)


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m megatron_patches.refit", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export_command.add_command(commands)
    import_command.add_command(commands)
    hf_flags.add_command(commands)
    push_command.add_command(commands)
    check_command.add_command(commands)
    plan_command.add_commands(commands)
    simulate_command.add_command(commands)
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
