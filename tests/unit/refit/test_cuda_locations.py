"""Where storages lie in a GPU's allocations, and how others open those; the GPU's memory is the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from megatron_patches.refit.transports.cuda_mapped import ChunkShelf
from megatron_patches.refit.transports.cuda_runtime import CudaRuntime, Location, MappedHandle, decode_handle
from tests.unit.refit.host_driver import PAGE, HostDriver, content_at

NUMEL = 5  # of each storage


class Allocations(HostDriver):
    """Segments, and memory that CUDA has allocated."""

    def __init__(self, rooms: list[torch.Tensor]) -> None:
        super().__init__()
        self.rooms, self.asked = rooms, 0
        self.numbers = {room.data_ptr(): number for number, room in enumerate(rooms)}

    def allocation_of(self, address: int) -> tuple[int, int]:
        self.asked += 1
        for room in self.rooms:
            if 0 <= address - room.data_ptr() < room.nbytes:
                return room.data_ptr(), room.nbytes
        return super().allocation_of(address)

    def number_of(self, address: int) -> int:
        return self.numbers.get(self.allocation_of(address)[0], -1)


class HostRuntime(CudaRuntime):
    """A GPU whose memory is the host's.

    Attributes:
        driver: its driver.
        handles: of allocations, by address, as they are now.
        asked: addresses whose handle was asked for.
    """

    def __init__(self, driver: Allocations) -> None:
        self._shelf, self._handles = ChunkShelf(driver), {}
        self._driver = self.driver = driver
        self.handles = {room.data_ptr(): b"%d" % number for number, room in enumerate(driver.rooms)}
        self.asked: list[int] = []

    @contextmanager
    def _current(self) -> Iterator[None]:
        yield

    def _handle_of(self, base: int) -> bytes | None:
        self.asked.append(base)
        return self.handles.get(base)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> HostRuntime:
    """A GPU with three allocations; all tensors seem to be on it."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    return HostRuntime(Allocations([torch.randn(4 * NUMEL).bfloat16() for _ in range(3)]))


def storages_of(runtime: HostRuntime) -> dict[str, torch.Tensor]:
    """Four storages in each allocation, one after the other."""
    return {f"{i}.{j}": part for i, room in enumerate(runtime.driver.rooms) for j, part in enumerate(room.split(NUMEL))}


def test_the_handle_of_an_allocation_is_asked_for_once(runtime: HostRuntime) -> None:
    storages = storages_of(runtime)
    for _ in range(2):
        assert runtime.locate(storages) == {
            f"{i}.{j}": Location(b"%d" % i, 2 * NUMEL * j) for i in range(3) for j in range(4)
        }
    assert runtime.asked == list(runtime.handles)


def test_memory_that_was_freed_and_allocated_again_at_its_address_has_its_new_handle(runtime: HostRuntime) -> None:
    storages = storages_of(runtime)
    runtime.locate(storages)
    runtime.asked.clear()
    address = list(runtime.handles)[1]
    runtime.handles[address] = b"new"
    runtime.driver.numbers[address] = 7
    assert {at.handle for at in runtime.locate(storages).values()} == {b"0", b"new", b"2"}
    assert runtime.asked == [address]


def test_storages_in_any_order_are_located_alike(runtime: HostRuntime) -> None:
    storages = storages_of(runtime)
    expected = runtime.locate(storages)
    for seed in range(5):
        names = np.random.default_rng(seed).permutation(list(storages)).tolist()
        runtime._handles = {}
        runtime.asked.clear()
        assert runtime.locate({name: storages[name] for name in names}) == expected
        assert sorted(runtime.asked) == sorted(runtime.handles)


def test_what_cannot_be_exported_is_left_out_and_what_is_mapped_has_its_chunks(runtime: HostRuntime) -> None:
    driver = runtime.driver
    address = driver.segment([PAGE, PAGE])
    hidden = driver.segment([PAGE], shareable=False)
    storages = storages_of(runtime)
    mapped = {
        "mapped": torch.frombuffer(content_at(address + PAGE - 6, 12), dtype=torch.int16),
        "hidden": torch.frombuffer(content_at(hidden, 12), dtype=torch.int16),
    }
    driver.rooms[1] = driver.rooms[1][: 4 * NUMEL - 1]  # the last storage seems to end outside
    assert runtime.locate({"host": np.ones(3, dtype=np.uint16)}) == {}
    found = dict(runtime.locate({**mapped, **storages}))
    lying = found.pop("mapped")
    handle = decode_handle(lying.handle)
    assert isinstance(handle, MappedHandle)
    assert [chunk.nbytes for chunk in handle.chunks] == [PAGE, PAGE]
    assert lying.start == PAGE - 6
    assert sorted(found) == sorted(storages.keys() - {"1.3"})
    runtime.close()
    del mapped
    driver.drop(address)
    driver.drop(hidden)
    assert driver.clean
