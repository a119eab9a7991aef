"""The kernels that pack, digest and quantize boxes of a refit, on a GPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.refit_ranks import Weights as HeldWeights
from megatron_patches.refit.control.exchange import Exchange
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.memory import delta_kernels
from megatron_patches.refit.memory.delta import Base, delta_bytes
from megatron_patches.refit.memory.delta import encode_delta as host_encode
from megatron_patches.refit.memory.device_port import DevicePort
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.ports import Batch, FlatMemory, HostPort, Payload, Piece
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.staging import StagingPool
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.source.block_parts import KernelParts
from megatron_patches.refit.source.block_quantizer import BlockQuantizer
from megatron_patches.refit.source.fp8_block import Fp8BlockSource
from tests.gpu.devices import needs_gpus
from tests.unit.refit.test_device_delta import (
    FRACTIONS,
    compare_arrays,
    compare_loads,
    near,
    refuse_damage,
    refuse_damaged_packet,
)
from tests.unit.refit.test_device_kernels import compare, compare_digests_of_bytes
from tests.unit.refit.test_fp8_block import WEIGHT, held_by, run, uneven
from tests.unit.refit.test_packets import changed_bits, dense_plan, random_bits

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


def test_digests_of_bytes() -> None:
    compare_digests_of_bytes("cuda")


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


@pytest.mark.parametrize("seed", range(40))
def test_changes_are_found_and_put_back_as_on_the_host(seed: int) -> None:
    compare_arrays(np.random.default_rng(seed), "cuda")
    compare_loads(seed, FRACTIONS[seed % len(FRACTIONS)], "cuda")


def test_damaged_changes_are_refused() -> None:
    refuse_damage("cuda")
    refuse_damaged_packet("cuda")


@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.3, 1.0])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_changes_of_large_arrays(width: int, fraction: float) -> None:
    """Thousands of blocks; with signs of zeros and patterns of not-a-numbers among the changes."""
    count = (24 << 20) // width + 5
    old = torch.randint(0, 256, (count * width,), dtype=torch.uint8, device="cuda")
    marked = (torch.rand(count, device="cuda") < fraction)[:, None]
    new = torch.where(marked, old.view(count, width) ^ 0x80, old.view(count, width)).view(-1)
    payload, base = new.cpu().numpy(), old.cpu().numpy()
    changed = host_encode(payload, base, width)
    out = torch.empty_like(new)
    found = delta_kernels.encode_delta(new, old, width, out).item()
    assert found == int(marked.sum())
    if changed is None:
        assert fraction == 1.0
        assert torch.equal(out, new)
        return
    assert changed == found
    size = delta_bytes(changed, count, width)
    assert np.array_equal(out[:size].cpu().numpy(), payload[:size])
    if changed:
        assert delta_kernels.decode_delta(out[:size], changed, old, width).tolist() == [0, changed]
    assert torch.equal(old, new)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 1.0])
def test_a_version_is_sent_relative_to_the_last_one(fraction: float, on_host: bool) -> None:
    """By a sender and an unpacker, through slots of either kind of memory and the least of buffers."""
    plan, (source,), wanted = dense_plan(9)
    limit = 200
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=limit))
    old = random_bits(9, source)
    new = changed_bits(9, old, fraction)
    pools = StagingPool(3 * limit), StagingPool(2 * limit)
    sender = Sender(plan, 0, near(old, "cuda"), terms, pools[0])
    unpacker = Unpacker(plan, wanted, terms, pools[1])
    rooms = [near({name: np.zeros_like(bits) for name, bits in old.items()}, "cuda") for _ in range(2)]
    for version, held, room, base in ((1, old, rooms[0], None), (2, new, rooms[1], (old, rooms[0]))):
        sender.renew(near(held, "cuda"))
        sender.relate_to(None if base is None else Base(1, near(base[0], "cuda")))
        unpacker.begin(version, room, None if base is None else Base(1, base[1]))
        for load in sender.loads[0]:
            slot: Payload = np.zeros(limit, dtype=np.uint8)
            if not on_host:
                slot = torch.zeros(limit, dtype=torch.uint8, device="cuda")
            packet = sender.pack_into(load, version, slot).result()
            assert (packet.delta is not None) == (base is not None and fraction < 1.0)
            unpacker.accept(packet, slot[: packet.nbytes]).result()
        unpacker.verify()
        sender.close()
        unpacker.close()
    assert [pool.leased_bytes for pool in pools] == [0, 0]


def layers_to_quantize() -> Fp8BlockSource:
    """A source of 24 weights of one shape."""
    shapes = {f"model.layers.{layer}.mlp.down_proj.weight": (4096, 1024) for layer in range(24)}
    weights = {name: uneven((4096, 1024), at % 3) for at, name in enumerate(shapes)}
    manifest, memory = held_by(0, weights, [Box(name, (0, 0), shape) for name, shape in shapes.items()])
    return Fp8BlockSource(
        HeldWeights(shapes, manifest, {name: flat.cuda() for name, flat in memory.items()}, torch.device("cuda")),
        WeightFormat.FP8_BLOCK,
        Exchange(),
    )


def test_a_gpu_is_given_groups_when_readers_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first at once, all others by the end; each once for each version."""
    given: list[int] = []
    quantize = KernelParts.quantize

    def note(parts: KernelParts, group: int, *arguments: Any) -> None:
        given.append(group)
        quantize(parts, group, *arguments)

    monkeypatch.setattr(KernelParts, "quantize", note)
    source = layers_to_quantize()
    source.describe(0)
    layer = 4096 * 1024  # a group is three of them
    for _ in range(2):
        given.clear()
        source.settle()
        assert given == [0]
        for ends, expected in (
            ({"memory of another": 10**12}, 1),
            ({"quantized weights": 3 * layer}, 1),
            ({"quantized weights": 3 * layer + 1}, 2),
            ({"scales of quantized weights": 4 * 32 * 8, "quantized weights": 1}, 2),
            ({"quantized weights": 12 * layer, "memory of another": 1}, 4),
            ({"scales of quantized weights": 15 * 32 * 8 + 1}, 6),
        ):
            source.await_written(ends)
            assert given == list(range(expected))
        source.finish()
        assert given == list(range(8))
        source.confirm()
        assert given == list(range(8))


