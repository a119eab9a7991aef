"""The kernel that packs, unpacks and digests, under Triton's interpreter, against numpy."""

from __future__ import annotations

import importlib.util
import os
import weakref

import numpy as np
import pytest
import torch

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.layout.boxes import Box, View, row_major_strides
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.device_port import DevicePort
from megatron_patches.refit.memory.ports import Batch, HostPort, Piece
from tests.support.launch import run_distributed
from tests.support.quick import examples

DTYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32", 8: "int64"}


def random_box(rng: np.random.Generator, most: int) -> tuple[tuple[int, ...], Box]:
    """A tensor's shape, and a region of it."""
    shape = tuple(rng.integers(1, most, int(rng.integers(1, 7))).tolist())
    start = [int(rng.integers(0, extent)) for extent in shape]
    stop = [int(rng.integers(low + 1, extent + 1)) for low, extent in zip(start, shape, strict=True)]
    return shape, Box("w", tuple(start), tuple(stop))


def random_pieces(rng: np.random.Generator, most: int) -> tuple[dict[str, np.ndarray], list[Piece]]:
    """Boxes that lie transposed, with gaps, in larger storages; those of wide elements first, as in a packet."""
    held: dict[str, np.ndarray] = {}
    pieces: list[Piece] = []
    offset = 0
    for width in sorted(rng.choice([1, 2, 4, 8], int(rng.integers(1, 6))).tolist(), reverse=True):
        shape, box = random_box(rng, most)
        order = rng.permutation(len(shape)).tolist() if rng.integers(0, 2) else list(range(len(shape)))
        room = [extent + int(rng.integers(0, 3)) for extent in box.shape]
        inner = row_major_strides([room[dim] for dim in order])
        strides = tuple(inner[order.index(dim)] for dim in range(len(shape)))
        name, begin = f"s{len(held)}", int(rng.integers(0, 4))
        size = begin + int(np.prod(room)) + 5
        held[name] = np.frombuffer(rng.bytes(width * size), dtype=f"u{width}").copy()
        pieces.append(Piece(View(name, begin, box.shape, strides), DTYPES[width], box, shape, offset))
        offset += width * box.volume
    return held, pieces


def compare(rng: np.random.Generator, most: int, device: str) -> None:
    """Packs, digests and unpacks random boxes at once, against numpy; twice, as memory may have moved."""
    held, pieces = random_pieces(rng, most)
    batch = Batch(tuple(pieces))
    nbytes = sum(piece.box.volume * itemsize(piece.dtype) for piece in pieces)
    port: DevicePort | None = None
    for _ in range(2):
        expected = np.zeros(nbytes, dtype=np.uint8)
        digests = HostPort(held, "the host").pack(batch, expected).result()
        near = {
            name: torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i"))).to(device)
            for name, bits in held.items()
        }
        if port is None:
            port = DevicePort(near, "the device")
        else:
            port.renew(near)
        shift = int(rng.integers(0, 3)) * 8  # packets begin at multiples of the widest element
        payload = torch.full((nbytes + shift + 16,), 77, dtype=torch.uint8, device=device)
        part = payload[shift : shift + nbytes]
        assert port.pack(batch, part).result() == digests
        assert np.array_equal(part.cpu().numpy(), expected)
        assert payload[:shift].eq(77).all()
        assert payload[shift + nbytes :].eq(77).all()
        assert port.digest(batch).result() == digests
        fresh = {name: np.full_like(bits, 13) for name, bits in held.items()}
        wanted = {name: bits.copy() for name, bits in fresh.items()}
        HostPort(wanted, "the host").unpack(batch, expected).result()
        taken = {
            name: torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i"))).to(device)
            for name, bits in fresh.items()
        }
        port.renew(taken)
        port.unpack(batch, part).result()
        for name, bits in wanted.items():
            assert np.array_equal(taken[name].cpu().numpy().view(bits.dtype), bits)
        held = {name: rng.permutation(bits) for name, bits in held.items()}
    assert port is not None
    port.close()


