"""Changes found, compacted and put back by the kernels, under Triton's interpreter, against the host's."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.memory.base_copy import BaseCopy, renewed
from megatron_patches.refit.memory.delta import Base, Delta, delta_bytes, encode_delta
from megatron_patches.refit.memory.device_base import DeviceBase
from megatron_patches.refit.memory.device_port import DevicePort
from megatron_patches.refit.memory.loads import Load, Terms, cut_into_loads
from megatron_patches.refit.memory.ports import Batch, Bits, HostPort, Memory, Payload
from megatron_patches.refit.memory.staging import StagingPool
from tests.support.launch import run_distributed
from tests.support.quick import examples
from tests.unit.refit.test_delta import damage, versions
from tests.unit.refit.test_packets import changed_bits, dense_plan, random_bits

COUNTS = (1, 7, 8, 9, 300, 2047, 2048, 2049, 5000)
FRACTIONS = (0.0, 1e-9, 0.02, 0.1, 0.3, 0.9, 1.0)
DAMAGE = {
    "twice": (5, 4000, 40),
    "backwards": (5, 4000, 40),
    "beyond the end": (5, 4000, 40),
    "flipped": (7, 3997, 1000),
}


def near(memory: dict[str, Bits], device: str) -> dict[str, torch.Tensor]:
    """Arrays as tensors of a device, which share no memory with them."""
    return {
        name: torch.from_numpy(bits.view(bits.dtype.str.replace("u", "i")).copy()).to(device)
        for name, bits in memory.items()
    }


def compare_arrays(rng: np.random.Generator, device: str) -> None:
    """One array: the very bytes that the host sends, and the version that they stand for."""
    from megatron_patches.refit.memory import delta_kernels

    width, count = int(rng.choice([1, 2, 4, 8])), int(rng.choice(COUNTS))
    expected = int(np.ceil(float(rng.choice(FRACTIONS)) * count))
    old, new = versions(int(rng.integers(1 << 32)), count, width, expected)
    payload = new.copy()
    changed = encode_delta(payload, old, width)
    size = new.size if changed is None else delta_bytes(changed, count, width)
    tensors = [torch.from_numpy(array.copy()).to(device) for array in (new, old)]
    out = torch.full((new.size + 16,), 77, dtype=torch.uint8, device=device)
    assert delta_kernels.encode_delta(tensors[0], tensors[1], width, out[: new.size]).tolist() == [expected]
    assert np.array_equal(out[:size].cpu().numpy(), payload[:size]), (width, count, expected)
    assert out[new.size :].eq(77).all()
    if changed:
        room = torch.full((new.size + 32,), 77, dtype=torch.uint8, device=device)
        into = room[16 : 16 + new.size]
        into.copy_(tensors[1])
        assert delta_kernels.decode_delta(out[:size].clone(), changed, into, width).tolist() == [0, changed]
        assert np.array_equal(into.cpu().numpy(), new)
        assert room[:16].eq(77).all()
        assert room[16 + new.size :].eq(77).all()


@dataclass
class Side:
    """One party's weights on the host or on a device, and those of its base version."""

    kind: type[HostPort | DevicePort]
    pool: StagingPool | None = None
    port: HostPort | DevicePort | None = None
    base: BaseCopy | None = None

    def begin(self, memory: Memory, base: Base) -> BaseCopy:
        """A version; ports and bases last."""
        if self.port is None:
            self.port = self.kind(memory, "here")  # type: ignore[arg-type]
        else:
            self.port.renew(memory)  # type: ignore[arg-type]
        self.base = renewed(self.base, base, self.port, "here", self.pool)
        return self.base

    def unpack(self, load: Load, batch: Batch, payload: Payload, delta: Delta | None) -> None:
        """A packet arrives."""
        assert self.port is not None
        assert self.base is not None
        if delta is None:
            self.port.unpack(batch, payload).result()
        else:
            self.base.unpack(load, batch, payload, delta.changed).result()

    def close(self) -> None:
        """The version has ended."""
        assert self.port is not None
        assert self.base is not None
        self.port.close()
        self.base.close()