def test_loads_are_read_when_they_are_quantized() -> None:
    """What quantizes begins after the loads were asked for; nothing but the last storage is waited for."""
    source = layers_to_quantize()
    held = source.describe(0).manifest
    specs = [TensorSpec(one.box.tensor, one.box.shape, held.storage[one.view.storage].dtype) for one in held.placements]
    plan = make_plan(specs, [held], [held])
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=5 << 20))
    sender: Sender | None = None
    memory: FlatMemory = {}
    for number in range(2):
        with torch.cuda.stream(source.stream()):
            for flat in memory.values():
                flat.view(torch.uint8).fill_(0x55)
            torch.cuda._sleep(400_000_000)
            late = torch.cuda.Event()
            late.record()
        source.settle()
        if sender is None:
            sender = Sender(plan, 0, source.look_up(), terms)
        sender.renew(source.look_up(), source)
        slots = [torch.empty(load.nbytes, dtype=torch.uint8, device="cuda") for load in sender.loads[0]]
        packing = [sender.pack_into(load, number, slot) for load, slot in zip(sender.loads[0], slots, strict=True)]
        if number:  # the first time, tables are uploaded in between
            assert not packing[0].done() or late.query()  # a host that other tests use may take as long as the sleep
        packets = [one.result() for one in packing]
        source.confirm()
        memory = source.look_up()
        source.finish()
        sender.renew(memory)
        for load, packet, slot in zip(sender.loads[0], packets, slots, strict=True):
            again = torch.empty_like(slot)
            assert sender.pack_into(load, number, again).result().digests == packet.digests
            assert torch.equal(again, slot)


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
