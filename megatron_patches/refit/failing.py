"""How a command that several processes run together ends with an error."""

from __future__ import annotations

import sys
import time

_LINGER_S = 5.0


def fail(error: Exception, *, speaks: bool, leads: bool) -> int:
    """Says what has failed, and returns the exit status.

    Args:
        error: what has failed, on this process or on another one.
        speaks: whether this process says it.
        leads: whether this is the first process. torchrun kills all others as soon as one has ended, so the others
            first let that one have its say.
    """
    if speaks:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    if not leads:
        time.sleep(_LINGER_S)
    return 1
