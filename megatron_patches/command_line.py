"""Adds the flags of :mod:`megatron_patches.arguments` to Megatron's parser, for any script that uses it."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_patches import arguments, cpu, hf_training, last_line, refit_training
from megatron_patches.registry import PatchRecord

if TYPE_CHECKING:
    from megatron_patches.weight_shard_api import WeightShardApi

USAGE_ERROR = 2
RANK_0_HEAD_START_S = 10.0


def exit_with(message: str) -> NoReturn:
    """End the process because of invalid settings, with one line from rank 0 and no traceback.

    Raises:
        SystemExit: always, with status 2.
    """
    last_line.leave(message)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"megatron_patches: error: {message}\n")
        sys.stderr.flush()
    else:
        # torchrun ends all processes when the first one exits, so rank 0 must print the reason before it is killed.
        time.sleep(RANK_0_HEAD_START_S)
    raise SystemExit(USAGE_ERROR)


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all flags of this package to ``parser`` and return it."""
    return refit_training.add_arguments(hf_training.add_arguments(arguments.add_arguments(parser)))


def _show_first(parser: argparse.ArgumentParser, first: int) -> None:
    """Let ``--help`` begin with the groups of flags from index ``first`` on, and with one line of usage, not 1,500."""
    groups = parser._action_groups
    groups[:] = [*groups[first:], *groups[:first]]
    parser.usage = "torchrun [...] -m megatron_patches SCRIPT.py [flags of ETP, of Megatron and of the script]"


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Double the percent signs of help texts that argparse cannot format, so that ``--help`` does not fail.

    Some of Megatron's help texts contain a plain percent sign.
    """
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        if action.help and "%" in action.help:
            try:
                formatter._expand_help(action)
            except (ValueError, TypeError, KeyError):
                action.help = action.help.replace("%", "%%")


def _tell_mistakes_in_one_line(parser: argparse.ArgumentParser) -> None:
    """Report command-line mistakes in one line; argparse would print 1,500 lines of usage before it."""
    options = [option for action in parser._actions for option in action.option_strings]

    def told(message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        close = difflib.get_close_matches(unknown[1], options, n=1) if unknown else ()
        hint = f"; did you mean {close[0]}?" if close else "; --help lists what there is"
        exit_with(message + hint)

    parser.error = told  # type: ignore[method-assign]


def _refuse_yaml(parser: argparse.ArgumentParser) -> None:
    """Refuse ``--yaml-cfg`` while it is parsed: with it, Megatron never calls ``validate_args``, where all else is."""

    def refuse(_file: str) -> NoReturn:
        message = "--yaml-cfg does not work with this launcher: the file replaces the whole command line, --etp-size "
        exit_with(message + "included; give the settings as flags")

    for action in parser._actions:
        if "--yaml-cfg" in action.option_strings:
            action.type = refuse


def _with_arguments(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_megatron_arguments)
    def replacement(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_megatron_arguments(parser)
        of_megatron = len(parser._action_groups)
        add_own_arguments(parser)
        _show_first(parser, of_megatron)
        _mend_help(parser)
        _tell_mistakes_in_one_line(parser)
        _refuse_yaml(parser)
        return parser

    return replacement


def _with_checks(validate_args: Callable[..., Any], *, api: WeightShardApi) -> Callable[..., Any]:
    @functools.wraps(validate_args)
    def replacement(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> Any:
        if cpu.needed():
            cpu.set_required_arguments(args)
        try:
            arguments.apply_to_megatron(args)
            arguments.check(args)
            hf_training.check(args)
            refit_training.check(args)
            if cpu.needed():
                cpu.check_layers(args)
            config = arguments.config_from_args(args)
        except arguments.UnsupportedConfigurationError as error:
            exit_with(str(error))
        with _accepting_gathers(args):
            validated = validate_args(args, *rest, **kwargs)
        try:
            arguments.check_graphs(args)
            if cpu.needed():
                cpu.check(args)
        except arguments.UnsupportedConfigurationError as error:
            exit_with(str(error))
        api.configure(config)
        return validated

    return replacement


@contextmanager
def _accepting_gathers(args: argparse.Namespace) -> Iterator[None]:
    """Let Megatron accept MXFP8 and FP4 without ``--fp8-param-gather`` and ``--fp4-param-gather``.

    Megatron's own sharded weights need these flags, because they do not quantize what they gather.
    """
    active = arguments.is_active(args)
    hidden: dict[str, object] = {}
    if active and getattr(args, "fp8_recipe", None) == "mxfp8":
        # Any recipe with block scales would do: Megatron checks nothing else about it.
        hidden["fp8_recipe"] = "blockwise"
    if active and getattr(args, "fp4", None):
        hidden["fp4_param_gather"] = True
    given = {name: getattr(args, name) for name in hidden}
    vars(args).update(hidden)
    try:
        yield
    finally:
        vars(args).update(given)


def records(api: WeightShardApi) -> tuple[PatchRecord, ...]:
    """The replacements in Megatron's parser.

    Args:
        api: receives the options once they are parsed and checked.
    """
    module = "megatron.training.arguments"
    return (
        PatchRecord(
            target=f"{module}:add_megatron_arguments",
            replace=_with_arguments,
            reason="adds the flags of extended tensor parallelism to every Megatron script",
            sha256="a020f70583f160f2",
        ),
        PatchRecord(
            target=f"{module}:validate_args",
            replace=functools.partial(_with_checks, api=api),
            reason="sets Megatron's shard counts, and on a CPU what it needs there, and refuses what would not train "
            "correctly, before Megatron's checks",
            sha256="f379171b89b5c726",
        ),
    )
