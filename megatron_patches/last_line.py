"""The reason for which a process ends, left where torchrun reads it and ends its own output with it.

torchrun gives each process a file for that (``TORCHELASTIC_ERROR_FILE``) and prints what the first of them has left. So
the reason is the last thing that a user sees, rather than a line among the tracebacks of all ranks.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave(reason: str) -> None:
    """Leave ``reason`` for torchrun, unless there is one already; do nothing where torchrun has not started this."""
    name = os.environ.get(_VARIABLE)
    if not name or Path(name).exists():
        return
    # The format of torch.distributed.elastic.multiprocessing.errors.ErrorHandler, which would leave a whole traceback.
    details = {"py_callstack": reason, "timestamp": str(int(time.time()))}
    Path(name).write_text(json.dumps({"message": {"message": reason, "extraInfo": details}}), encoding="utf-8")
