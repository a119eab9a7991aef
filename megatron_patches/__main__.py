"""Runs an unmodified Megatron script with Extended Tensor Parallelism.

::

    torchrun --nproc-per-node 4 -m megatron_patches SCRIPT.py [the script's arguments] --etp-size 2
"""

from __future__ import annotations

import argparse
import atexit
import runpy
import sys
import traceback
from pathlib import Path

import megatron_patches
from megatron_patches import last_line
from megatron_patches.command_line import USAGE_ERROR, add_own_arguments, exit_with
from megatron_patches.process_exit import ProcessGroupsAtExit

_USAGE = "torchrun [...] -m megatron_patches SCRIPT.py [its arguments] [--etp-size N] ..."


def _help() -> str:
    """The flags of this package; Megatron's are those of the script's own ``--help``."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        add_help=False,
        epilog="SCRIPT.py --help also lists the flags of Megatron and of the script.",
    )
    return add_own_arguments(parser).format_help()


def main(arguments: list[str]) -> None:
    """Run ``arguments[0]`` as the main program, with the remaining arguments as its command line.

    Raises:
        SystemExit: with status 2, and one line from rank 0, if the script cannot be run at all.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        raise SystemExit(0 if arguments else USAGE_ERROR)
    script = Path(arguments[0])
    if not script.is_file():
        exit_with(f"{script} is not a file; the script to run comes first, its arguments after it")
    sys.argv[:] = arguments
    # As with `python SCRIPT.py`, modules next to the script are found first.
    sys.path[0] = str(script.resolve().parent)
    try:
        megatron_patches.apply()
    except megatron_patches.IncompatibleMegatronError as error:
        exit_with(str(error))
    # run_path runs the script as the __main__ module under its own path. Processes that it spawns, such as checkpoint
    # writers, import it from that path and stop at its `if __name__ == "__main__"`.
    at_exit = ProcessGroupsAtExit()
    atexit.register(at_exit)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        at_exit.went_well = not end.code
        raise
    except Exception as error:
        # Many assertions of Megatron have no message, and their condition says what is wrong.
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        last_line.leave(f"{type(error).__name__}: {reason}")
        raise
    at_exit.went_well = True


if __name__ == "__main__":
    main(sys.argv[1:])
