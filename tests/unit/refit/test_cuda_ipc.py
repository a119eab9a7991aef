"""The transport over CUDA IPC with a GPU that is made of shared memory: all but what CUDA itself does."""

from __future__ import annotations

import mmap
import os
import re
import socket
from typing import Any, Never, cast

import msgspec
import numpy as np
import pytest

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.memory.loads import Reach, Terms, cut_into_loads
from megatron_patches.refit.memory.ports import Bits, Bytes, Done, Memory, Payload, Pending, host_bytes
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.staging import SLOTS, StagingPool
from megatron_patches.refit.parties.party import open_transport
from megatron_patches.refit.planning.plan import Plan, make_plan
from megatron_patches.refit.transports import frames
from megatron_patches.refit.transports.base import LinkEnd, Place, TransportName
from megatron_patches.refit.transports.cuda_ipc import CudaIpcIncoming, CudaIpcTransport
from megatron_patches.refit.transports.cuda_mapped import Chunk, ChunkShelf, Fetch, MappedRow
from megatron_patches.refit.transports.cuda_runtime import Location
from megatron_patches.refit.transports.direct_copies import Int64s, Rows
from megatron_patches.refit.transports.frames import Patience
from megatron_patches.refit.transports.pump import send_version
from tests.unit.refit.host_driver import PAGE, HostDriver, content_at
from tests.unit.refit.link_ends import SLOT, Ends, check
from tests.unit.refit.test_parties import coverable, memory, values


