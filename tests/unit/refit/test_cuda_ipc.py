"""The transport over CUDA IPC with a GPU that is made of shared memory: all but what CUDA itself does."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.packets import Sender, Unpacker, links_of
from megatron_patches.refit.plan import Plan, make_plan
from megatron_patches.refit.ports import Bits, Bytes, Done, Payload, Pending, host_bytes
from megatron_patches.refit.pump import receive_version, send_version
from megatron_patches.refit.staging import StagingPool
from megatron_patches.refit.transports.base import Offer, Place, TransportName
from megatron_patches.refit.transports.cuda_ipc import CudaIpcTransport
from megatron_patches.refit.transports.links import ReceivingEnd, SendingEnd
from megatron_patches.refit.transports.opening import open_transport
from tests.unit.refit.test_joint import coverable, memory, values

SLOT = 64


class HostGpu:
    """A GPU's memory as files without a name, which other processes open by the descriptor of their maker."""

    def __init__(self, number: int, *, closed: bool = False) -> None:
        self.uuid, self._closed = f"GPU-{number}", closed
        self.out: list[str] = []

    def export(self, nbytes: int) -> Exported:
        return Exported(nbytes, self.out)

    def open(self, handle: bytes) -> Opened:
        if self._closed:
            raise PartyFailedError("cudaIpcOpenMemHandle: peer access is not supported between these two devices")
        return Opened(handle, self.out)

    def allocate(self, nbytes: int) -> Payload:
        return np.zeros(nbytes, dtype=np.uint8)


class Exported:
    def __init__(self, nbytes: int, out: list[str]) -> None:
        self._file = os.memfd_create("gpu")
        os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, nbytes)
        self.handle = f"/proc/{os.getpid()}/fd/{self._file}".encode()
        self._out = out
        out.append("exported")

    def part(self, start: int, stop: int) -> Payload:
        content: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        return content[start:stop]

    def close(self) -> None:
        os.close(self._file)
        self._out.remove("exported")


class Opened:
    def __init__(self, handle: bytes, out: list[str]) -> None:
        with open(handle.decode(), "rb") as file:  # noqa: PTH123 - not a path but a descriptor
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._out = out
        out.append("opened")

    def copy(self, start: int, target: Payload) -> Pending[None]:
        into = host_bytes(target)
        into[...] = np.frombuffer(self._map, dtype=np.uint8)[start : start + into.size]
        return Done(None)

    def close(self) -> None:
        self._map.close()
        self._out.remove("opened")


def check() -> None:
    """Nobody has failed."""


class Ends:
    """All ends of a plan, each with a GPU of its own."""

    def __init__(self, plan: Plan, sources: int, destinations: int, gpus: list[HostGpu]) -> None:
        self.plan, self.sources = plan, sources
        self.pools = [StagingPool(1 << 12) for _ in gpus]
        places = [
            Place(party=i, sources=sources, host="127.0.0.1", device="cuda", pool=pool, timeout_s=10.0)
            for i, pool in enumerate(self.pools)
        ]
        made = [CudaIpcTransport(place, gpu) for place, gpu in zip(places, gpus, strict=True)]
        self.senders = [SendingEnd(places[i], made[i]) for i in range(sources)]
        self.receivers = [ReceivingEnd(places[i], made[i]) for i in range(sources, sources + destinations)]
        self.ends: list[SendingEnd | ReceivingEnd] = [*self.senders, *self.receivers]
        self.offers: list[Offer] = [end.offer(SLOT) for end in self.ends]

    def all(self, send: Callable[[int], Any], take: Callable[[int], Any]) -> list[Any]:
        jobs = [(send, i) for i in range(len(self.senders))] + [(take, i) for i in range(len(self.receivers))]
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [pool.submit(call, rank) for call, rank in jobs]
            return [future.exception() for future in futures]

    def connect(self) -> list[Any]:
        links, digest = links_of(self.plan), self.plan.digest
        return self.all(
            lambda i: self.senders[i].connect(self.offers, {d: SLOT for s, d in links if s == i}, digest, check),
            lambda i: self.receivers[i].connect(self.offers, {s: SLOT for s, d in links if d == i}, digest, check),
        )

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("seed", range(8))
def test_versions_arrive_and_every_handle_is_given_back(seed: int) -> None:
    case = coverable(seed)
    plan = make_plan(*case.sides)
    gpus = [HostGpu(i) for i in range(len(case.sources) + len(case.destinations))]
    ends = Ends(plan, len(case.sources), len(case.destinations), gpus)
    assert set(ends.connect()) == {None}
    limits = dict.fromkeys(links_of(plan), SLOT)
    for version in (1, 2):
        dense = values(case, version)
        received: list[dict[str, Bits]] = [memory(manifest, None) for manifest in case.destinations]

        def send(rank: int, version: int = version, dense: dict[str, np.ndarray] = dense) -> None:
            sender = Sender(plan, rank, memory(case.sources[rank], dense), limits)
            send_version(sender, ends.senders[rank], version, check)

        def take(rank: int, version: int = version, received: list[dict[str, Bits]] = received) -> None:
            unpacker = Unpacker(plan, case.destinations[rank], limits)
            unpacker.begin(version, received[rank])
            receive_version(unpacker, ends.receivers[rank], check)
            unpacker.verify()

        assert set(ends.all(send, take)) == {None}
        for manifest, found in zip(case.destinations, received, strict=True):
            for name, expected in memory(manifest, dense).items():
                assert np.array_equal(found[name], expected)
    assert {name for gpu in gpus for name in gpu.out} == {"exported", "opened"}
    ends.close()
    assert not any(gpu.out for gpu in gpus)
    assert all(pool.leased_bytes == 0 < pool.peak_bytes or not pool.peak_bytes for pool in ends.pools)


def test_gpus_that_cannot_reach_each_other_are_named() -> None:
    case = coverable(1)
    plan = make_plan(*case.sides)
    count = len(case.sources)
    gpus = [HostGpu(i, closed=i >= count) for i in range(count + len(case.destinations))]
    ends = Ends(plan, count, len(case.destinations), gpus)
    failures = ends.connect()
    ends.close()
    words = r"GPU GPU-(\d+) cannot reach memory of GPU GPU-(\d+), of source rank \2: cudaIpcOpenMemHandle: peer access"
    found = [re.search(words, str(failure)) for failure in failures]
    assert any(match is not None and int(match[1]) >= count > int(match[2]) for match in found)
    assert all(isinstance(failure, PartyFailedError) for failure in failures)
    assert not any(gpu.out for gpu in gpus)


def test_memory_on_the_host_is_refused() -> None:
    place = Place(party=0, sources=1, host="127.0.0.1", device="cpu", pool=StagingPool(64), timeout_s=1.0)
    with pytest.raises(PartyFailedError, match="cuda_ipc moves memory of GPUs and this party's storages are on cpu"):
        open_transport(TransportName.CUDA_IPC, place)
