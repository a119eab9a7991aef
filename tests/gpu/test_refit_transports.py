"""Every transport between processes whose weights lie on GPUs, in memory of every kind; on one GPU they share it."""

from __future__ import annotations

import functools
import importlib.util
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial

import numpy as np
import pytest
import torch
from cuda.bindings import driver as cuda
from torch._C._distributed_c10d import _SymmetricMemory

from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.control.messages import Held, Invitation
from megatron_patches.refit.control.rendezvous import Rendezvous
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.delta import Base, PayloadKind
from megatron_patches.refit.memory.loads import Reach, cut_into_loads
from megatron_patches.refit.parties.destination import DestinationParty
from megatron_patches.refit.parties.registry import Registry
from megatron_patches.refit.parties.source import SourceParty
from megatron_patches.refit.parties.terms import LinkOptions
from megatron_patches.refit.transports import cuda_mapped, turns
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.transports.cuda_ipc import CudaIpcTransport
from megatron_patches.refit.transports.cuda_runtime import CudaRuntime, MappedHandle, decode_handle
from tests.gpu.devices import needs_gpus
from tests.support.launch import RanksFailedError, WorkerPool, run_distributed

SPECS = (
    TensorSpec("a", (1030, 700), "bfloat16"),
    TensorSpec("b", (256, 513, 4), "float32"),
    TensorSpec("c", (998,), "float8_e4m3fn"),
    TensorSpec("d", (12, 1000), "int64"),
    TensorSpec("rows", (640, 1024), "bfloat16"),
    TensorSpec("contiguous", (2500, 300), "bfloat16"),
    TensorSpec("whole", (2100, 300), "bfloat16"),
)
INTEGERS = {"bfloat16": torch.int16, "float32": torch.int32, "float8_e4m3fn": torch.int8, "int64": torch.int64}
STAGING = 1 << 20  # less than half of what is moved
VERSIONS = (1, 2, 3)
UNTRANSPOSED = ("rows", "contiguous", "whole", "wide")
GAPLESS = ("contiguous", "whole")
PLACED = (
    TensorSpec("a", (1030, 700), "bfloat16"),  # transposed on one side, so it is packed
    TensorSpec("rows", (641, 1024), "bfloat16"),
    TensorSpec("contiguous", (2500, 300), "float32"),
    TensorSpec("wide", (6007, 4096), "bfloat16"),  # half of it is longer than a chunk of an expandable segment
)
CHUNK = 20 << 20
LASTING = 51 * CHUNK + 12345
POISON = 0x5A


def content(spec: TensorSpec, version: int) -> torch.Tensor:
    rng = np.random.default_rng([version, *spec.name.encode()])
    dtype = INTEGERS[spec.dtype]
    flat = np.frombuffer(rng.bytes(spec.nbytes), dtype=f"i{dtype.itemsize}").copy()
    return torch.from_numpy(flat).view(spec.shape)


