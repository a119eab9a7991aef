"""Stores the reason why a process ends where torchrun reads it and prints it as its last line.

torchrun gives each process a file for this (``TORCHELASTIC_ERROR_FILE``) and prints the content of the first one
written. The reason is then the last line that the user sees, instead of being buried in the tracebacks of all ranks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave(reason: str) -> None:
    """Store ``reason`` for torchrun, unless one is stored already. Without torchrun, do nothing."""
    name = os.environ.get(_VARIABLE)
    if not name or Path(name).exists():
        return
    # The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which would store a whole traceback.
    details = {"py_callstack": reason, "timestamp": str(int(time.time()))}
    Path(name).write_text(json.dumps({"message": {"message": reason, "extraInfo": details}}), encoding="utf-8")
