"""Ends updates of vLLM's own contract that a trainer has left open.

vLLM's worker notes that an update was started. Until it is finished, the worker refuses to start another one and to
release the trainer. A trainer that dies in between never finishes it. By then the old weights serve; only the note is
left.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_APPLIED = "_etp_applied"
_REFUSED = ("start_weight_update", "shutdown_weight_transfer_engine")  # the latter is not in vLLM 0.26


def end_open_updates() -> None:
    """Lets this process's worker end an open update, without effect, before what it would refuse."""
    from vllm.v1.worker.gpu_worker import Worker

    for name in _REFUSED:
        method = getattr(Worker, name, None)
        if method is not None and not hasattr(method, _APPLIED):
            changed = _after_ending_an_update(method)
            setattr(changed, _APPLIED, True)
            setattr(Worker, name, changed)


def _after_ending_an_update(method: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(method)
    def carried_out(worker: Any) -> None:
        if worker._weight_update_active:
            logger.warning("refit: a weight update was started and never finished; it ends without effect")
            worker.finish_weight_update()
        method(worker)

    return carried_out
