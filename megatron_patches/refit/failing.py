"""How a command that several processes run together ends with an error."""

from __future__ import annotations

import sys
import time

_LINGER_S = 5.0


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
