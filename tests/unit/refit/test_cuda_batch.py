"""Tables of pitched copies: laid out as CUDA's headers say, and read again by an interpreter that knows only those."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.dtypes import itemsize
from megatron_patches.refit.loads import Load
from megatron_patches.refit.plan import Transfer
from megatron_patches.refit.ports import Bytes
from megatron_patches.refit.transports.cuda_batch import OPERATION, Operations, operations
from megatron_patches.refit.transports.cuda_runtime import CudaCopier
from megatron_patches.refit.transports.direct_copies import DirectCopies, Rows, Shape
from tests.unit.refit.host_driver import content_at

DTYPES = ("float8_e4m3fn", "bfloat16", "float32", "int64")


class FromPointer(ctypes.Structure):
    """The member ``op.ptr`` of ``cudaMemcpy3DOperand``."""

    _fields_ = (
        ("ptr", ctypes.c_void_p),
        ("row_length", ctypes.c_size_t),
        ("layer_height", ctypes.c_size_t),
        ("hint", ctypes.c_int * 2),
    )


class FromArray(ctypes.Structure):
    """The member ``op.array``."""

    _fields_ = (("array", ctypes.c_void_p), ("offset", ctypes.c_size_t * 3))


class Either(ctypes.Union):
    _fields_ = (("ptr", FromPointer), ("array", FromArray))


class Operand(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("op", Either))


class Operation(ctypes.Structure):
    """``cudaMemcpy3DBatchOp``."""

    _fields_ = (
        ("src", Operand),
        ("dst", Operand),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
        ("source_order", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


def carry_out(address: int, count: int) -> None:
    """What CUDA does with a table at an address, with memory of the host."""
    for index in range(count):
        found = Operation.from_address(address + index * ctypes.sizeof(Operation))
        assert (found.source_order, found.flags, found.depth) == (1, 0, 1)
        assert min(found.width, found.height) > 0
        for operand in (found.src, found.dst):
            assert operand.type == 1
            assert operand.op.ptr.layer_height == 0
            assert list(operand.op.ptr.hint) == [0, 0]
            assert operand.op.ptr.row_length >= found.width
        for row in range(found.height):
            source, target = (end.op.ptr.ptr + row * end.op.ptr.row_length for end in (found.src, found.dst))
            content_at(target, found.width)[:] = content_at(source, found.width)


def test_the_table_is_laid_out_as_in_the_headers() -> None:
    """The numbers are those that a C compiler prints for CUDA 12.8, 13.0 and 13.1."""
    operand = {"type": 0, "address": 8, "row_length": 16, "layer_height": 24, "location": 32}
    found = offsets(OPERATION)
    assert found == {"source": 0, "target": 40, "extent": 80, "source_order": 104, "flags": 108}
    assert offsets(OPERATION["source"]) == offsets(OPERATION["target"]) == operand
    assert offsets(OPERATION["extent"]) == {"width": 0, "height": 8, "depth": 16}
    assert OPERATION.itemsize == ctypes.sizeof(Operation) == 112
    assert OPERATION["source"].itemsize == ctypes.sizeof(Operand) == 40
    assert OPERATION["extent"].itemsize == 24
    assert ctypes.sizeof(FromPointer) == ctypes.sizeof(FromArray) == 32
    sizes = [OPERATION["source"][name].itemsize for name in operand]
    assert sizes == [4, 8, 8, 8, 8]
    assert [OPERATION[name].itemsize for name in ("source_order", "flags")] == [4, 4]


def offsets(layout: np.dtype[np.void]) -> dict[str, int]:
    assert layout.fields is not None
    return {name: place[1] for name, place in layout.fields.items()}


def box(rng: np.random.Generator, number: int, storages: int, room: list[list[int]]) -> Transfer:
    """One of any shape, in rows that lie apart at either end, behind what has been put into its storages so far."""
    dtype = DTYPES[int(rng.integers(len(DTYPES)))]
    width = itemsize(dtype)
    shape = int(rng.integers(2, 9)), int(rng.integers(1, 23))
    views = []
    for names, sizes in zip("rw", room, strict=True):
        storage = int(rng.integers(storages))
        step = shape[1] + int(rng.integers(names == "r", 7))  # never tight at both ends, or it would be one run
        offset = -(-sizes[storage] // width) + int(rng.integers(5))
        sizes[storage] = (offset + shape[0] * step) * width
        views.append(View(f"{names}{storage}", offset, shape, (step, 1)))
    where = Box("w", (number * 9, 0), (number * 9 + shape[0], shape[1]))
    return Transfer(0, 0, 0, where, views[0], views[1], dtype, dtype)


def elements(storage: Bytes, view: View, dtype: str) -> Bytes:
    """``[rows, columns, bytes]``: the elements of a view, as numpy steps through them."""
    width = itemsize(dtype)
    steps = [stride * width for stride in view.strides]
    return np.lib.stride_tricks.as_strided(storage[view.offset * width :], (*view.shape, width), (*steps, 1))


@pytest.mark.parametrize("seed", range(20))
def test_the_table_of_a_load_copies_its_boxes_and_nothing_else(seed: int) -> None:
    rng = np.random.default_rng(seed)
    storages, count = int(rng.integers(1, 5)), int(rng.integers(1, 60))
    room = [[0] * storages, [0] * storages]
    load = Load(0, 0, 0, 0, tuple(box(rng, number, storages, room) for number in range(count)), direct=True)
    held, targets = (
        [rng.integers(0, 256, 1 + nbytes, dtype=np.uint8)[1:] for nbytes in each] for each in room
    )  # at odd addresses
    expected = [each.copy() for each in targets]
    for item in load.items:
        source, into = held[int(item.read.storage[1:])], expected[int(item.write.storage[1:])]
        elements(into, item.write, item.dtype)[...] = elements(source, item.read, item.dtype)
    copies = DirectCopies.of(load)
    assert copies.nbytes.size == 0
    sources = np.array([held[int(name[1:])].ctypes.data for name in copies.sources])
    written = [targets[int(load.items[index].write.storage[1:])].ctypes.data for index in copies.first_boxes]
    table = operations(*copies.pitched.addresses(sources, np.array(written)), copies.rows)
    assert table.shape == (count,)
    assert table.flags.c_contiguous
    carry_out(table.ctypes.data, count)
    for storage, (found, wanted) in enumerate(zip(targets, expected, strict=True)):
        np.testing.assert_array_equal(found, wanted, f"storage w{storage}")


class HostLibrary:
    """CUDA's copies, between memory of the host; which function was called, with how many copies and what stream."""

    def __init__(self, *, has_batches: bool) -> None:
        self.has_batches = has_batches
        self.calls: list[tuple[str, int, int]] = []

    def copy_rows(self, target: int, source: int, shape: Shape, stream: int) -> None:
        self.calls.append(("copy_rows", 1, stream))
        count, nbytes, source_step, target_step = shape
        for row in range(count):
            content_at(target + row * target_step, nbytes)[:] = content_at(source + row * source_step, nbytes)

    def copy_rows_batch(self, table: Operations, stream: int) -> None:
        self.calls.append(("copy_rows_batch", len(table), stream))
        carry_out(table.ctypes.data, len(table))


