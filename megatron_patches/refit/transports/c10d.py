"""Point to point between GPUs over an NCCL process group of torch.distributed.

The group contains trainer ranks and engine workers. It is made from its own store, without a default group, so neither
Megatron's groups nor vLLM's are affected. Both sides need the same version of torch and of NCCL.

A party has one communicator, in which all transfers take turns: see [Note: turns] in
:mod:`megatron_patches.refit.transports.turns` and [Note: NCCL] in :mod:`megatron_patches.refit.transports.c10d_groups`.
Waits poll events, so they can be ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Load, Reach
from megatron_patches.refit.memory.ports import Bits, Memory, Payload, Pending, Then, host_bytes
from megatron_patches.refit.memory.staging import SLOTS, Lease
from megatron_patches.refit.transports import frames
from megatron_patches.refit.transports.base import (
    Check,
    IncomingWire,
    LinkEnd,
    Offer,
    OutgoingWire,
    Place,
    Transport,
)
from megatron_patches.refit.transports.c10d_groups import NcclGroup
from megatron_patches.refit.transports.direct_copies import DirectCopies
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.transports.turns import Turns
from megatron_patches.refit.transports.worker import Worker, wait_for

_PAUSE_S = 0.001  # between polls of a greeting


class _Details(msgspec.Struct):
    """What a party tells the others: where its memory is and, from the first party, where the store is.

    Attributes:
        host: address of this party's machine.
        port: port of the store; 0 except from the first party.
        gpu: UUID of the GPU; empty if the party's weights are in host memory, which NCCL does not send.
        torch: version of torch.
    """

    host: str
    port: int
    gpu: str
    torch: str


_decode_details = msgspec.msgpack.Decoder(_Details).decode


class C10dTransport(Transport):
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party runs.
        make_group: makes the group.
    """

    together = True
    reach = Reach.CONTIGUOUS

    def __init__(
        self, place: Place, make_group: Callable[[dist.Store, int, int, str, float], NcclGroup] = NcclGroup
    ) -> None:
        self._place, self._make_group = place, make_group
        self._store: dist.TCPStore | None = None
        self._group: NcclGroup | None = None

    def details(self) -> bytes:
        """This party's details. The first party opens the store."""
        port = 0
        if self._place.party == 0:
            self._store = self._open_store(self._place.host)
            port = self._store.port
        gpu = "" if self._place.memory == "cpu" else str(torch.cuda.get_device_properties(self._place.device).uuid)
        details = _Details(self._place.host, port, gpu, str(torch.__version__))
        return msgspec.msgpack.encode(details)

    def connect(self, offers: Mapping[int, Offer], check: Check) -> None:
        """Makes the group.

        Raises:
            PartyFailedError: if parties have different versions of torch, one has no GPU of its own, or one does not
                join in time.
        """
        details = [_decode_details(offers[party].details) for party in sorted(offers)]
        versions = {item.torch.split("+")[0] for item in details}
        if len(versions) > 1:
            raise PartyFailedError(f"the transport c10d needs one version of torch; parties have {sorted(versions)}")
        _check_gpus([item.gpu for item in details], self._place.sources)
        what = f"the group of {len(offers)} parties"
        patience = Patience(self._place.timeout_s, what, check)
        self._group = _in_thread(lambda: self._open_group(details), patience)
        self.turns = Turns()

    def outgoing(self, end: LinkEnd) -> C10dOutgoing:
        """Greets the destination, which connects the pair."""
        group, greeting = self._open, self._buffer(1)
        self._greet(lambda: group.send(end.peer, [greeting]), end.patience)
        return C10dOutgoing(group, end.peer, self._lease(end), self.turns or Turns())

    def incoming(self, end: LinkEnd) -> C10dIncoming:
        """Waits for the source's greeting."""
        group, greeting = self._open, self._buffer(1)
        self._greet(lambda: group.receive(end.peer, [greeting]), end.patience)
        return C10dIncoming(group, end.peer, self._lease(end))

    def stop(self) -> None:
        """Aborts the group, which ends all waits of its links."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Drops the group and the store."""
        self._group, self._store, self.turns = None, None, None

    @property
    def _open(self) -> NcclGroup:
        if self._group is None:
            raise PartyFailedError("the transport c10d has made no group; connect() has not succeeded")
        return self._group

    def _open_store(self, host: str, port: int = 0) -> dist.TCPStore:
        """The first party's store at ``host`` and ``port``; without a port, one that listens on ``host`` only."""
        listener = None if port else frames.listen(host)  # the store's own listener would listen on all addresses
        port = listener.getsockname()[1] if listener is not None else port
        return dist.TCPStore(
            host,
            port,
            is_master=listener is not None,
            timeout=timedelta(seconds=self._place.timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener is not None else None,
        )

    def _open_group(self, details: Sequence[_Details]) -> NcclGroup:
        if self._store is None:
            self._store = self._open_store(details[0].host, details[0].port)
        place = self._place
        return self._make_group(self._store, place.party, len(details), place.device, place.timeout_s)

    def _greet(self, begin: Callable[[], Pending[None]], patience: Patience) -> None:
        """Connects a pair, which on NCCL waits uninterruptibly for the peer.

        Each source greets one destination after another. Each destination greets the source that has just said hello,
        which is greeting no other destination, so every greeting that has begun ends.
        """
        greeted = _in_thread(begin, patience)
        while not greeted.done():
            patience.tick()
            time.sleep(_PAUSE_S)
        greeted.result()

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._open.device)

    def _lease(self, end: LinkEnd) -> Lease[torch.Tensor]:
        """Memory of one side of a link, ``[slots, bytes]``."""
        size = end.slot_bytes
        return self._place.pool.lease(SLOTS * size, lambda nbytes: self._buffer(nbytes).view(SLOTS, size))