class HostGpu:
    """A GPU's memory as files without a name, which others open by their maker's descriptor, or ask for in chunks."""

    def __init__(self, number: int, *, closed: bool = False) -> None:
        self.uuid, self._closed = f"GPU-{number}", closed
        self.exports = True
        self.out: list[str] = []
        self.copied: list[int] = []
        self.arenas: list[Exported] = []
        self.driver = HostDriver()
        self.segments: list[tuple[int, int]] = []
        self._shelf = ChunkShelf(self.driver)

    def settle_in_chunks(self, storages: dict[str, Bits], leave_out: int) -> dict[str, Bits]:
        """As :meth:`settle`, into one row of chunks of one page each, which many a storage lies across."""
        sizes = {name: -(-bits.nbytes // 8) * 8 for name, bits in storages.items()}
        start = PAGE - 24
        count = -(-(start + sum(sizes.values())) // PAGE)
        address = self.driver.segment([PAGE] * count)
        self.segments.append((address, PAGE * count))
        found = dict(storages)
        for index, (name, bits) in enumerate(storages.items()):
            if index % 3 != leave_out:
                room = np.frombuffer(content_at(address + start, bits.nbytes), dtype=np.uint8)
                found[name] = room.view(bits.dtype)
                found[name][...] = bits
            start += sizes[name]
        return found

    def settle(self, storages: dict[str, Bits], leave_out: int) -> dict[str, Bits]:
        """Moves storages into memory that can be exported, one allocation for all; every third into other memory."""
        sizes = {name: -(-bits.nbytes // 8) * 8 for name, bits in storages.items()}
        arena = Exported(8 + sum(sizes.values()), self.out)
        self.arenas.append(arena)
        found, start = dict(storages), 8
        for index, (name, bits) in enumerate(storages.items()):
            if index % 3 != leave_out:
                found[name] = host_bytes(arena.part(start, start + bits.nbytes)).view(bits.dtype)
                found[name][...] = bits
            start += sizes[name]
        return found

    def locate(self, storages: Memory) -> dict[str, Location]:
        found = {}
        for name, bits in storages.items():
            for arena in self.arenas:
                start = bits.ctypes.data - arena.address  # type: ignore[union-attr]
                if 0 <= start < arena.nbytes:
                    found[name] = Location(arena.handle, start)
        spans = {}
        for name, bits in storages.items():
            at = bits.ctypes.data  # type: ignore[union-attr]
            if any(0 <= at - address < nbytes for address, nbytes in self.segments):
                spans[name] = at, at + bits.nbytes
        for name, lying in self._shelf.locate(spans).items():
            found[name] = Location(b"row" + msgspec.msgpack.encode(lying.chunks), lying.start)
        return found

    def descriptor(self, number: int) -> int:
        if not self.exports:
            raise PartyFailedError("cuMemExportToShareableHandle: out of memory")
        return self._shelf.export(number)

    def close(self) -> None:
        self._shelf.close()

    def export(self, nbytes: int) -> Exported:
        return Exported(nbytes, self.out)

    def open(self, handle: bytes, fetch: Fetch) -> Opened:
        if self._closed:
            raise PartyFailedError("cudaIpcOpenMemHandle: peer access is not supported between these two devices")
        if handle.startswith(b"row"):
            chunks = msgspec.msgpack.decode(handle[3:], type=tuple[Chunk, ...])
            return OpenedRow(MappedRow(self.driver, 7, chunks, fetch), sum(chunk.nbytes for chunk in chunks), self.out)
        with open(handle.decode(), "rb") as file:  # noqa: PTH123 - not a path but a descriptor
            return Opened(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), self.out)

    def address_of(self, memory: Bits | Payload) -> int:
        assert isinstance(memory, np.ndarray)
        return int(memory.ctypes.data)

    def copier(self) -> HostCopier:
        return HostCopier(self.copied)

    def allocate(self, nbytes: int) -> Payload:
        return np.zeros(nbytes, dtype=np.uint8)


class Exported:
    def __init__(self, nbytes: int, out: list[str]) -> None:
        self._file = os.memfd_create("gpu")
        os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, nbytes)
        self.nbytes = nbytes
        self.address = int(np.frombuffer(self._map, dtype=np.uint8).ctypes.data)
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
    def __init__(self, content: mmap.mmap | memoryview, out: list[str]) -> None:
        self._content, self._out = content, out
        out.append("opened")

    @property
    def address(self) -> int:
        return int(np.frombuffer(self._content, dtype=np.uint8).ctypes.data)

    def close(self) -> None:
        if isinstance(self._content, mmap.mmap):
            self._content.close()
        self._out.remove("opened")


class HostCopier:
    """Copies at once; as strict as a GPU about what there is to copy."""

    def __init__(self, copied: list[int]) -> None:
        self._copied = copied

    def runs(self, sources: Int64s, targets: Int64s, nbytes: Int64s) -> None:
        assert sources.shape == targets.shape == nbytes.shape
        assert nbytes.min() > 0
        for source, target, length in zip(sources.tolist(), targets.tolist(), nbytes.tolist(), strict=True):
            self.rows(source, target, Rows(1, length, length, length))

    def slot(self, source: int, target: int, nbytes: int) -> None:
        assert nbytes > 0
        self.rows(source, target, Rows(1, nbytes, nbytes, nbytes))

    def rows(self, source: int, target: int, rows: Rows) -> None:
        self._copied.append(rows.count * rows.nbytes)
        for row in range(rows.count):
            theirs = content_at(source + row * rows.source_step, rows.nbytes)
            content_at(target + row * rows.target_step, rows.nbytes)[:] = theirs

    def ended(self) -> Pending[None]:
        return Done(None)


class OpenedRow(Opened):
    def __init__(self, row: MappedRow, nbytes: int, out: list[str]) -> None:
        super().__init__(content_at(row.address, nbytes), out)
        self._row = row

    def close(self) -> None:
        super().close()
        self._row.close()


def transport_of(place: Place, gpu: HostGpu) -> CudaIpcTransport:
    return CudaIpcTransport(place, cast(Any, gpu))


def ends_of(
    plan: Plan, held: list[dict[str, Bits]], destinations: int, gpus: list[HostGpu], timeout_s: float = 10.0
) -> Ends:
    def make(place: Place) -> CudaIpcTransport:
        return transport_of(place, gpus[place.party])

    return Ends(plan, held, destinations, "cuda", make, timeout_s)


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_versions_arrive_and_every_handle_is_given_back(seed: int, in_chunks: bool) -> None:
    """Some storages can be opened by others, some cannot; between versions all move."""
    case = coverable(seed)
    plan = make_plan(*case.sides)
    gpus = [HostGpu(i) for i in range(len(case.sources) + len(case.destinations))]

    def settled(rank: int, version: int) -> dict[str, Bits]:
        settle = gpus[rank].settle_in_chunks if in_chunks else gpus[rank].settle
        return settle(memory(case.sources[rank], values(case, version)), seed % 4)

    held = [settled(rank, 1) for rank in range(len(case.sources))]
    ends = ends_of(plan, held, len(case.destinations), gpus)
    assert [offer.reach for offer in ends.offers] == [Reach.ROWS] * len(gpus)
    hidden = [frozenset(offer.hidden) for offer in ends.offers]
    assert set(ends.connect()) == {None}
    terms = {link: Terms(SLOT, Reach.ROWS, hidden[link[0]], direct_bytes=8) for link in plan.by_link}
    ends.move(case, terms, (1, 2), settled)
    assert {name for gpu in gpus for name in gpu.out} == {"exported", "opened"}
    ends.close()
    for gpu in gpus:
        for arena in gpu.arenas:
            arena.close()
        for address, _ in gpu.segments:
            gpu.driver.drop(address)
        assert gpu.driver.clean
    assert not any(gpu.out for gpu in gpus)


def test_some_of_the_cases_go_directly_and_some_do_not() -> None:
    found = set()
    for seed in range(8):
        plan = make_plan(*coverable(seed).sides)
        terms = dict.fromkeys(plan.by_link, Terms(SLOT, Reach.ROWS, direct_bytes=8))
        found |= {load.direct for loads in cut_into_loads(plan.transfers, terms).values() for load in loads}
    assert found == {True, False}


def test_memory_that_cannot_be_opened_any_longer_is_named() -> None:
    gpu = HostGpu(0)
    place = Place(party=0, sources=1, host="127.0.0.1", device="cuda", pool=StagingPool(1 << 12), timeout_s=1.0)
    transport = transport_of(place, gpu)
    bits: dict[str, Bits] = {"a": np.zeros(9, np.uint16), "b": np.zeros(9, np.uint16)}
    settled = gpu.settle(bits, 1)
    assert transport.hidden(settled) == {"b"}
    told = transport.begin(settled)
    assert told is not None
    assert msgspec.msgpack.decode(told) == [[gpu.arenas[0].handle], {"a": [0, 8]}]
    assert transport.begin(dict(settled)) is None  # nothing has moved
    with pytest.raises(PartyFailedError, match=r"a \(and 0 more\) has moved into memory that other processes cannot"):
        transport.begin(bits)
    gpu.arenas[0].close()


def test_gpus_that_cannot_reach_each_other_are_named() -> None:
    case = coverable(1)
    plan = make_plan(*case.sides)
    count = len(case.sources)
    gpus = [HostGpu(i, closed=i >= count) for i in range(count + len(case.destinations))]
    held = [memory(manifest, values(case, 1)) for manifest in case.sources]
    ends = ends_of(plan, held, len(case.destinations), gpus, timeout_s=2.0)  # sources wait for links in vain
    failures = ends.connect()
    ends.close()
    words = r"GPU GPU-(\d+) cannot reach memory of GPU GPU-(\d+), of source rank \2: cudaIpcOpenMemHandle: peer access"
    found = [re.search(words, str(failure)) for failure in failures]
    assert any(match is not None and int(match[1]) >= count > int(match[2]) for match in found)
    assert all(isinstance(failure, PartyFailedError) for failure in failures)
    assert not any(gpu.out for gpu in gpus)


def test_weights_that_cannot_be_mapped_are_named_with_their_gpus() -> None:
    case = coverable(1)
    plan = make_plan(*case.sides)
    count = len(case.sources)
    gpus = [HostGpu(i) for i in range(count + len(case.destinations))]
    held = [gpus[rank].settle_in_chunks(memory(part, values(case, 1)), 3) for rank, part in enumerate(case.sources)]
    ends = ends_of(plan, held, len(case.destinations), gpus, timeout_s=2.0)
    assert set(ends.connect()) == {None}
    for gpu in gpus[count:]:
        gpu.driver.refused = "cuMemImportFromShareableHandle: operation not supported"
    failures = begun(ends, held)
    ends.close()
    linked = {link[1] for link in plan.by_link}
    words = r"GPU GPU-(\d+) cannot reach the weights of source rank (\d+) on GPU GPU-\2 where they lie: cuMemImport.*"
    for rank in linked:
        found = re.fullmatch(words, str(failures[count + rank]))
        assert found is not None
        assert int(found[1]) == count + rank
        assert found[0].endswith("another transport does not ask for that")
    assert linked
    for gpu in gpus:
        for address, _ in gpu.segments:
            gpu.driver.drop(address)
        assert gpu.driver.clean
        assert not gpu.out


def begun(ends: Ends, held: list[dict[str, Bits]]) -> list[Any]:
    """Begins a version at both sides, which no destination takes; what each end raised."""
    terms = {link: Terms(SLOT, Reach.ROWS, direct_bytes=8) for link in ends.plan.by_link}

    def send(rank: int) -> None:
        ends.senders[rank].begin(held[rank], check)
        send_version(Sender(ends.plan, rank, held[rank], terms), ends.senders[rank], 1, check)

    return ends.all(send, lambda rank: ends.receivers[rank].receive(never, never, check, wait_s=10.0))


def test_a_source_that_cannot_hand_out_its_memory_says_why() -> None:
    case = coverable(1)
    plan = make_plan(*case.sides)
    count = len(case.sources)
    gpus = [HostGpu(i) for i in range(count + len(case.destinations))]
    held = [gpus[rank].settle_in_chunks(memory(part, values(case, 1)), 3) for rank, part in enumerate(case.sources)]
    ends = ends_of(plan, held, len(case.destinations), gpus, timeout_s=2.0)
    assert set(ends.connect()) == {None}
    for gpu in gpus[:count]:
        gpu.exports = False
    failures = begun(ends, held)
    ends.close()
    # Not all of them: nobody tells a destination, so it waits for the first source that it has asked.
    assert any(str(failure) == "cuMemExportToShareableHandle: out of memory" for failure in failures[:count])
    for rank in {link[1] for link in plan.by_link}:
        assert "where they lie: waited 2 s for source rank" in str(failures[count + rank])
    for gpu in gpus:
        for address, _ in gpu.segments:
            gpu.driver.drop(address)
        assert gpu.driver.clean
        assert not gpu.out


def never(_: object) -> Never:
    raise AssertionError("no packet was announced")


def test_memory_on_the_host_is_refused() -> None:
    place = Place(party=0, sources=1, host="127.0.0.1", device="cpu", pool=StagingPool(64), timeout_s=1.0)
    with pytest.raises(PartyFailedError, match="cuda_ipc moves memory of GPUs and this party's storages are on cpu"):
        open_transport(TransportName.CUDA_IPC, place)


def place_of(party: int) -> Place:
    return Place(party=party, sources=1, host="127.0.0.1", device="cuda", pool=StagingPool(1 << 12), timeout_s=2.0)


def test_memory_of_a_source_that_goes_while_the_link_is_made_is_not_kept() -> None:
    """Whoever has it open keeps it taken on the source's GPU, push after push."""
    theirs, ours = HostGpu(0), HostGpu(1)
    exported = theirs.export(SLOTS * SLOT)
    here = place_of(1)
    transport = transport_of(here, ours)
    near, far = socket.socketpair()
    with near:
        with far:
            remote = msgspec.msgpack.encode({"uuid": theirs.uuid, "handle": exported.handle})
            frames.send(far, remote, Patience(2.0, "the other end"))
        end = LinkEnd(connection=frames.prepare(near), peer=0, slot_bytes=SLOT, patience=Patience(2.0, "a link"))
        with pytest.raises(PartyFailedError, match="lost the connection while waiting for a link"):
            transport.incoming(end)
    assert ours.out == []
    assert here.pool.leased_bytes == 0
    exported.close()


def test_all_memory_is_closed_even_where_closing_some_fails() -> None:
    closed: list[int] = []

    class Stubborn:
        def __init__(self, address: int) -> None:
            self.address = address

        def close(self) -> None:
            closed.append(self.address)
            raise PartyFailedError(f"cudaIpcCloseMemHandle: {self.address}")

    class StubbornGpu(HostGpu):
        def open(self, handle: bytes, _: Fetch) -> Any:
            return Stubborn(int(handle))

    pool, patience = StagingPool(SLOTS * SLOT), Patience(2.0, "a link")
    lease: Any = pool.lease(SLOTS * SLOT, lambda nbytes: np.zeros(nbytes, dtype=np.uint8))
    with socket.socket(socket.AF_UNIX) as unused:
        end = LinkEnd(connection=unused, peer=0, slot_bytes=SLOT, patience=patience)
        wire = CudaIpcIncoming(cast(Any, Stubborn(1)), lease, end, "GPU-1", cast(Any, StubbornGpu(0)))
    wire.begin(msgspec.msgpack.encode([[b"2", b"3"], {"a": [0, 0], "b": [1, 8]}]), patience)
    with pytest.raises(PartyFailedError, match="cudaIpcCloseMemHandle"):
        wire.close()
    assert sorted(closed) == [1, 2, 3]
    assert pool.leased_bytes == 0