def compare_digests_of_bytes(device: str) -> None:
    """Of boxes of more tiles than one in each direction, also at the limit of what sums of digits can hold."""
    for fill in (None, 0xFF, 0):
        pieces, held = [], {}
        for number, (rows, columns) in enumerate([(129, 1040), (2, 2048), (1, 5000), (400, 16), (37, 1)]):
            size = rows * columns
            name, bits = f"s{number}", np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
            held[name] = bits if fill is None else np.full(size, fill, dtype=np.uint8)
            box = Box("w", (7, 100), (7 + rows, 100 + columns))
            pieces.append(Piece(View(name, 0, box.shape, (columns, 1)), DTYPES[1], box, (1 << 20, 1 << 20)))
        batch = Batch(tuple(pieces))
        near = {name: torch.from_numpy(bits.view(np.int8)).to(device) for name, bits in held.items()}
        found = DevicePort(near, "the device").digest(batch).result()
        assert found == HostPort(held, "the host").digest(batch).result()


class Uploads(DevicePort):
    """Copies tables as a GPU may: what was copied must not have gone before its work has ended."""

    def __init__(self, memory: dict[str, torch.Tensor]) -> None:
        self.copied: list[weakref.ref[np.ndarray]] = []
        super().__init__(memory, "the device")

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        self.copied.append(weakref.ref(array))
        return super()._upload(array).clone()


def keep_tables(rng: np.random.Generator) -> None:
    """What tables are copied from lives until the memory moves again."""
    held, pieces = random_pieces(rng, 5)
    batch = Batch(tuple(pieces))
    port = Uploads({name: torch.from_numpy(bits.view(f"i{bits.itemsize}")) for name, bits in held.items()})
    reading = port.digest(batch)
    assert port.copied
    assert all(one() is not None for one in port.copied)
    assert reading.result() == HostPort(held, "the host").digest(batch).result()


def refuse_other_memory() -> None:
    """Storages may change from version to version, but not become too short for the boxes, or go."""
    held = {name: np.random.default_rng(2).integers(0, 99, 12).astype("i4") for name in ("a", "b")}
    pieces = tuple(Piece(View(name, 0, (12,), (1,)), "float32", Box("w", (0,), (12,)), (12,)) for name in held)
    near = {name: torch.from_numpy(bits) for name, bits in held.items()}
    port, batch = DevicePort(near, "the device"), Batch(pieces)
    asked = (port.digest, port.storages)
    for ask in (*asked, *asked):
        ask(batch)
    for other, said in [
        ({"a": near["a"]}, "b on the device is missing"),
        ({**near, "b": near["b"][:11]}, "b on the device has 11 elements; the plan uses 0 to 12"),
        ({**near, "b": near["b"].short()}, "b on the device is torch.int16 of 1 dimensions"),
    ]:
        for ask in asked:
            port.renew(other)
            for _ in range(2):
                with pytest.raises(TransferError, match=said):
                    ask(batch)
            port.renew(near)
            ask(batch)
    moved = {name: torch.from_numpy(np.concatenate([bits[:1], bits, bits]))[1:] for name, bits in held.items()}
    port.renew(moved)  # longer, and elsewhere within 16 bytes
    on_host = HostPort({name: bits.view("u4") for name, bits in held.items()}, "the host")
    assert port.digest(batch).result() == on_host.digest(batch).result()
    assert port.storages(batch) is moved


def body(rank: int, world_size: int, most: int, count: int) -> int:
    """Under the interpreter, which is chosen when the kernel's module is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    compare_digests_of_bytes("cpu")
    keep_tables(np.random.default_rng(1))
    refuse_other_memory()
    for seed in range(count):
        compare(np.random.default_rng(seed), most, "cpu")
    return count


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_boxes_of_up_to_six_dimensions_are_packed_and_digested_as_numpy_does() -> None:
    count = examples(40)
    assert run_distributed(body, 1, None, args=(6, count), fresh=True) == [count]
