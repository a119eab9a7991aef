"""The NCCL process group of all parties of a refit, through which ``c10d`` sends.

[Note: NCCL] ``torch.distributed`` sends coalesced operations, even to one peer, on the communicator of the whole group,
and all others on a communicator that it makes per pair. Here everything is coalesced, so there is one communicator,
which all parties make together. One per pair would not keep pairs independent either: a destination with many sources
cannot run that many waiting kernels at once, and each communicator takes memory, time and threads. See [Note: turns]
in :mod:`megatron_patches.refit.transports.turns` for why one is enough.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.refit.control.exchange import describe_error
from megatron_patches.refit.memory.ports import Pending
from megatron_patches.refit.transports.worker import Worker

logger = logging.getLogger(__name__)

_ABORT_S = 20.0  # for NCCL to end what is under way
_WATCHDOG_S = 600.0  # least timeout of torch's watchdog, which only logs; callers give up long before, with a reason
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclGroup:
    """NCCL between GPUs. What a party starts ends in the order in which it was started.

    The constructor returns once all parties have called theirs.

    Args:
        store: the store that parties share.
        party: this party's number.
        size: number of parties.
        device: torch's name of this party's GPU.
        timeout_s: longest wait of the caller, in seconds.
    """

    def __init__(self, store: dist.Store, party: int, size: int, device: str, timeout_s: float) -> None:
        self.device = device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(_WATCHDOG_S, 2 * timeout_s))
        with torch.cuda.device(device):
            with _errors_left_to_the_caller():
                self._group: Any = dist.ProcessGroupNCCL(store, party, size, options)
            # Communicators are found by device index, which the tensor's device has and the name may lack.
            self._group.eager_connect_single_device(torch.empty(0, device=device).device)

    def send(self, peer: int, tensors: Sequence[torch.Tensor]) -> Pending[None]:
        """Starts to send byte tensors. The peer must receive tensors of equal number and sizes, in the same order."""
        return self._coalesced(self._group.send, peer, tensors)

    def receive(self, peer: int, tensors: Sequence[torch.Tensor]) -> Pending[None]:
        """Starts to receive byte tensors."""
        return self._coalesced(self._group.recv, peer, tensors)

    def _coalesced(
        self, call: Callable[[list[torch.Tensor], int, int], object], peer: int, tensors: Sequence[torch.Tensor]
    ) -> NcclWork:
        """Starts one kernel for all tensors. Otherwise each would have its own, one after another."""
        with torch.cuda.device(self.device):
            self._group._start_coalescing()
            try:
                for tensor in tensors:
                    call([tensor], peer, 0)  # NCCL has no tags
            finally:
                work = self._group._end_coalescing()
        return NcclWork(work)

    def abort(self) -> None:
        """Ends everything under way. Waits a while; logs a warning if NCCL does not end it."""
        worker = Worker("refit-c10d-abort")
        try:
            worker.submit(self._group.abort).result(_ABORT_S)
        except (TimeoutError, RuntimeError) as error:
            logger.warning(
                "refit: NCCL did not end what was under way within %.0f s (%s); restart this process",
                _ABORT_S,
                describe_error(error),
            )
        finally:
            worker.close(0.0)


@contextmanager
def _errors_left_to_the_caller() -> Iterator[None]:
    """Makes groups on whose errors torch's watchdog does not end the process.

    The death of a peer is such an error, but no reason to end an engine. The waiting caller sees the error and tells
    the other parties. The constructor reads this setting only from the environment.
    """
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = before


class NcclWork:
    """Work that was submitted to NCCL."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        """Whether the GPU has completed it."""
        return bool(self._work.is_completed())

    def result(self) -> None:
        """Raises if the work failed. The current stream waits for it."""
        self._work.wait()
