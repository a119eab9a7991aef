"""The kernel that packs and digests boxes of a refit, and the port that uses it, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.device_port import DevicePort
from megatron_patches.refit.ports import Batch, HostPort, Piece
from megatron_patches.refit.staging import StagingPool
from tests.gpu.devices import needs_gpus
from tests.unit.refit.test_device_kernels import compare

pytestmark = needs_gpus(1)


@pytest.mark.parametrize("seed", range(100))
def test_small_boxes(seed: int) -> None:
    compare(np.random.default_rng(seed), 9, "cuda")


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_large_boxes(seed: int, aligned: bool) -> None:
    """Several at once, of which some need more than one tile in each direction; indices beyond 32 bits."""
    rng = np.random.default_rng(seed)
    pieces, held, offset = [], {}, 0
    for number in range(6):
        rows, columns = int(rng.integers(1, 3000)), int(rng.integers(1, 3000))
        gap = 8 * int(rng.integers(0, 9)) if aligned else int(rng.integers(0, 65))
        columns = -(-columns // 8) * 8 if aligned else columns
        box = Box("w", (7, 100), (7 + rows, 100 + columns))
        bits = torch.randint(-(2**15), 2**15, (rows * (columns + gap) + 16,), dtype=torch.int16)
        view = View(f"s{number}", 8 if aligned else 3, box.shape, (columns + gap, 1))
        pieces.append(Piece(view, "bfloat16", box, (1 << 20, 1 << 20), offset))
        held[f"s{number}"] = bits
        offset += 2 * box.volume
    batch = Batch(tuple(pieces))
    expected = np.zeros(offset, dtype=np.uint8)
    host = HostPort({name: bits.numpy().view(np.uint16) for name, bits in held.items()}, "the host")
    digests = host.pack(batch, expected).result()
    port = DevicePort({name: bits.cuda() for name, bits in held.items()}, "the GPU")
    payload = torch.full((offset,), 77, dtype=torch.uint8, device="cuda")
    assert port.pack(batch, payload).result() == digests
    assert np.array_equal(payload.cpu().numpy(), expected)
    assert port.digest(batch).result() == digests
    fresh = {name: torch.full_like(bits, 5).cuda() for name, bits in held.items()}
    port.renew(fresh)
    port.unpack(batch, payload).result()
    assert port.digest(batch).result() == digests
    for piece in pieces:
        name = piece.view.storage
        assert torch.equal(piece.view.tensor(fresh[name]).cpu(), piece.view.tensor(held[name]))
        outside = fresh[name].cpu()
        piece.view.tensor(outside).fill_(5)
        assert bool((outside == 5).all())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_port_packs_and_unpacks_as_the_host_does(on_host: bool) -> None:
    """``on_host``: through the one leased buffer, into memory of the host."""
    rng = np.random.default_rng(3)
    shape, box = (300, 200), Box("w", (10, 20), (250, 150))
    view = View("s", 40, box.shape, (1, 260))
    bits = rng.integers(0, 2**16, 130 * 260 + 100, dtype=np.uint16)
    piece = Batch((Piece(view, "bfloat16", box, shape, 0),))
    nbytes = 2 * box.volume
    expected = np.zeros(nbytes, dtype=np.uint8)
    digests = HostPort({"s": bits}, "the host").pack(piece, expected).result()
    held = torch.from_numpy(bits.view(np.int16).copy()).cuda()
    pool = StagingPool(nbytes)
    port = DevicePort({"s": held}, "the GPU", pool)
    payload = np.zeros(nbytes, dtype=np.uint8) if on_host else torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    assert port.pack(piece, payload).result() == digests
    content = payload if isinstance(payload, np.ndarray) else payload.cpu().numpy()
    assert np.array_equal(content, expected)
    assert port.digest(piece).result() == digests
    port.close()
    fresh = torch.zeros_like(held)
    taking = DevicePort({"s": fresh}, "the GPU", pool)
    taking.unpack(piece, payload).result()
    assert taking.digest(piece).result() == digests
    taking.close()
    assert torch.equal(view.tensor(fresh), view.tensor(held))
    assert pool.leased_bytes == 0
    assert pool.peak_bytes == (nbytes if on_host else 0)
