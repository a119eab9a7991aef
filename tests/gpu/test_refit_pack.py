"""The kernel that packs and digests boxes of a refit, and the port that uses it, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_patches.refit.boxes import Box, View
from megatron_patches.refit.device_port import DevicePort
from megatron_patches.refit.digest import digest_array
from megatron_patches.refit.ports import HostPort, Piece
from megatron_patches.refit.staging import StagingPool
from tests.gpu.devices import needs_gpus
from tests.unit.refit.test_device_kernels import compare

pytestmark = needs_gpus(1)


@pytest.mark.parametrize("seed", range(100))
def test_small_boxes(seed: int) -> None:
    compare(np.random.default_rng(seed), 9, "cuda")


@pytest.mark.parametrize("seed", range(5))
def test_large_boxes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(500, 5000)), int(rng.integers(500, 5000))
    box = Box("w", (7, 100), (7 + rows, 100 + columns))
    shape = (1 << 20, 1 << 20)  # indices beyond 32 bits
    values = torch.randint(-(2**15), 2**15, (rows, columns + 64), dtype=torch.int16, device="cuda")[
        :, 13 : 13 + columns
    ]
    packed = torch.empty(rows * columns, dtype=torch.int16, device="cuda")
    digest = torch.zeros((), dtype=torch.int64, device="cuda")
    from megatron_patches.refit.device_kernels import pack_and_digest

    pack_and_digest(values, packed, box, shape, digest)
    expected = values.contiguous().cpu().numpy()
    assert np.array_equal(packed.cpu().numpy(), expected.reshape(-1))
    assert digest.item() & (1 << 64) - 1 == digest_array(expected, box, shape)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_port_packs_and_unpacks_as_the_host_does(on_host: bool) -> None:
    """``on_host``: through the one leased buffer, into memory of the host."""
    rng = np.random.default_rng(3)
    shape, box = (300, 200), Box("w", (10, 20), (250, 150))
    view = View("s", 40, box.shape, (1, 260))
    bits = rng.integers(0, 2**16, 130 * 260 + 100, dtype=np.uint16)
    piece = Piece(view, "bfloat16", box, shape, 0)
    nbytes = 2 * box.volume
    expected = np.zeros(nbytes, dtype=np.uint8)
    digests = HostPort({"s": bits}, "the host").pack([piece], expected).result()
    held = torch.from_numpy(bits.view(np.int16).copy()).cuda()
    pool = StagingPool(nbytes)
    port = DevicePort({"s": held}, "the GPU", pool)
    payload = np.zeros(nbytes, dtype=np.uint8) if on_host else torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    assert port.pack([piece], payload).result() == digests
    content = payload if isinstance(payload, np.ndarray) else payload.cpu().numpy()
    assert np.array_equal(content, expected)
    assert port.digest([piece]).result() == digests
    port.close()
    fresh = torch.zeros_like(held)
    taking = DevicePort({"s": fresh}, "the GPU", pool)
    taking.unpack([piece], payload).result()
    assert taking.digest([piece]).result() == digests
    taking.close()
    assert torch.equal(view.tensor(fresh), view.tensor(held))
    assert pool.leased_bytes == 0
    assert pool.peak_bytes == (nbytes if on_host else 0)
