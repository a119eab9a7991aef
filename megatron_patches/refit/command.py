"""Runs a command on several processes together; the first one prints its progress and result."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from megatron_patches.refit.errors import CheckpointReadError, RefitError
from megatron_patches.refit.progress import Progress, shown_progress

_LINGER_S = 5.0


def is_first() -> bool:
    """Whether this is the first process of those that torchrun has started, or the only one."""
    return int(os.environ.get("RANK", "0")) == 0


def run_together(work: Callable[[Progress], str], errors: tuple[type[Exception], ...] = (RefitError,)) -> int:
    """Runs a command on all its processes. The first one shows its progress, and prints what it returns.

    Args:
        work: the command.
        errors: what it raises if a user or a machine is at fault.

    Returns:
        The exit status.
    """
    first = is_first()
    try:
        with shown_progress(first) as progress:
            result = work(progress)
    except errors as error:
        return fail(error, speaks=first or isinstance(error, CheckpointReadError), leads=first)
    except KeyboardInterrupt:
        if first:
            sys.stderr.write("error: interrupted\n")
        return 128 + signal.SIGINT
    if first:
        sys.stdout.write(f"{result}\n")
    return 0


def fail(error: Exception, *, speaks: bool, leads: bool) -> int:
    """Reports an error, and returns the exit status.

    Args:
        error: what has failed, on this process or another.
        speaks: whether this process reports it.
        leads: whether this is the first process. torchrun kills all processes as soon as one has ended, so the others
            first give that one time to report.
    """
    if speaks:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    if not leads:
        time.sleep(_LINGER_S)
    return 1