def pack_alike(load: Load, batch: Batch, bases: list[BaseCopy], device: str) -> tuple[Payload, Payload, Delta | None]:
    """A packet by the host and the same by the device."""
    payload = np.zeros(load.nbytes, dtype=np.uint8)
    slot = torch.full((load.nbytes + 8,), 77, dtype=torch.uint8, device=device)
    expected, ours = bases[0].pack(load, batch, payload), bases[1].pack(load, batch, slot[: load.nbytes])
    delta = expected[1].result()
    assert [one.result() for one in ours] == [one.result() for one in expected]
    assert all(one.done() for one in ours)
    assert slot[load.nbytes :].eq(77).all()
    size = load.nbytes if delta is None else delta_bytes(delta.changed, load.nbytes // load.width, load.width)
    assert np.array_equal(slot[:size].cpu().numpy(), payload[:size])
    return payload[:size], slot[:size], delta


def compare_loads(seed: int, fraction: float, device: str) -> int:
    """Loads of all widths, from rows to columns: packed, completed and put in place. Returns how many were deltas."""
    plan, (source,), _ = dense_plan(seed)
    shapes = {spec.name: spec.shape for spec in plan.tensors}
    limit = 150 + seed % 400
    loads = cut_into_loads(plan.transfers, dict.fromkeys(plan.by_link, Terms(packet_bytes=limit)))[0, 0]
    pool = StagingPool(4 * limit)  # of a source and a target
    sources, targets = ([Side(HostPort), Side(DevicePort, pool)] for _ in range(2))
    old = random_bits(seed, source)
    served: dict[str, Bits] = {name: np.zeros_like(bits) for name, bits in old.items()}
    source_port, serving = HostPort(old, "the source"), HostPort(served, "the destination")
    for load in loads:
        packed = np.zeros(load.nbytes, dtype=np.uint8)
        source_port.pack(load.batch(shapes, read=True), packed)
        serving.unpack(load.batch(shapes, read=False), packed)
    found = 0
    for version in (2, 3):  # again, because ports keep what they compute
        new = changed_bits(seed + version, old, fraction)
        bases = [
            sources[0].begin(new, Base(version - 1, old)),
            sources[1].begin(near(new, device), Base(version - 1, near(old, device))),
        ]
        taken: dict[str, Bits] = {name: np.zeros_like(bits) for name, bits in new.items()}
        there = near(taken, device)
        targets[0].begin(taken, Base(version - 1, served))
        targets[1].begin(there, Base(version - 1, near(served, device)))
        assert isinstance(bases[1], DeviceBase)
        for load in loads:
            *payloads, delta = pack_alike(load, load.batch(shapes, read=True), bases, device)
            found += delta is not None
            for side, payload in zip(targets, payloads, strict=True):
                side.unpack(load, load.batch(shapes, read=False), payload, delta)
        for side in (*sources, *targets):
            side.close()
        for name, bits in taken.items():
            assert np.array_equal(there[name].cpu().numpy().view(bits.dtype), bits)
        assert pool.leased_bytes == 0
        old, served = new, taken
    return found


def compact_a_large_load(device: str) -> None:
    """The first block of a load of 2 GiB, of which nothing else is read: its size takes more than 32 bits."""
    import triton.language as tl

    from megatron_patches.refit.memory import delta_kernels

    old = torch.zeros(2048, dtype=torch.int16, device=device)
    new = old.clone()
    new[:3] = torch.tensor([5, 6, 7])
    out, count = torch.full((4096,), 77, dtype=torch.uint8, device=device), 1 << 30
    ends = torch.tensor([3], device=device)
    launch = delta_kernels._compact[(1,)]
    launch(new, old, out, ends, count, element=tl.int16, width=2, groups=256, num_warps=4)
    assert out[:6].view(torch.int16).tolist() == [5, 6, 7]
    assert out[8:20].view(torch.int32).tolist() == [0, 1, 2]
    assert out[20:].eq(77).all()


def refuse_damage(device: str) -> None:
    """Nothing outside of the load is written, and the error says how many places are wrong."""
    from megatron_patches.refit.memory import delta_kernels

    for kind, (seed, count, expected) in DAMAGE.items():
        old, new = versions(seed, count, 2, expected)
        payload = new.copy()
        changed = encode_delta(payload, old, 2)
        assert changed == expected
        payload = payload[: delta_bytes(changed, count, 2)]
        if kind != "flipped":
            payload, _ = damage(kind, payload, changed)
        for place in (0, 1234, 3996, 3997, 3999) if kind == "flipped" else (0,):
            spoiled = payload.copy()
            if kind == "flipped":
                spoiled[2 * changed + place // 8] ^= 0x80 >> place % 8
            room = torch.full((2 * count + 32,), 77, dtype=torch.uint8, device=device)
            into = room[16 : 16 + 2 * count]
            found = delta_kernels.decode_delta(torch.from_numpy(spoiled).to(device), changed, into, 2)
            invalid, places = found.tolist()
            assert invalid or places != changed, kind
            assert room[:16].eq(77).all()
            assert room[16 + 2 * count :].eq(77).all()


def refuse_damaged_packet(device: str) -> None:
    """Through the port: the result raises."""
    plan, (source,), _ = dense_plan(5)
    shapes = {spec.name: spec.shape for spec in plan.tensors}
    load = cut_into_loads(plan.transfers)[0, 0][0]
    old = random_bits(5, source)
    port = DevicePort(near(old, device), "the device")
    base = renewed(None, Base(1, near(old, device)), port, "the device", None)
    payload = torch.zeros(delta_bytes(2, load.nbytes // load.width, load.width), dtype=torch.uint8, device=device)
    with pytest.raises(TransferError, match=r"places of changed elements are not .* 2 came"):
        base.unpack(load, load.batch(shapes, read=True), payload, 2).result()


def body(rank: int, world_size: int, count: int) -> int:
    """Under the interpreter, which is chosen when the kernels' modules are imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    for seed in range(count):
        compare_arrays(np.random.default_rng(seed), "cpu")
    compact_a_large_load("cpu")
    refuse_damage("cpu")
    refuse_damaged_packet("cpu")
    return compare_loads(3, 0.1, "cpu")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_find_and_put_back_changes_as_the_host_does() -> None:
    assert run_distributed(body, 1, None, args=(examples(20),), fresh=True)[0] > 0
