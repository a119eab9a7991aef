"""Point to point over a torch.distributed process group: NCCL between GPUs, gloo between hosts' memories.

The group is of trainer ranks and engine workers together, made from a store of its own and of no default group, so
neither Megatron's groups nor vLLM's know of it. Both sides need the same version of torch, and of NCCL.

[Note: NCCL] A pair of parties has a communicator of its own, which is made when they first meet, so that links need
no common order. Waits look at events and can end; a communicator whose peer has gone is aborted with the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.frames import Patience
from megatron_patches.refit.loads import Load, Reach
from megatron_patches.refit.ports import Memory, Payload, Pending, Spot, host_bytes
from megatron_patches.refit.staging import SLOTS
from megatron_patches.refit.transports.base import Check, LinkEnd, NothingToTell, Offer, Place
from megatron_patches.refit.transports.worker import Outbox, Worker, wait_for

_GREETING = 63  # tag of the first message of a link; slots have the lowest tags
_DIRECT = 62  # tag of boxes that travel unpacked


class _Details(msgspec.Struct):
    """What parties tell each other: where the store is, from the first party, and where their memory is."""

    host: str
    port: int
    device: str
    torch: str


_decode_details = msgspec.msgpack.Decoder(_Details).decode


class C10dTransport:
    """See :class:`megatron_patches.refit.transports.base.Transport`.

    Args:
        place: where this party is.
    """

    one_host = False
    reach = Reach.CONTIGUOUS

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._nccl = False

    def hidden(self, memory: Memory) -> frozenset[str]:  # noqa: ARG002 - whatever it is
        """All are alike."""
        return frozenset()

    def details(self) -> bytes:
        """Where the store is; the first party opens it."""
        port = 0
        if self._place.party == 0:
            self._store = self._open_store(0, master=True)
            port = self._store.port
        details = _Details(self._place.host, port, self._place.device, str(torch.__version__))
        return msgspec.msgpack.encode(details)

    def connect(self, offers: Sequence[Offer], check: Check) -> None:
        """Makes the group.

        Raises:
            PartyFailedError: if another party has another version of torch, or does not come in time.
        """
        details = [_decode_details(offer.details) for offer in offers]
        versions = {item.torch.split("+")[0] for item in details}
        if len(versions) > 1:
            raise PartyFailedError(f"the transport c10d needs one version of torch; parties have {sorted(versions)}")
        self._nccl = all(torch.device(item.device).type == "cuda" for item in details)
        what = f"the group of {len(offers)} parties"
        patience = Patience(self._place.timeout_s, what, check)
        self._group = self._in_thread(lambda: self._make_group(details[0], len(offers)), patience)

    def outgoing(self, end: LinkEnd) -> C10dOutgoing:
        """Greets the destination, which makes the pair's connection."""
        greeting = self._buffer(1)
        self._in_thread(lambda: self._finish(self._group.send([greeting], end.peer, _GREETING)), end.patience)
        return C10dOutgoing(self._group, self._slots(end), end.peer, nccl=self._nccl)

    def incoming(self, end: LinkEnd) -> C10dIncoming:
        """Waits for the source's greeting."""
        greeting = self._buffer(1)
        self._in_thread(lambda: self._finish(self._group.recv([greeting], end.peer, _GREETING)), end.patience)
        return C10dIncoming(self._group, self._slots(end), end.peer, nccl=self._nccl)

    def stop(self) -> None:
        """Ends the group, and with it every wait of a link."""
        if self._group is not None:
            self._group.abort()

    def close(self) -> None:
        """Forgets the group and the store."""
        self._group, self._store = None, None

    def _open_store(self, port: int, *, master: bool, host: str | None = None) -> dist.TCPStore:
        return dist.TCPStore(
            host or self._place.host,
            port,
            is_master=master,
            timeout=timedelta(seconds=self._place.timeout_s),
            wait_for_workers=False,
        )

    def _make_group(self, first: _Details, size: int) -> Any:
        if self._store is None:
            self._store = self._open_store(first.port, master=False, host=first.host)
        store = dist.PrefixStore("refit", self._store)
        timeout = timedelta(seconds=self._place.timeout_s)
        options: Any
        if self._nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, self._place.party, size, options)
        gloo: Any = dist.ProcessGroupGloo  # whose options the type stubs leave out
        options = gloo._Options()
        options._timeout = timeout
        # The address that reached the rendezvous; gloo would take whatever the host's name resolves to.
        options._devices = [gloo.create_device(hostname=self._place.host)]
        return gloo(store, self._place.party, size, options)

    def _in_thread[T](self, work: Callable[[], T], patience: Patience) -> T:
        """Has something done that cannot be interrupted; waits with patience, and leaves it behind if that ends."""

        def on_device() -> T:
            with torch.cuda.device(self._place.device) if self._nccl else nullcontext():
                return work()

        worker = Worker("refit-c10d")
        try:
            return wait_for(worker.submit(on_device), patience)
        finally:
            worker.close(0.0)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._place.device if self._nccl else "cpu")

    def _slots(self, end: LinkEnd) -> _Slots:
        return _Slots(self._place, end.slot_bytes, self._buffer)

    def _finish(self, work: Any) -> None:
        work.wait()
        if self._nccl:
            torch.cuda.synchronize(self._place.device)


