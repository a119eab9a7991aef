"""Memory that the ranks of one host map into each other's address space, and flags in it.

Built on ``torch.distributed._symmetric_memory`` without multicast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch._C._distributed_c10d import _SymmetricMemory

from etp.collectives.driver import CudaDriver, MemoryOperations

DEVICES_OVERLAP_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Makes torch accept ranks whose devices have the same index, as when each process sees only its own GPU."""

_WORD = 4

_MOST_OPERATIONS = 1 << 14
"""Number of batches cached, some hundred bytes each: more than models have weights."""

RAISED = 1
"""Value of a raised flag that has only one purpose."""


class SymmetricBuffer:
    """One allocation of equal size on every rank of a group, mapped by all of them. Constructed collectively.

    torch numbers these allocations in each process. Ranks with different numbers do not find each other, so every rank
    of a group must have constructed as many before, over whatever groups.

    Attributes:
        local: this rank's memory, ``[nbytes]`` uint8, initially zero.
        addresses: address of each rank's memory in this process, by rank.

    Raises:
        RuntimeError: if the ranks did not find each other within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        # Straight from the allocator: a tensor carved out of a pool would not start where its mapping does.
        # Outside inference mode even when called inside, because gathers of later passes write it.
        with torch.inference_mode(False):
            self.local = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
            self.local.zero_()
        torch.cuda.synchronize(device)
        self._handle = _rendezvous(self.local, group)
        self.addresses = [int(address) for address in self._handle.buffer_ptrs]
        mapped = self.addresses[dist.get_rank(group)]
        if mapped != self.local.data_ptr():
            raise RuntimeError(
                f"symmetric memory at {self.local.data_ptr():#x} is mapped at {mapped:#x}; "
                "this version of torch places it differently than the copy_engine transport expects: use c10d"
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes on each rank."""
        return self.local.numel()

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Part of this rank's memory as ``[numel]`` elements of ``dtype``."""
        return self.local[offset : offset + numel * dtype.itemsize].view(dtype)


def _rendezvous(local: torch.Tensor, group: dist.ProcessGroup) -> _SymmetricMemory:
    try:
        with _numbers_may_collide():
            return symmetric_memory.rendezvous(local, group)
    except RuntimeError as error:
        if "timeout" not in str(error).lower():
            raise
        ranks = dist.get_process_group_ranks(group)
        raise RuntimeError(
            f"rank {dist.get_rank()} did not find the memory for peer copies of the other ranks of {ranks} ({error}): "
            "a peer has ended, or has built other models over other groups of ranks before. PyTorch numbers it in "
            "each process, so all ranks of a group must have built the same number of models with the same weights; "
            "EtpConfig(transport='c10d') does without"
        ) from error


@contextmanager
def _numbers_may_collide() -> Iterator[None]:
    """Keep torch from comparing device indices: :mod:`etp.collectives.reach` has compared the devices themselves."""
    before = os.environ.get(DEVICES_OVERLAP_VARIABLE)
    os.environ[DEVICES_OVERLAP_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DEVICES_OVERLAP_VARIABLE]
        else:
            os.environ[DEVICES_OVERLAP_VARIABLE] = before


class Signals:
    """Flags that ranks raise for each other: for each channel, one word per sender in every rank's memory.

    [Note: signals] One rank raises a flag. The rank that waits for it lowers it on the same stream, before it lets the
    sender continue. So a flag is always down when it is raised, and a sequence of signals leaves the flags as it found
    them: it can be captured in a CUDA graph, and replayed between sequences that are not captured. (Counters would be
    frozen in a graph.) The caller must ensure that a flag is safe to raise again; see
    ``etp/collectives/copy_engine.py``.

    Streams wait for a peer only through these flags, and whatever a peer must run before it raises a flag waits only
    for earlier flags. The waits of all ranks therefore have one common order and cannot deadlock, even if the device
    runs all streams one after the other (``CUDA_DEVICE_MAX_CONNECTIONS=1``), or a graph's branches in any order that
    its edges allow.

    A flag is raised with a number that identifies its purpose, and the receiver waits for that number. A rank that runs
    another collective than its peer therefore waits until its timeout; it never takes data sent for another purpose.

    Args:
        group: the ranks.
        channels: how many independent sets of flags there are.
        device: where the words lie.
        driver: the driver calls.
        raised: channels whose flags are initially raised.
    """

    def __init__(
        self, group: dist.ProcessGroup, channels: int, device: torch.device, driver: CudaDriver, raised: Sequence[int]
    ) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self._driver = driver
        self._buffer = SymmetricBuffer(group, channels * size * _WORD, device)
        for channel in raised:
            # No peer raises one of these before this rank has raised another flag at that peer.
            self._buffer.view(channel * size * _WORD, size, torch.int32).fill_(RAISED)
        torch.cuda.synchronize(device)
        peers = [peer for peer in range(size) if peer != rank]
        addresses = self._buffer.addresses
        theirs = [[addresses[p] + (c * size + rank) * _WORD for p in peers] for c in range(channels)]
        own = [[addresses[rank] + (c * size + p) * _WORD for p in peers] for c in range(channels)]

        # Cached, because a training run repeats a few for every weight; bounded, because a process may create many
        # models. The function does not refer to this object, so that its memory is freed with it.
        @lru_cache(_MOST_OPERATIONS)
        def operations(channel: int, purpose: int, sends: bool, receives: bool) -> MemoryOperations:
            raised, taken = theirs[channel] if sends else (), own[channel] if receives else ()
            return MemoryOperations(purpose, raised=raised, taken=taken)

        self.operations: Callable[[int, int, bool, bool], MemoryOperations] = operations
        """What the methods enqueue, for callers that keep it: by channel, purpose, and whether it raises and waits."""

    def send(self, channel: int, stream: int, purpose: int = RAISED) -> None:
        """Raise this rank's flag at all peers, after all work enqueued on ``stream`` so far.

        Args:
            channel: which flag.
            stream: a CUDA stream's handle.
            purpose: a 32-bit number other than 0.
        """
        self._driver.enqueue(self.operations(channel, purpose, True, False), stream)

    def receive(self, channel: int, stream: int, purpose: int = RAISED) -> None:
        """Hold ``stream`` until every peer has raised its flag for the same ``purpose``, and lower them."""
        self._driver.enqueue(self.operations(channel, purpose, False, True), stream)

    def exchange(self, channel: int, stream: int, purpose: int = RAISED) -> None:
        """:meth:`send`, then :meth:`receive`, in one call."""
        self._driver.enqueue(self.operations(channel, purpose, True, True), stream)
