"""The kernels that pack, digest and quantize boxes of a refit, on a GPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.device_port import DevicePort
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.exchange import Exchange
from megatron_patches.refit.ports import Batch, HostPort, Piece
from megatron_patches.refit.source.block_quantizer import BlockQuantizer
from megatron_patches.refit.staging import StagingPool
from tests.gpu.devices import needs_gpus
from tests.unit.refit.test_device_kernels import compare
from tests.unit.refit.test_fp8_block import WEIGHT, held_by, run, uneven

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


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_are_quantized_as_on_a_cpu(dtype: torch.dtype, power_of_two: bool) -> None:
    """Random cuts, so that most blocks have several parts; then one that is no number."""
    rng = np.random.default_rng(11)
    for case in range(8):
        shape = tuple(int(extent) for extent in rng.integers(60, 900, 2))
        step = 16 if case % 2 else 1  # aligned, or not
        cuts = [
            [0, *sorted({int(cut) * step for cut in rng.integers(1, extent // step, 2)}), extent] for extent in shape
        ]
        boxes = [Box(WEIGHT, (a, c), (b, d)) for a, b in pairwise(cuts[0]) for c, d in pairwise(cuts[1])]
        weights = {WEIGHT: uneven(shape, case, dtype)}
        manifest, memory = held_by(0, weights, boxes, padding=16)
        quantizers = [
            BlockQuantizer(
                {WEIGHT: shape},
                manifest,
                power_of_two=power_of_two,
                device=torch.device(device),
                exchange=Exchange(),
            )
            for device in ("cpu", "cuda")
        ]
        for one, held in zip(quantizers, (memory, {name: flat.cuda() for name, flat in memory.items()}), strict=True):
            for flat in one.quantized.values():
                flat.view(torch.uint8).fill_(0x55)
            run(one, held)
        expected, found = (one.quantized for one in quantizers)
        for name, flat in expected.items():
            assert torch.equal(found[name].view(torch.uint8).cpu(), flat.view(torch.uint8)), (shape, name)
        for value in (torch.nan, torch.inf, -torch.inf):
            place = int(rng.integers(0, shape[0] * shape[1]))
            bad = {name: flat.clone() for name, flat in memory.items()}
            next(iter(bad.values()))[place] = value
            for one, held in zip(quantizers, (bad, {name: flat.cuda() for name, flat in bad.items()}), strict=True):
                with pytest.raises(RefitError, match="cannot be quantized: a weight in it is infinite or not a number"):
                    run(one, held)
