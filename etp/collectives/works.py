"""Waits for collectives, and explains those that fail, from the messages of gloo and NCCL.

A collective fails for one of a few reasons, each with its own remedy. Neither backend has exception types for them, so
they are distinguished by words of the message, which is always passed on. Unknown messages are not interpreted.
"""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from etp.errors import EtpCommunicationError

# PyTorch 2.14 warns of the names that releases before 2.13 have.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

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
        self.finished: deque[dist.Work] = deque(maxlen=_KEPT)
        """The latest finished works; code that waits for one without :meth:`wait` must append it."""

    def wait(self, work: dist.Work, *, keep: bool) -> None:
        """Block until ``work`` is done (with streams: order the current stream after it).

        Args:
            work: the handle returned by a collective.
            keep: True for tensors on the CPU; see the class.
        """
        work.wait()
        if keep:
            self.finished.append(work)


def start_on_cpu[Started](collective: Callable[[], Started], group: dist.ProcessGroup, timeout_s: float) -> Started:
    """Start a collective of tensors on the CPU, which fails after ``timeout_s`` seconds.

    A wait with a timeout would not be enough: gloo's thread would go on with the collective until the process group's
    own timeout, half an hour by default, and the process could not end before that thread.

    Args:
        collective: starts it.
        group: its process group.
        timeout_s: instead of the group's timeout.
    """
    backend = group._get_backend(torch.device("cpu"))
    former = backend.options._timeout
    backend.set_timeout(timedelta(seconds=timeout_s))
    try:
        return collective()
    finally:
        backend.set_timeout(former)


def gather_numbers(
    numbers: torch.Tensor, group: dist.ProcessGroup, line: WorkLine, timeout_s: float | None, label: str
) -> torch.Tensor:
    """:meth:`etp.collectives.base.Transport.exchange` through ``torch.distributed``."""
    on_gpu = numbers.device.type == "cuda"
    everyone = numbers.new_empty(dist.get_world_size(group) * numbers.numel())
    # On GPUs on the calling stream: see [Note: the lane's stream] in etp/collectives/c10d.py.
    gather = partial(all_gather_single, everyone, numbers, group=group, async_op=not on_gpu)
    with reported(label, group):
        work = gather() if on_gpu or timeout_s is None else start_on_cpu(gather, group, timeout_s)
        if work is not None:
            line.wait(work, keep=not on_gpu)
    return everyone.view(-1, numbers.numel())


def gather_objects[T](own: T, group: dist.ProcessGroup | None, label: str) -> list[T]:
    """What every rank of a group passes, a few bytes each, by rank. Collective.

    Args:
        own: this rank's object; it is pickled.
        group: the ranks; all of them if None.
        label: name of the collective in messages.
    """
    everyone = [own] * dist.get_world_size(group)
    with reported(label, group):
        dist.all_gather_object(everyone, own, group=group)
    return everyone


def free_bytes(buffer: torch.Tensor) -> None:
    """Free the memory of a CPU buffer that a kept work still refers to, but that is not read again."""
    if buffer.device.type == "cpu":
        buffer.untyped_storage().resize_(0)


_LOST = (
    "A peer has most likely ended or given up, or the network to it failed: the connection is gone. That rank's own "
    "output has the cause"
)
_LATE = (
    "A peer did not come in time: it is slower than the time-out allows (raise EtpConfig.timeout_s or the process "
    "group's), it left the common order of layers, or it has no more batches (all ranks need equally many, also in an "
    "evaluation). Compare where the ranks stand"
)
_WRONG = (
    "The backend refused the tensors themselves, no peer is at fault: sizes, dtypes and devices must agree with the "
    "process group and between the ranks"
)
_UNKNOWN = "The backend's own message is all that is known; if other ranks failed first, their output has the cause"

_MEANINGS: tuple[tuple[str, re.Pattern[str]], ...] = (
    # First: if a watchdog ended the communicator, NCCL's message matches both a lost peer and a late one.
    (_LATE, re.compile(r"timed? ?out|timeout|deadline", re.IGNORECASE)),
    (
        _LOST,
        re.compile(
            r"connection (closed|reset|refused|aborted)|broken pipe|socket closed|remote process exit|network error"
            r"|exit of a remote peer|communicator was aborted|no route to host",
            re.IGNORECASE,
        ),
    ),
    (
        _WRONG,
        re.compile(
            r"invalid ?(tensor|argument|usage|value)|must (have|be)|\bexpected\b|mismatch|unsupported|not supported"
            r"|does not (support|match)|no backend type associated",
            re.IGNORECASE,
        ),
    ),
)


def meaning(message: str) -> str:
    """The likely cause behind a backend's message, and the remedy: one or two sentences without a final period."""
    return next((text for text, words in _MEANINGS if words.search(message)), _UNKNOWN)


@contextlib.contextmanager
def reported(label: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Turn a backend's failure into one error that names the collective, this rank and its peers.

    Args:
        label: name of the collective in the message.
        group: the ranks that take part; all of them if None.

    Raises:
        EtpCommunicationError: for any RuntimeError except a lack of device memory.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise explained(error, label, group) from error


def explained(error: RuntimeError, label: str, group: dist.ProcessGroup | None) -> EtpCommunicationError:
    """The error that names a failed collective. :func:`reported` raises it too, but costs several calls more."""
    # As docs/troubleshooting.md has it.
    ranks = dist.get_process_group_ranks(group)
    return EtpCommunicationError(
        f"{label} failed on rank {dist.get_rank()} (shard group: ranks {ranks}): {error}. {meaning(str(error))}"
    )


def who(group: dist.ProcessGroup | None) -> str:
    """This rank and its peers, for messages."""
    return f"on rank {dist.get_rank()} (shard group: ranks {dist.get_process_group_ranks(group)})"
