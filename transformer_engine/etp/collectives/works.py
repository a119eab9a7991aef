"""Waits for work of a process group, and releases it only when no other thread can be its last owner."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

# One for each worker thread that a gloo process group has: each finishes one Work at a time.
_KEPT = 2


class WorkLine:
    """The works that one user of a process group waits for, one after another.

    gloo's worker thread wakes the waiter first and drops its reference to the ``Work`` afterwards. If that was the last
    reference, the thread also frees the work's tensors, for which it needs the GIL. A thread that requests the GIL
    while the interpreter shuts down aborts the process ("terminate called without an active exception", status -6,
    after a successful run). The latest finished works are therefore kept until others have followed. Buffers that were
    allocated for a single work are freed with :func:`free_bytes`. CUDA works are not kept, since that would hold device
    memory.
    """

    def __init__(self) -> None:
        self._finished: deque[dist.Work] = deque(maxlen=_KEPT)

    def wait(self, work: dist.Work, timeout_s: float | None, *, keep: bool) -> None:
        """Block until ``work`` is done (with streams: order the current stream after it).

        Args:
            work: the handle returned by a collective.
            timeout_s: seconds to block; None uses the process group's timeout. Ignored with streams, where nothing
                blocks (with a timeout, NCCL's works would block and could not be captured into a CUDA graph).
            keep: True for tensors on the CPU; see the class.
        """
        if timeout_s is None or not keep:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
        if keep:
            self._finished.append(work)


def free_bytes(buffer: torch.Tensor) -> None:
    """Free the memory of a CPU buffer that a kept work still refers to and nobody reads again."""
    if buffer.device.type == "cpu":
        buffer.untyped_storage().resize_(0)
