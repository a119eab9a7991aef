"""Ends updates of vLLM's own contract that a trainer has left open.

vLLM's worker notes that an update was started, and refuses to start another one until it is finished. A trainer that
dies in between never finishes it. By then its session has ended, and the old weights serve; only the note is left.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_APPLIED = "_etp_applied"


def apply() -> None:
    """Lets this process's worker end an open update, without effect, when another one starts."""
    from vllm.v1.worker.gpu_worker import Worker

    start = Worker.start_weight_update
    if not hasattr(start, _APPLIED):
        Worker.start_weight_update = _after_ending_another(start)
        setattr(Worker.start_weight_update, _APPLIED, True)


def _after_ending_another(start: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(start)
    def started(worker: Any) -> None:
        if worker._weight_update_active:
            logger.warning("refit: a weight update was started and never finished; it ends without effect")
            worker.finish_weight_update()
        start(worker)

    return started