def manifest(rank: int, ranks: int, *, by_columns: bool, specs: Sequence[TensorSpec] = SPECS) -> Manifest:
    """An equal share of every tensor, of its rows; or of its columns, which lie transposed behind a gap.

    The columns of "rows" and "wide" are not transposed, and "contiguous" is cut by rows, without gaps, on both sides.
    Who has columns of others has all of "whole".
    """
    storages, placements = [], []
    for spec in specs:
        dim = len(spec.shape) - 1 if by_columns and spec.name != "contiguous" else 0
        extent = spec.shape[dim]
        box = spec.box.with_range(dim, extent * rank // ranks, extent * (rank + 1) // ranks)
        if by_columns and spec.name == "whole":
            box = spec.box
        transposed = by_columns and spec.name not in UNTRANSPOSED
        order = range(len(box.shape)) if transposed else reversed(range(len(box.shape)))
        strides, step = [0] * len(box.shape), 1
        for at in order:
            strides[at] = step
            step *= box.shape[at] + int(spec.name not in GAPLESS)
        storages.append(Storage(spec.name, spec.dtype, step + 8, step + 8))
        placements.append(Placement(box, View(spec.name, 8, box.shape, tuple(strides))))
    return Manifest(rank, "here", tuple(storages), tuple(placements))


def memory(part: Manifest, version: int | None, device: torch.device, changes: int = 0) -> dict[str, torch.Tensor]:
    """What a party holds of a version, after some changes to 3 % of the elements each."""
    found = {}
    for spec, placement, storage in zip(SPECS, part.placements, part.storages, strict=True):
        found[spec.name] = torch.zeros(storage.numel, dtype=INTEGERS[spec.dtype], device=device)
        if version is not None:
            box = placement.box
            region = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
            whole = content(spec, version)
            for number in range(changes):
                rng = np.random.default_rng([number, *spec.name.encode()])
                whole[torch.from_numpy(rng.random(spec.shape) < 0.03)] ^= 1
            placement.view.tensor(found[spec.name]).copy_(whole[region])
    return found


def changes_body(rank: int, world_size: int, invitation: Invitation, transport: TransportName) -> list[int]:
    """Versions of which each changes 3 % of the last one's elements, from the first half of the ranks to the second.

    Returns a source's bytes sent, by version.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    sources = world_size // 2
    assembly = Assembly(invitation, rank, f"party {rank}")
    options = LinkOptions(transport=transport, staging_bytes=4 * STAGING, sources=sources, payload=PayloadKind.DELTA)
    sent: list[int] = []
    party: SourceParty | DestinationParty
    is_source = rank < sources
    part = manifest(rank if is_source else rank - sources, sources, by_columns=not is_source)
    before: Base | None = None
    if is_source:
        party = SourceParty(assembly, options, str(device))
        party.prepare(lambda: Held({}, {spec.name: spec.shape for spec in SPECS}, part))
    else:
        party = DestinationParty(assembly, options, str(device))
        party.prepare(lambda _: part)
    for version in VERSIONS:
        expected = memory(part, 0, device, version)
        if isinstance(party, SourceParty):
            moved = party.push(version, lambda: expected, before)  # noqa: B023 - called at once
            sent.append(moved.bytes_by_source[rank])
            before = Base(version, {name: held.clone() for name, held in expected.items()})
        else:
            room = memory(part, None, device)
            step = assembly.next_step
            received = party.receive(version, step, version > 1, lambda: room, base=lambda: before)  # noqa: B023
            for name, found in expected.items():
                assert torch.equal(torch.as_tensor(received[name]), found), name
            before = Base(version, received)
    party.close()
    assert party.staging.leased_bytes == 0
    return sent


def body(
    rank: int, world_size: int, invitation: Invitation, transport: TransportName, load_bytes: int | None = None
) -> tuple[int, int]:
    """Moves some versions from the first half of the ranks to the second; the most that packets took, direct loads.

    With ``load_bytes``, direct loads are no larger, and a source goes to the next destination after some of them.
    """
    direct = 0
    if load_bytes is not None:
        turns.WINDOW_BYTES, turns.TURN_BYTES = 2 * load_bytes, 5 * load_bytes
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    sources = world_size // 2
    assembly = Assembly(invitation, rank, f"party {rank}")
    options = LinkOptions(transport=transport, staging_bytes=STAGING, sources=sources, load_bytes=load_bytes)
    party: SourceParty | DestinationParty
    if rank < sources:
        part = manifest(rank, sources, by_columns=False)
        party = SourceParty(assembly, options, str(device))
        party.prepare(lambda: Held({}, {spec.name: spec.shape for spec in SPECS}, part))
        for version in VERSIONS:
            held = memory(part, version, device)
            party.push(version, lambda: held)  # noqa: B023 - called at once
        sender = party._sender
        assert sender is not None
        direct = sum(load.direct for loads in sender.loads.values() for load in loads)
    else:
        part = manifest(rank - sources, world_size - sources, by_columns=True)
        party = DestinationParty(assembly, options, str(device))
        party.prepare(lambda _: part)
        for version in VERSIONS:
            room = memory(part, None, device)
            received = party.receive(version, assembly.next_step, version > 1, lambda: room)  # noqa: B023 - at once
            for name, expected in memory(part, version, device).items():
                assert torch.equal(torch.as_tensor(received[name]), expected), name
    party.close()
    assert party.staging.leased_bytes == 0
    return party.staging.peak_bytes, direct


@needs_gpus(1)
@pytest.mark.parametrize("transport", list(TransportName))
def test_versions_arrive_from_gpu_to_gpu(transport: TransportName) -> None:
    gpus = torch.cuda.device_count()
    if transport is TransportName.C10D and gpus < 2:
        pytest.skip("NCCL takes one rank a GPU; needs 2 CUDA devices")
    if transport is TransportName.NIXL and not any(map(importlib.util.find_spec, ("nixl", "nixl_cu13", "nixl_cu12"))):
        pytest.skip("nixl is not installed")
    ranks = 4 if gpus >= 4 or transport is not TransportName.C10D else 2
    server = Rendezvous(ranks, 60.0, answer=Registry(ranks // 2).answer)
    try:
        peaks = run_distributed(body, ranks, None, args=(server.invitation, transport), timeout_s=180, fresh=True)
    finally:
        server.close()
    assert all(0 < peak <= STAGING for peak, _ in peaks)
    able = transport in (TransportName.C10D, TransportName.CUDA_IPC, TransportName.NIXL)
    assert [bool(direct) for _, direct in peaks] == [able] * (ranks // 2) + [False] * (ranks // 2)


@needs_gpus(1)
@pytest.mark.parametrize("transport", list(TransportName))
def test_changes_arrive_from_gpu_to_gpu(transport: TransportName) -> None:
    if transport is TransportName.C10D and torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one rank a GPU; needs 2 CUDA devices")
    if transport is TransportName.NIXL and not any(map(importlib.util.find_spec, ("nixl", "nixl_cu13", "nixl_cu12"))):
        pytest.skip("nixl is not installed")
    server = Rendezvous(2, 60.0, answer=Registry(1).answer)
    try:
        args = (server.invitation, transport)
        sent, _ = run_distributed(changes_body, 2, None, args=args, timeout_s=180, fresh=True)
    finally:
        server.close()
    whole = sum(spec.nbytes for spec in SPECS)
    assert sent[0] == whole
    # About 3 % of the elements, each of 2 bytes, or half of one of 4, and an index of 4 bytes.
    assert all(0.07 * whole < nbytes < 0.09 * whole for nbytes in sent[1:])


@needs_gpus(4, shared=False)
@pytest.mark.parametrize("load_bytes", [1 << 12, 1 << 15, 1 << 18])
def test_over_nccl_sources_and_destinations_never_wait_for_each_other(load_bytes: int) -> None:
    """Two of each, hundreds of loads and many turns."""
    server = Rendezvous(4, 60.0, answer=Registry(2).answer)
    try:
        args = (server.invitation, TransportName.C10D, load_bytes)
        peaks = run_distributed(body, 4, None, args=args, timeout_s=150, fresh=True)
    finally:
        server.close()
    assert all(0 < peak <= STAGING for peak, _ in peaks)
    assert all(direct > 2 for _, direct in peaks[:2])


class Kind(StrEnum):
    """Where weights lie."""

    MALLOC = "malloc"
    SYMMETRIC = "symmetric"
    EXPANDABLE = "expandable"


@functools.cache
def cached_content(spec: TensorSpec, version: int) -> torch.Tensor:
    return content(spec, version)


@functools.cache
def expandable_stream() -> torch.cuda.Stream:
    """On which nothing else allocates, so that torch has no block of another kind at hand for it."""
    return torch.cuda.Stream(priority=-1)


def room_of_kind(kind: Kind, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes full of poison, in memory of this kind, which nothing else lies in."""
    if kind is Kind.SYMMETRIC:
        found = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    else:
        expandable = kind is Kind.EXPANDABLE
        stream = expandable_stream() if expandable else torch.cuda.current_stream()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
        with torch.cuda.stream(stream):
            found = torch.empty(nbytes, dtype=torch.uint8, device=device)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        held_by = [
            segment["is_expandable"]
            for segment in torch.cuda.memory_snapshot()
            if segment["address"] <= found.data_ptr() < segment["address"] + segment["total_size"]
        ]
        assert held_by == [expandable]
    return found.fill_(POISON)


def placed(part: Manifest, kind: Kind, device: torch.device) -> dict[str, torch.Tensor]:
    """Storages in memory of this kind; symmetric ones are parts of one buffer, as a trainer's parameters are."""
    widths = {storage.name: INTEGERS[storage.dtype] for storage in part.storages}
    sizes = {storage.name: -(-storage.numel * widths[storage.name].itemsize // 8) * 8 for storage in part.storages}
    buffer = room_of_kind(kind, sum(sizes.values()), device) if kind is Kind.SYMMETRIC else None
    found, at = {}, 0
    for storage in part.storages:
        size = sizes[storage.name]
        raw = room_of_kind(kind, size, device) if buffer is None else buffer[at : at + size]
        found[storage.name] = raw.view(widths[storage.name])[: storage.numel]
        at += size
    return found


def write(part: Manifest, version: int, into: dict[str, torch.Tensor]) -> None:
    for spec, placement in zip(PLACED, part.placements, strict=True):
        box = placement.box
        region = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
        placement.view.tensor(into[spec.name]).copy_(cached_content(spec, version)[region])


def send_placed(
    assembly: Assembly, options: LinkOptions, part: Manifest, kind: Kind, device: torch.device
) -> tuple[int, int, set[str], int]:
    """A source's part: versions 1 and 2 from the same memory, 3 from other; what it saw, as :func:`placed_body`."""
    party = SourceParty(assembly, options, str(device))
    try:
        party.prepare(lambda: Held({}, {spec.name: spec.shape for spec in PLACED}, part))
        held = placed(part, kind, device)
        for version in VERSIONS:
            if version == VERSIONS[-1]:
                if kind is not Kind.MALLOC:  # what CUDA has allocated must not be freed while others have it open
                    held.clear()
                    torch.cuda.empty_cache()
                held.update(placed(part, kind, device))
            write(part, version, held)
            party.push(version, lambda: held)
        assert party._sender is not None
        assert party._end is not None
        loads = party._sender.loads
        open_to_all = {
            link: replace(terms, hidden=frozenset(), reach=Reach.ROWS) for link, terms in party._terms.items()
        }
        transfers = [item for item in party.plan.transfers if item.source == assembly.party]
        planned = cut_into_loads(transfers, open_to_all)
        assert {destination: list(found) for destination, found in loads.items()} == {
            link[1]: found for link, found in planned.items()
        }
        transport = party._end._transport
        assert isinstance(transport, CudaIpcTransport)
        assert set(transport._located) == set(held)
        handles = [decode_handle(location.handle) for location in transport._located.values()]
        chunks = max(len(handle.chunks) if isinstance(handle, MappedHandle) else 0 for handle in handles)
        direct = sum(load.nbytes for found in loads.values() for load in found if load.direct)
        packed = sum(load.nbytes for found in loads.values() for load in found if not load.direct)
    finally:
        party.close()
    assert party.staging.leased_bytes == 0
    return direct, packed, {type(handle).__name__ for handle in handles}, chunks


def take_placed(assembly: Assembly, options: LinkOptions, part: Manifest, kind: Kind, device: torch.device) -> None:
    """A destination's part: each version into fresh memory, whose every byte is compared."""
    party = DestinationParty(assembly, options, str(device))
    try:
        party.prepare(lambda _: part)
        for version in VERSIONS:
            room = placed(part, kind, device)
            received = party.receive(version, assembly.next_step, version > 1, lambda: room)  # noqa: B023 - at once
            expected = placed(part, Kind.MALLOC, device)
            write(part, version, expected)
            for name, values in expected.items():
                assert torch.equal(torch.as_tensor(received[name]), values), (version, name)
    finally:
        party.close()
    assert party.staging.leased_bytes == 0


def placed_body(
    rank: int, world_size: int, invitation: Invitation, source_kind: Kind, destination_kind: Kind
) -> tuple[int, int, set[str], int] | None:
    """Versions from memory of one kind to memory of another.

    Returns:
        Of a source: bytes that went directly, bytes that were packed, kinds of handles, the most chunks of one.
    """
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.empty_cache()
    sources = world_size // 2
    assembly = Assembly(invitation, rank, f"party {rank}")
    options = LinkOptions(transport=TransportName.CUDA_IPC, staging_bytes=STAGING, sources=sources)
    if rank < sources:
        part = manifest(rank, sources, by_columns=False, specs=PLACED)
        return send_placed(assembly, options, part, source_kind, device)
    part = manifest(rank - sources, world_size - sources, by_columns=True, specs=PLACED)
    take_placed(assembly, options, part, destination_kind, device)
    return None


@pytest.fixture(scope="module")
def processes() -> Iterator[WorkerPool]:
    """Processes of this module's own, as bodies change how torch allocates."""
    pool = WorkerPool()
    yield pool
    pool.close()


@needs_gpus(1)
@pytest.mark.parametrize("destination", list(Kind))
@pytest.mark.parametrize("source", list(Kind))
def test_weights_go_directly_wherever_they_lie(source: Kind, destination: Kind, processes: WorkerPool) -> None:
    """Two sources and two destinations: on two GPUs each link within one and between both is there."""
    server = Rendezvous(4, 60.0, answer=Registry(2).answer)
    try:
        found = processes.run(placed_body, 4, None, 90.0, (server.invitation, source, destination))
    except RanksFailedError:
        processes.close()
        raise
    finally:
        server.close()
    small = sum(spec.nbytes for spec in PLACED if spec.name == "a")
    seen = found[:2]
    assert sum(direct for direct, *_ in seen) == sum(spec.nbytes for spec in PLACED) - small
    assert sum(packed for _, packed, *_ in seen) == small
    assert [handles for *_, handles, _ in seen] == [{"IpcHandle" if source is Kind.MALLOC else "MappedHandle"}] * 2
    fewest = {Kind.MALLOC: 0, Kind.SYMMETRIC: 1, Kind.EXPANDABLE: 2}[source]
    assert all(chunks >= fewest for *_, chunks in seen)


def returning_body(rank: int, world_size: int, kind: Kind) -> list[int]:
    """Maps own memory once more, a few times; it is there until nobody maps it. How many bytes are free then."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return [_freed_by_closing(kind, device) for _ in range(5)]


def own_descriptors(runtime: CudaRuntime, numbers: Sequence[int], use: Callable[[int, int], None]) -> None:
    for number in numbers:
        descriptor = runtime.descriptor(number)
        use(number, descriptor)
        os.close(descriptor)


def _freed_by_closing(kind: Kind, device: torch.device) -> int:
    torch.cuda.empty_cache()
    runtime = CudaRuntime(str(device))
    nbytes = LASTING
    tensor = room_of_kind(kind, nbytes, device)
    tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device))
    expected, target = tensor.clone(), torch.zeros_like(tensor)
    at = runtime.locate({"weights": tensor})["weights"]
    opened = runtime.open(at.handle, partial(own_descriptors, runtime))
    copier = runtime.copier()
    torch.cuda.synchronize()
    for _ in range(2):
        target.zero_()
        torch.cuda.synchronize()
        run = np.array([[opened.address + at.start], [target.data_ptr()], [nbytes]])
        copier.runs(*run)
        copier.ended().result()
        assert torch.equal(target, expected)
        tensor = torch.empty(0)
        torch.cuda.empty_cache()
    runtime.close()
    before, _ = torch.cuda.mem_get_info(device)
    opened.close()
    after, _ = torch.cuda.mem_get_info(device)
    return after - before


@needs_gpus(1)
@pytest.mark.parametrize("count", [1, 3, 5, 64, 1000])
def test_runs_of_any_number_and_length_are_copied(count: int) -> None:
    """What is not copied is left alone; many are begun in batches, few one by one."""
    rng = np.random.default_rng(count)
    lengths = rng.integers(1, 1 << 14, count)
    gaps = rng.integers(0, 64, (2, count))
    begins = [np.cumsum(lengths + gap) - lengths for gap in gaps]
    source, target, expected = (
        torch.randint(0, 256, (int((lengths + gaps.max(axis=0)).sum()),), dtype=torch.uint8) for _ in range(3)
    )
    expected.copy_(target)
    for begin, there, length in zip(*begins, lengths, strict=True):
        expected[there : there + length] = source[begin : begin + length]
    on_gpu, into = source.cuda(), target.cuda()
    torch.cuda.synchronize()
    copier = CudaRuntime("cuda:0").copier()
    order = rng.permutation(count)
    copier.runs(on_gpu.data_ptr() + begins[0][order], into.data_ptr() + begins[1][order], lengths[order])
    copier.ended().result()
    assert torch.equal(into.cpu(), expected)


@needs_gpus(1)
@pytest.mark.parametrize("kind", [Kind.SYMMETRIC, Kind.EXPANDABLE])
def test_memory_lasts_as_long_as_it_is_mapped(kind: Kind, processes: WorkerPool) -> None:
    """What CUDA says is free is the device's: another process may take or return memory in the same moment.

    So the memory is large beside what tests take, and most of five measurements count.
    """
    (freed,) = processes.run(returning_body, 1, None, 60.0, (kind,))
    assert statistics.median(freed) >= LASTING // 2, freed


class Foreign:
    """Memory that torch takes, but did not make."""

    def __init__(self, address: int, nbytes: int) -> None:
        data = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.__cuda_array_interface__ = data


def hidden_body(rank: int, world_size: int) -> list[str]:
    """Which storages can be opened, of some of which one lies in memory that was made for no other process."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    nbytes = 2 << 20
    driver = cuda_mapped.CudaVmm()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    handle = int(*driver._call("cuMemCreate", nbytes, properties, 0))
    address = driver.reserve(nbytes)
    driver.map(address, nbytes, handle)
    driver.allow(address, nbytes, 0)
    storages = {
        "hidden": torch.as_tensor(Foreign(address, nbytes), device=device),
        "plain": room_of_kind(Kind.MALLOC, 99, device),
        "symmetric": room_of_kind(Kind.SYMMETRIC, 99, device),
        "expandable": room_of_kind(Kind.EXPANDABLE, 99, device),
    }
    runtime = CudaRuntime(str(device))
    found = runtime.locate(storages)
    runtime.close()
    driver.unmap(address, nbytes)
    driver.free(address, nbytes)
    driver.release(handle)
    return sorted(found)


@needs_gpus(1)
def test_memory_that_was_made_for_no_other_process_is_left_out(processes: WorkerPool) -> None:
    assert processes.run(hidden_body, 1, None, 60.0, ()) == [["expandable", "plain", "symmetric"]]