class C10dOutgoing(OutgoingWire):
    """A source's side of a link.

    Args:
        group: sends tensors.
        peer: the destination's number in it.
        slots: the memory.
        turns: receives what has been started.
    """

    def __init__(self, group: NcclGroup, peer: int, slots: Lease[torch.Tensor], turns: Turns) -> None:
        self._group, self._peer, self._lease, self._turns = group, peer, slots, turns
        self.slots = list(slots.buffer)
        self._pieces = _Pieces(read=True)
        self._under_way: list[Pending[None]] = []

    def start(self, slot: int, payload: Payload) -> None:  # noqa: ARG002 - NCCL matches by order
        """Sends a payload."""
        self._send([_tensor(payload)])

    def start_direct(self, load: Load, memory: Memory) -> None:
        """Sends the boxes."""
        self._send(self._pieces.of(load, memory))

    def _send(self, tensors: Sequence[torch.Tensor]) -> None:
        pending = self._group.send(self._peer, tensors)
        self._under_way.append(pending)
        self._turns.started(pending, sum(tensor.nbytes for tensor in tensors))

    def check(self) -> None:
        """Raises the errors of ended transfers."""
        for pending in [pending for pending in self._under_way if pending.done()]:
            self._under_way.remove(pending)
            pending.result()

    def close(self) -> None:
        """Returns the memory; the group must have been aborted before."""
        self._under_way.clear()
        self._lease.release()


class C10dIncoming(IncomingWire):
    """A destination's side of a link.

    Args:
        group: receives tensors.
        peer: the source's number in it.
        slots: the memory.
    """

    def __init__(self, group: NcclGroup, peer: int, slots: Lease[torch.Tensor]) -> None:
        self._group, self._peer, self._lease = group, peer, slots
        self._pieces = _Pieces(read=False)

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Receives into this side's slot of the same number, which is free if the source's is."""
        payload = self._lease.buffer[slot][:nbytes]
        return Then(self._group.receive(self._peer, [payload]), lambda _: payload)

    def fetch_direct(self, load: Load, memory: Memory) -> Pending[object]:
        """Receives the boxes."""
        return self._group.receive(self._peer, self._pieces.of(load, memory))

    def close(self) -> None:
        """Returns the memory; the group must have been aborted before."""
        self._lease.release()


def _check_gpus(gpus: Sequence[str], sources: int) -> None:
    """Refuses host memory and shared GPUs. NCCL would refuse the latter too, without naming the parties.

    Raises:
        PartyFailedError: if a party is not on a GPU, or two share one.
    """
    names = [f"trainer rank {party}" if party < sources else f"worker {party - sources}" for party in range(len(gpus))]
    first: dict[str, str] = {}
    for name, gpu in zip(names, gpus, strict=True):
        if not gpu:
            raise PartyFailedError(
                f"{name} has its weights in host memory, but c10d sends from GPU to GPU; use the transport tcp or nixl"
            )
        if gpu in first:
            raise PartyFailedError(
                f"{first[gpu]} and {name} share GPU {gpu}, which NCCL cannot send through; use the transport cuda_ipc"
            )
        first[gpu] = name


def _in_thread[T](work: Callable[[], T], patience: Patience) -> T:
    """Runs uninterruptible work in a thread and waits with patience; abandons the thread if patience ends."""
    worker = Worker("refit-c10d")
    try:
        return wait_for(worker.submit(work), patience)
    finally:
        worker.close(0.0)


class _Pieces:
    """The bytes of direct loads in place on one side, in as few pieces as both sides have in common.

    Each piece costs the host about 10 us.

    Args:
        read: whether this is the source's side.
    """

    def __init__(self, *, read: bool) -> None:
        self._read = read
        self._tables: dict[int, DirectCopies] = {}

    def of(self, load: Load, memory: Memory) -> list[torch.Tensor]:
        """The pieces of a load whose boxes lie in ``memory``.

        Raises:
            PartyFailedError: if a box is not contiguous.
        """
        table = self._tables.get(load.number)
        if table is None:
            table = DirectCopies.of(load)
            if table.rows:
                raise PartyFailedError(
                    f"load {load.number} has boxes that are not contiguous, and was announced as direct"
                )
            self._tables[load.number] = table
        runs, names = table.runs, table.sources if self._read else table.targets
        storages = [_bytes_of(memory[name]) for name in names]
        numbers, offsets = (runs.source, runs.source_offset) if self._read else (runs.target, runs.target_offset)
        pieces = zip(numbers.tolist(), offsets.tolist(), table.nbytes.tolist(), strict=True)
        return [storages[number][offset : offset + nbytes] for number, offset, nbytes in pieces]


def _bytes_of(storage: Bits | torch.Tensor) -> torch.Tensor:
    if isinstance(storage, torch.Tensor):
        return storage.detach().view(torch.uint8)
    return torch.from_numpy(storage.view(np.uint8))


def _tensor(payload: Payload) -> torch.Tensor:
    return payload if isinstance(payload, torch.Tensor) else torch.from_numpy(host_bytes(payload))
