"""Waiting for work of a process group, and letting go of it only when no other thread can be its last owner."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

# One for each worker thread that a gloo process group has: each finishes one Work at a time.
_KEPT = 2


class WorkLine:
    """The works that one user of a process group waits for, one after another.

    gloo's worker thread wakes the waiter first and lets go of the ``Work`` afterwards. If it is then the last owner,
    it also frees the work's tensors, for which it needs the interpreter's lock; a thread that asks for that lock
    while the interpreter is ending takes the whole process down ("terminate called without an active exception",
    status -6, after a training that went well). So the latest finished works stay here until others have followed.
    Whoever made buffers for one work only frees their bytes with :func:`free_bytes`. CUDA works are not kept: they
    would keep device memory.
    """

    def __init__(self) -> None:
        self._finished: deque[dist.Work] = deque(maxlen=_KEPT)

    def wait(self, work: dist.Work, timeout_s: float | None, *, keep: bool) -> None:
        """Block until ``work`` is done (with streams: order the current stream after it).

        Args:
            work: what a collective returned.
            timeout_s: seconds to block; None takes the process group's own time-out. Of no effect with streams, where
                nothing blocks (with a time-out NCCL's works would, and could not be captured into a CUDA graph).
            keep: for tensors on the CPU: see the class.
        """
        if timeout_s is None or not keep:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
        if keep:
            self._finished.append(work)


def free_bytes(buffer: torch.Tensor) -> None:
    """Free the memory of a buffer on the CPU that a kept work still refers to; nobody reads it again."""
    if buffer.device.type == "cpu":
        buffer.untyped_storage().resize_(0)