class _Slots:
    """Memory of one side of a link."""

    def __init__(self, place: Place, slot_bytes: int, make: Callable[[int], torch.Tensor]) -> None:
        self._lease = place.pool.lease(SLOTS * slot_bytes, make)
        whole = self._lease.buffer
        self.tensors = [whole[index * slot_bytes : (index + 1) * slot_bytes] for index in range(SLOTS)]

    def release(self) -> None:
        """Gives it back."""
        self._lease.release()


class C10dOutgoing(NothingToTell):
    """A source's side of a link.

    Args:
        group: the group.
        slots: the memory.
        peer: rank of the destination in the group.
        nccl: whether the group is NCCL's.
    """

    def __init__(self, group: Any, slots: _Slots, peer: int, *, nccl: bool) -> None:
        self._group, self._slots, self._peer, self._nccl = group, slots, peer, nccl
        self._outbox = Outbox(f"refit-to-{peer}")
        self._under_way: list[Any] = []

    @property
    def slots(self) -> Sequence[Payload]:
        """Memory to pack into."""
        return self._slots.tensors

    def start(self, slot: int, payload: Payload) -> None:
        """Sends a payload: NCCL at once, in a stream of its own; gloo in the link's thread."""
        self._send([payload], slot)

    def start_direct(self, places: Sequence[Spot]) -> None:
        """Sends the boxes one after the other."""
        self._send([spot.payload() for spot in places], _DIRECT)

    def _send(self, payloads: Sequence[Payload], tag: int) -> None:
        tensors = [_tensor(payload) for payload in payloads]
        if self._nccl:
            works = _coalesced(
                self._group, [partial(self._group.send, [tensor], self._peer, tag) for tensor in tensors]
            )
            self._under_way += works
            return

        def send() -> None:
            for tensor in tensors:
                _complete(self._group.send([tensor], self._peer, tag))

        self._outbox.put(send)

    def check(self) -> None:
        """Raises what sending raised."""
        self._outbox.check()
        for work in [work for work in self._under_way if work.is_completed()]:
            self._under_way.remove(work)
            work.wait()

    def close(self) -> None:
        """Ends it; the group was ended before."""
        self._outbox.close()
        self._under_way.clear()
        self._slots.release()


class C10dIncoming(NothingToTell):
    """A destination's side of a link.

    Args:
        group: the group.
        slots: the memory.
        peer: rank of the source in the group.
        nccl: whether the group is NCCL's.
    """

    def __init__(self, group: Any, slots: _Slots, peer: int, *, nccl: bool) -> None:
        self._group, self._slots, self._peer, self._nccl = group, slots, peer, nccl
        self._worker = Worker(f"refit-from-{peer}")

    def fetch(self, slot: int, nbytes: int) -> Pending[Payload]:
        """Receives into the own slot of the same number, which is free if the source's is."""
        payload = self._slots.tensors[slot][:nbytes]
        return self._receive([payload], slot, payload)

    def fetch_direct(self, load: Load, places: Sequence[Spot]) -> Pending[object]:  # noqa: ARG002
        """Receives the boxes one after the other."""
        return self._receive([spot.payload() for spot in places], _DIRECT, None)

    def _receive[T](self, payloads: Sequence[Payload], tag: int, result: T) -> Pending[T]:
        tensors = [_tensor(payload) for payload in payloads]
        if self._nccl:
            works = _coalesced(
                self._group, [partial(self._group.recv, [tensor], self._peer, tag) for tensor in tensors]
            )
            return _Received(works, result)

        def receive() -> T:
            for tensor in tensors:
                _complete(self._group.recv([tensor], self._peer, tag))
            return result

        return self._worker.submit(receive)

    def close(self) -> None:
        """Ends it; the group was ended before."""
        self._worker.close()
        self._slots.release()


def _coalesced(group: Any, calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Has NCCL do what ``calls`` begin in one kernel; each would need one of its own, one after the other."""
    if len(calls) == 1:
        return [calls[0]()]
    group._start_coalescing()
    try:
        for call in calls:
            call()
    finally:
        work = group._end_coalescing()
    return [work]


class _Received[T]:
    """What NCCL receives, in order."""

    def __init__(self, works: Sequence[Any], result: T) -> None:
        self._works, self._result = works, result

    def done(self) -> bool:
        return bool(self._works[-1].is_completed())

    def result(self) -> T:
        for work in self._works:
            work.wait()
        return self._result


def _tensor(payload: Payload) -> torch.Tensor:
    return payload if isinstance(payload, torch.Tensor) else torch.from_numpy(host_bytes(payload))


def _complete(work: Any) -> None:
    """Waits for gloo, whose time-out is the group's.

    Raises:
        PartyFailedError: if the peer has gone, or the time is over.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise PartyFailedError(f"gloo: {error}") from error
