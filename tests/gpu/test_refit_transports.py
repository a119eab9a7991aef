"""Every transport between processes whose weights lie on GPUs; on one GPU they share it."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from megatron_patches.refit.boxes import TensorSpec, View
from megatron_patches.refit.joint import DestinationParty, Held, LinkOptions, SourceParty
from megatron_patches.refit.manifest import Manifest, Placement, Storage
from megatron_patches.refit.rendezvous import Assembly, Invitation, Rendezvous
from megatron_patches.refit.transports.base import TransportName
from tests.gpu.devices import needs_gpus
from tests.support.launch import run_distributed

SPECS = (
    TensorSpec("a", (1030, 700), "bfloat16"),
    TensorSpec("b", (256, 513, 4), "float32"),
    TensorSpec("c", (998,), "float8_e4m3fn"),
    TensorSpec("d", (12, 1000), "int64"),
    TensorSpec("rows", (640, 1024), "bfloat16"),
    TensorSpec("contiguous", (2500, 300), "bfloat16"),
)
INTEGERS = {"bfloat16": torch.int16, "float32": torch.int32, "float8_e4m3fn": torch.int8, "int64": torch.int64}
STAGING = 1 << 20  # less than half of what is moved
VERSIONS = (1, 2, 3)


def content(spec: TensorSpec, version: int) -> torch.Tensor:
    rng = np.random.default_rng([version, *spec.name.encode()])
    dtype = INTEGERS[spec.dtype]
    flat = np.frombuffer(rng.bytes(spec.nbytes), dtype=f"i{dtype.itemsize}").copy()
    return torch.from_numpy(flat).view(spec.shape)


def manifest(rank: int, ranks: int, *, by_columns: bool) -> Manifest:
    """An equal share of every tensor, of its rows; or of its columns, which lie transposed behind a gap.

    The columns of "rows" are not transposed, and "contiguous" is cut by rows, without gaps, on both sides.
    """
    storages, placements = [], []
    for spec in SPECS:
        dim = len(spec.shape) - 1 if by_columns and spec.name != "contiguous" else 0
        extent = spec.shape[dim]
        box = spec.box.with_range(dim, extent * rank // ranks, extent * (rank + 1) // ranks)
        transposed = by_columns and spec.name not in ("rows", "contiguous")
        order = range(len(box.shape)) if transposed else reversed(range(len(box.shape)))
        strides, step = [0] * len(box.shape), 1
        for at in order:
            strides[at] = step
            step *= box.shape[at] + int(spec.name != "contiguous")
        storages.append(Storage(spec.name, spec.dtype, step + 8, step + 8))
        placements.append(Placement(box, View(spec.name, 8, box.shape, tuple(strides))))
    return Manifest(rank, "here", tuple(storages), tuple(placements))


def memory(part: Manifest, version: int | None, device: torch.device) -> dict[str, torch.Tensor]:
    found = {}
    for spec, placement, storage in zip(SPECS, part.placements, part.storages, strict=True):
        found[spec.name] = torch.zeros(storage.numel, dtype=INTEGERS[spec.dtype], device=device)
        if version is not None:
            box = placement.box
            region = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
            placement.view.tensor(found[spec.name]).copy_(content(spec, version)[region])
    return found


def body(rank: int, world_size: int, invitation: Invitation, transport: TransportName) -> tuple[int, int]:
    """Moves some versions from the first half of the ranks to the second; the most that packets took, direct loads."""
    direct = 0
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    sources = world_size // 2
    assembly = Assembly(invitation, rank, f"party {rank}")
    options = LinkOptions(transport=transport, staging_bytes=STAGING, sources=sources)
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
    server = Rendezvous(ranks, 60.0)
    try:
        peaks = run_distributed(body, ranks, None, args=(server.invitation, transport), timeout_s=180, fresh=True)
    finally:
        server.close()
    assert all(0 < peak <= STAGING for peak, _ in peaks)
    able = transport in (TransportName.C10D, TransportName.CUDA_IPC, TransportName.NIXL)
    assert [bool(direct) for _, direct in peaks] == [able] * (ranks // 2) + [False] * (ranks // 2)