class InTurn:
    def next(self) -> tuple[int, int]:
        return 3, 77


def copied(shapes: Sequence[Shape], order: Sequence[int], library: HostLibrary) -> None:
    """Copies random bytes in rows, one box behind the other, and compares the whole target."""
    spans = np.array([[count * shape[end] for count, *shape in shapes] for end in (1, 2)])
    begins = np.cumsum(spans, axis=1) - spans
    rng = np.random.default_rng(len(shapes))
    source, target = (rng.integers(0, 256, int(size), dtype=np.uint8) for size in spans.sum(axis=1))
    expected = target.copy()
    for (count, nbytes, source_step, target_step), begin, there in zip(shapes, *begins.tolist(), strict=True):
        for row in range(count):
            first, into = begin + row * source_step, there + row * target_step
            expected[into : into + nbytes] = source[first : first + nbytes]
    copier = CudaCopier(library, "cuda:0", InTurn())  # type: ignore[arg-type]
    rows = Rows.of([shapes[index] for index in order])
    shuffled = np.array(order, dtype=np.int64)
    copier.rows(source.ctypes.data + begins[0][shuffled], target.ctypes.data + begins[1][shuffled], rows)
    np.testing.assert_array_equal(target, expected)


@st.composite
def shape(draw: st.DrawFn) -> Shape:
    count, nbytes = draw(st.integers(1, 9)), draw(st.integers(1, 33))
    source_gap, target_gap = (draw(st.integers(0, 20)) for _ in range(2))
    return count, nbytes, nbytes + source_gap, nbytes + target_gap


@given(shapes=st.lists(shape(), min_size=1, max_size=20), has_batches=st.booleans(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_batch_copies_what_single_calls_copy(shapes: list[Shape], has_batches: bool, data: st.DataObject) -> None:
    library = HostLibrary(has_batches=has_batches)
    copied(shapes, data.draw(st.permutations(range(len(shapes)))), library)
    if has_batches and len(shapes) > 1:
        assert library.calls == [("copy_rows_batch", len(shapes), 77)]
    else:
        assert library.calls == [("copy_rows", 1, 77)] * len(shapes)


def test_a_step_may_be_longer_than_32_bits_can_say() -> None:
    far = 5 << 32
    rows = Rows.of([(2, 3, far, far + 1)] * 2)
    table = operations(np.array([1 << 46, 7]), np.array([(1 << 46) + 1, 9]), rows)
    found = Operation.from_buffer_copy(table.tobytes())
    assert (found.src.op.ptr.ptr, found.dst.op.ptr.ptr) == (1 << 46, (1 << 46) + 1)
    assert (found.src.op.ptr.row_length, found.dst.op.ptr.row_length) == (far, far + 1)
    assert (found.width, found.height) == (3, 2)
