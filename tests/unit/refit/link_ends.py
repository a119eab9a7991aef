"""All ends of a plan's links in one process, a thread each."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, cast

import numpy as np

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.ports import Bits
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import Link, Plan
from megatron_patches.refit.transports.base import Offer, Place, Transport
from megatron_patches.refit.transports.cuda_ipc import _asking
from megatron_patches.refit.transports.cuda_mapped import Fetch
from megatron_patches.refit.transports.frames import Patience, prepare
from megatron_patches.refit.transports.pump import receive_version, send_version
from megatron_patches.refit.transports.receiving import ReceivingEnd
from megatron_patches.refit.transports.sending import SendingEnd, _Outgoing
from tests.support.refit_cases import Case
from tests.unit.refit.test_parties import memory, values

SLOT = 64


def check() -> None:
    """Nobody has failed."""


class Ends:
    """All ends of a plan.

    Args:
        plan: the plan.
        held: what each source holds.
        destinations: number of destinations.
        device: that all parties are on.
        make: makes the transport of a party.
        timeout_s: of every wait.
    """

    def __init__(
        self,
        plan: Plan,
        held: Sequence[dict[str, Bits]],
        destinations: int,
        device: str,
        make: Callable[[Place], Transport],
        timeout_s: float = 10.0,
    ) -> None:
        sources = len(held)
        self.plan, self._timeout_s = plan, timeout_s
        self.pools = [StagingPool(1 << 12) for _ in range(sources + destinations)]
        places = [
            Place(party=i, sources=sources, host="127.0.0.1", device=device, pool=pool, timeout_s=timeout_s)
            for i, pool in enumerate(self.pools)
        ]
        made = [make(place) for place in places]
        self.senders = [SendingEnd(places[i], made[i]) for i in range(sources)]
        self.receivers = [ReceivingEnd(places[i], made[i]) for i in range(sources, sources + destinations)]
        self.ends: list[SendingEnd | ReceivingEnd] = [*self.senders, *self.receivers]
        offers = [end.offer(SLOT, memory) for end, memory in zip(self.senders, held, strict=True)]
        self.offers: list[Offer] = [*offers, *(end.offer(SLOT) for end in self.receivers)]

    def all(self, send: Callable[[int], Any], take: Callable[[int], Any]) -> list[Any]:
        """Runs both sides; what each end raised, or None."""
        jobs = [(send, i) for i in range(len(self.senders))] + [(take, i) for i in range(len(self.receivers))]
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [pool.submit(call, rank) for call, rank in jobs]
            return [future.exception() for future in futures]

    def connect(self) -> list[Any]:
        """Makes the links; what each end raised, or None."""
        links, offers = list(self.plan.by_link), dict(enumerate(self.offers))
        digests = self.plan.digests

        def of(side: int, rank: int) -> dict[int, str]:
            return {link[1 - side]: digest for link, digest in digests.items() if link[side] == rank}

        return self.all(
            lambda i: self.senders[i].connect(offers, {d: SLOT for s, d in links if s == i}, of(0, i), check),
            lambda i: self.receivers[i].connect(offers, {s: SLOT for s, d in links if d == i}, of(1, i), check),
        )

    def move(
        self,
        case: Case,
        terms: dict[Link, Terms],
        versions: Sequence[int],
        settled: Callable[[int, int], dict[str, Bits]],
    ) -> None:
        """Moves versions from what ``settled`` gives for a rank and a version, and compares what has arrived."""
        held = [settled(rank, versions[0]) for rank in range(len(self.senders))]
        senders = [Sender(self.plan, rank, memory, terms) for rank, memory in enumerate(held)]
        unpackers = [Unpacker(self.plan, manifest, terms) for manifest in case.destinations]
        for version in versions:
            received: list[dict[str, Bits]] = [memory(manifest, None) for manifest in case.destinations]
            now = [settled(rank, version) for rank in range(len(self.senders))]
            assert self.attempt(version, senders, unpackers, now, received) == [None] * len(self.ends)
            for manifest, found in zip(case.destinations, received, strict=True):
                for name, expected in memory(manifest, values(case, version)).items():
                    assert np.array_equal(found[name], expected)

    def attempt(
        self,
        version: int,
        senders: Sequence[Sender],
        unpackers: Sequence[Unpacker],
        held: Sequence[dict[str, Bits]],
        received: Sequence[dict[str, Bits]],
    ) -> list[Any]:
        """Moves a version from ``held`` to ``received``; what each end raised, or None."""

        def send(rank: int) -> None:
            senders[rank].renew(held[rank])
            self.senders[rank].begin(held[rank], check)
            send_version(senders[rank], self.senders[rank], version, check)

        def take(rank: int) -> None:
            unpackers[rank].begin(version, received[rank])
            receive_version(unpackers[rank], self.receivers[rank], self._timeout_s, check)
            unpackers[rank].verify()

        return self.all(send, take)

    def close(self) -> None:
        """Closes all; every slot is given back."""
        for end in self.ends:
            end.close()
        assert all(pool.leased_bytes == 0 for pool in self.pools)


class _Giving(Transport):
    """The least of a transport with descriptors."""

    def __init__(self, give: Callable[[int], int]) -> None:
        self._give = give

    def descriptor(self, number: int) -> int:
        return self._give(number)

    def outgoing(self, end: Any) -> Any:
        raise NotImplementedError

    def incoming(self, end: Any) -> Any:
        raise NotImplementedError


class _Wire:
    def check(self) -> None:
        """Nothing has failed."""

    def close(self) -> None:
        """There is nothing to close."""


@contextmanager
def asked_over_a_link(
    give: Callable[[int], int], timeout_s: float = 10.0, failed: Callable[[], None] = check
) -> Iterator[Fetch]:
    """Fetches descriptors over a link whose other end is answered in another thread, until answering fails."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    place = Place(party=0, sources=1, host="", device="cpu", pool=StagingPool(0), timeout_s=10.0)
    sender, ended = SendingEnd(place, _Giving(give)), threading.Event()
    sender._links[0] = _Outgoing(prepare(far), cast(Any, _Wire()))
    sender._selector.register(far, 1, 0)

    def answer() -> None:
        with suppress(PartyFailedError):
            while not ended.is_set():
                sender._collect(0.01, Patience(10.0, "a destination", check))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield _asking(prepare(near), Patience(timeout_s, "memory", failed))
    finally:
        ended.set()
        thread.join()
        sender.close()
        near.close()
