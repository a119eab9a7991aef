"""The torch.distributed process groups of all parties of a refit, through which ``c10d`` sends.

[Note: NCCL] ``torch.distributed`` sends what is coalesced, even to one peer, on the communicator of the whole group,
and anything else on one that it makes for the pair. Here all is coalesced and there is the one communicator, made by
all parties together. One for each pair would order nothing either: a destination with many sources has no room for
that many kernels that wait, so some would not run; and each takes memory, time and threads. See [Note: turns] in
:mod:`megatron_patches.refit.transports.turns` for why the one is enough.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.exchange import describe_error
from megatron_patches.refit.ports import Pending
from megatron_patches.refit.transports.worker import Worker

logger = logging.getLogger(__name__)

_ABORT_S = 20.0  # for NCCL to end what is under way
_WATCHDOG_S = 600.0  # at least: torch's watchdog complains then; whoever waits gives up long before, with a reason
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Way(Protocol):
    """One party's side of a link."""

    def send(self, tensors: Sequence[torch.Tensor], tag: int) -> Pending[None]:
        """Begins to send tensors, of bytes; the peer receives as many, of the same sizes, under the same tag."""

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Pending[None]:
        """Begins to receive tensors."""

    def close(self) -> None:
        """Ends it; the group was ended before."""


class Group(Protocol):
    """All parties, numbered, as one of them sees them."""

    @property
    def ordered(self) -> bool:
        """Whether what this party begins ends in the order in which it was begun, whomever it is with."""

    @property
    def device(self) -> str:
        """Where tensors lie."""

    def way(self, peer: int) -> Way:
        """This party's side of a link to another."""

    def abort(self) -> None:
        """Makes everything that is under way end."""


class NcclGroup:
    """NCCL between GPUs. Making it returns when all parties do.

    Args:
        store: what parties meet at.
        party: the own number.
        size: number of parties.
        device: torch's name of the own GPU.
        timeout_s: seconds that one wait of the caller's may take.
    """

    ordered = True

    def __init__(self, store: dist.Store, party: int, size: int, device: str, timeout_s: float) -> None:
        self.device = device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=max(_WATCHDOG_S, 2 * timeout_s))
        with torch.cuda.device(device):
            with _errors_left_to_the_caller():
                self._group: Any = dist.ProcessGroupNCCL(store, party, size, options)
            # A tensor's device has a number where the name has none; communicators are found by it.
            self._group.eager_connect_single_device(torch.empty(0, device=device).device)

    def way(self, peer: int) -> NcclWay:
        """See :class:`Group`."""
        return NcclWay(self._group, peer, self.device)

    def abort(self) -> None:
        """See :class:`Group`. Waits a while; if NCCL does not end it, that is logged."""
        worker = Worker("refit-c10d-abort")
        try:
            worker.submit(self._group.abort).result(_ABORT_S)
        except (TimeoutError, RuntimeError) as error:
            logger.warning(
                "refit: NCCL did not end what was under way within %.0f s (%s); this process needs to be started anew",
                _ABORT_S,
                describe_error(error),
            )
        finally:
            worker.close(0.0)


@contextmanager
def _errors_left_to_the_caller() -> Iterator[None]:
    """Makes groups at whose errors torch's watchdog does not end the process.

    A peer that dies is such an error, and no reason for an engine to die. Whoever waits sees it, and tells the others.
    The constructor reads it from the environment alone.
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


class NcclWay:
    """One party's side of a link over NCCL.

    Args:
        group: the process group.
        peer: rank of the other party in it.
        device: the own GPU.
    """

    def __init__(self, group: Any, peer: int, device: str) -> None:
        self._group, self._peer, self._device = group, peer, device

    def send(self, tensors: Sequence[torch.Tensor], tag: int) -> NcclWork:
        """See :class:`Way`; NCCL has no tags and goes by the order."""
        return self._coalesced(self._group.send, tensors, tag)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> NcclWork:
        """See :class:`Way`."""
        return self._coalesced(self._group.recv, tensors, tag)

    def close(self) -> None:
        """See :class:`Way`."""

    def _coalesced(
        self, call: Callable[[list[torch.Tensor], int, int], object], tensors: Sequence[torch.Tensor], tag: int
    ) -> NcclWork:
        """One kernel for all tensors; each would need one of its own, one after the other."""
        with torch.cuda.device(self._device):
            self._group._start_coalescing()
            try:
                for tensor in tensors:
                    call([tensor], self._peer, tag)
            finally:
                work = self._group._end_coalescing()
        return NcclWork(work)


class NcclWork:
    """What NCCL is to do."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def done(self) -> bool:
        """Whether the GPU has done it."""
        return bool(self._work.is_completed())

    def result(self) -> None:
        """Raises if it failed; the current stream waits for it."""
        self._work.wait()


class GlooGroup:
    """Gloo between hosts' memories.

    Args:
        store: what parties meet at.
        party: the own number.
        size: number of parties.
        host: the own address.
        timeout_s: seconds that one message may take.
    """

    ordered = False
    device = "cpu"

    def __init__(self, store: dist.Store, party: int, size: int, host: str, timeout_s: float) -> None:
        gloo: Any = dist.ProcessGroupGloo  # whose options the type stubs leave out
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        # The address that reached the rendezvous; gloo would take whatever the host's name resolves to.
        options._devices = [gloo.create_device(hostname=host)]
        self._group: Any = gloo(store, party, size, options)

    def way(self, peer: int) -> GlooWay:
        """See :class:`Group`."""
        return GlooWay(self._group, peer)

    def abort(self) -> None:
        """See :class:`Group`."""
        self._group.abort()


class GlooWay:
    """One party's side of a link over gloo, whose calls wait; it has a thread.

    Args:
        group: the process group.
        peer: rank of the other party in it.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer
        self._worker = Worker(f"refit-with-{peer}")

    def send(self, tensors: Sequence[torch.Tensor], tag: int) -> Pending[None]:
        """See :class:`Way`."""
        return self._worker.submit(lambda: self._each(self._group.send, tensors, tag))

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Pending[None]:
        """See :class:`Way`."""
        return self._worker.submit(lambda: self._each(self._group.recv, tensors, tag))

    def close(self) -> None:
        """See :class:`Way`."""
        self._worker.close()

    def _each(
        self, call: Callable[[list[torch.Tensor], int, int], Any], tensors: Sequence[torch.Tensor], tag: int
    ) -> None:
        """One after the other.

        Raises:
            PartyFailedError: if the peer has gone, or the time is over.
        """
        for tensor in tensors:
            try:
                call([tensor], self._peer, tag).wait()
            except RuntimeError as error:
                raise PartyFailedError(f"gloo, with party {self._peer}: {error}") from error


def open_group(store: dist.Store, party: int, devices: Sequence[str], host: str, timeout_s: float) -> Group:
    """The group of all parties; made by all of them at once.

    Args:
        store: what they meet at.
        party: the own number.
        devices: torch's names of the devices that their storages lie on, by party.
        host: the own address.
        timeout_s: seconds that one wait may take.
    """
    store = dist.PrefixStore("refit", store)
    if all(torch.device(device).type == "cuda" for device in devices):
        return NcclGroup(store, party, len(devices), devices[party], timeout_s)
    return GlooGroup(store, party, len(devices), host, timeout_s)
