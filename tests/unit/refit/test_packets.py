"""Cutting what moves into packets: everything once, in order, aligned, and never more than a slot holds."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from megatron_patches.refit.errors import DigestError, PlanMismatchError, StaleVersionError, TransferError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.delta import Base, Delta
from megatron_patches.refit.memory.device_port import DevicePort
from megatron_patches.refit.memory.loads import Load, Reach, Terms, cut_into_loads, goes_directly
from megatron_patches.refit.memory.packets import Packet
from megatron_patches.refit.memory.ports import Batch, Bits, Payload, Piece, elements
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import Plan, make_plan
from tests.support.quick import examples

DTYPES = ("float8_e4m3fn", "bfloat16", "float32", "int64")


def dense_plan(seed: int, sources: int = 1) -> tuple[Plan, list[Manifest], Manifest]:
    """Tensors of all widths, each whole on one source; one destination wants all, transposed in memory."""
    rng = np.random.default_rng(seed)
    specs = [
        TensorSpec(f"t{i}", tuple(rng.integers(1, 9, int(rng.integers(1, 4))).tolist()), str(rng.choice(DTYPES)))
        for i in range(int(rng.integers(sources, 9)))
    ]
    held: list[list[TensorSpec]] = [[] for _ in range(sources)]
    for index, spec in enumerate(specs):
        held[index % sources].append(spec)
    sides = [manifest(rank, part, flip=False) for rank, part in enumerate(held)]
    wanted = manifest(0, specs, flip=True)
    return make_plan(specs, sides, [wanted]), sides, wanted


def manifest(rank: int, specs: list[TensorSpec], *, flip: bool) -> Manifest:
    placements = []
    for spec in specs:
        strides = row_major_strides(spec.shape)
        if flip:
            strides = tuple(reversed(row_major_strides(tuple(reversed(spec.shape)))))
        placements.append(Placement(spec.box, View(spec.name, 0, spec.shape, strides)))
    storages = tuple(Storage(spec.name, spec.dtype, spec.numel, spec.numel) for spec in specs)
    return Manifest(rank, "", storages, tuple(placements))


def as_tensors(memory: dict[str, Bits]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(bits) for name, bits in memory.items()}


def volumes(boxes: list[Box]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for box in boxes:
        found[box.tensor] += box.volume
    return dict(found)


@settings(max_examples=300, deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32), limit=st.integers(8, 200))
def test_loads_are_the_plan_cut_to_size(seed: int, limit: int) -> None:
    plan, _, _ = dense_plan(seed, sources=2)
    limits = {link: limit + 8 * link[0] for link in plan.by_link}
    loads = cut_into_loads(plan.transfers, {link: Terms(packet_bytes=nbytes) for link, nbytes in limits.items()})
    assert list(loads) == list(plan.by_link)
    for link, found in loads.items():
        assert all(0 < load.nbytes <= limits[link] for load in found)
        assert [load.number for load in found] == list(range(len(found)))
        assert all((load.source, load.destination) == link for load in found)
    moved = [item for found in loads.values() for load in found for item in load.items]
    assert volumes([item.box for item in moved]) == volumes([item.box for item in plan.transfers])
    for item in moved:
        whole = [t for t in plan.transfers if t.box.contains(item.box)]
        assert len(whole) == 1
        assert item.read == whole[0].read.cut(whole[0].box, item.box)
        assert item.write == whole[0].write.cut(whole[0].box, item.box)
    shapes = {spec.name: spec.shape for spec in plan.tensors}
    for found in loads.values():
        for load in found:
            end = 0
            for piece in load.batch(shapes, read=True).pieces:
                assert piece.offset == end
                assert piece.offset % itemsize(piece.dtype) == 0
                end += piece.box.volume * itemsize(piece.dtype)
            assert end == load.nbytes


@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32), limit=st.integers(8, 100), tensors=st.tuples(st.booleans(), st.booleans()))
def test_packets_of_any_size_bring_the_same_bits_through_two_slots(
    seed: int, limit: int, tensors: tuple[bool, bool]
) -> None:
    """Between arrays, and tensors as on a GPU, in every combination."""
    plan, (source,), wanted = dense_plan(seed)
    rng = np.random.default_rng(seed)
    held: dict[str, Bits] = {
        storage.name: np.frombuffer(
            rng.bytes(storage.numel * itemsize(storage.dtype)), dtype=f"u{itemsize(storage.dtype)}"
        ).copy()
        for storage in source.storages
    }
    memory: dict[str, Bits] = {name: np.zeros_like(bits) for name, bits in held.items()}
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=limit))
    sender = Sender(plan, 0, as_tensors(held) if tensors[0] else held, terms)
    unpacker = Unpacker(plan, wanted, terms)
    unpacker.begin(1, as_tensors(memory) if tensors[1] else memory)
    slots = [np.empty(limit, dtype=np.uint8) for _ in range(2)]
    for index, load in enumerate(sender.loads[0]):
        slot = slots[index % 2]
        packet = sender.pack_into(load, 1, slot).result()
        unpacker.accept(packet, slot[: packet.nbytes]).result()
    unpacker.verify()
    for placement in wanted.placements:
        box, view = placement.box, placement.view
        width = [step * held[box.tensor].itemsize for step in view.strides]
        found = np.lib.stride_tricks.as_strided(memory[box.tensor], view.shape, width)
        assert np.array_equal(found, held[box.tensor].reshape(box.shape))


def test_each_eighth_is_read_back_when_its_last_load_arrives() -> None:
    """64 matrices of 60 bytes arrive one after the other."""
    specs = [TensorSpec(f"t{i:02}", (5, 6), "bfloat16") for i in range(64)]
    plan = make_plan(specs, [manifest(0, specs, flip=False)], [wanted := manifest(0, specs, flip=True)])
    rng = np.random.default_rng(7)
    held: dict[str, Bits] = {spec.name: rng.integers(0, 2**16, spec.numel, dtype=np.uint16) for spec in specs}
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=60))
    sender, unpacker = Sender(plan, 0, held, terms), Unpacker(plan, wanted, terms)
    unpacker.begin(1, {name: np.zeros_like(bits) for name, bits in held.items()})
    read: list[int] = []
    before: set[int] = set()
    for packet, payload in sender.pack(1):
        unpacker.accept(packet, payload).result()
        read.append(sum(unpacker._parts[part].placements.size for part in set(unpacker._reading) - before))
        before = set(unpacker._reading)
    assert [(at, count) for at, count in enumerate(read) if count] == [(at, 8) for at in range(7, 64, 8)]
    unpacker.verify()


def in_place(load: Load, sender: Sender, unpacker: Unpacker) -> Iterator[tuple[Bits, Bits]]:
    """Each box of a direct load, at its source and where it belongs."""
    held, taken = sender.storages(load), unpacker.storages(load)
    for item in load.items:
        yield elements(item.read, held, item.dtype, "source"), elements(item.write, taken, item.dtype, "target")  # type: ignore[arg-type]


def random_bits(seed: int, like: Manifest) -> dict[str, Bits]:
    rng = np.random.default_rng(seed)
    return {
        storage.name: np.frombuffer(
            rng.bytes(storage.numel * itemsize(storage.dtype)), dtype=f"u{itemsize(storage.dtype)}"
        ).copy()
        for storage in like.storages
    }


def changed_bits(seed: int, old: dict[str, Bits], fraction: float) -> dict[str, Bits]:
    """The same with a share of the elements of each storage changed by one bit."""
    rng = np.random.default_rng(seed)
    new = {name: bits.copy() for name, bits in old.items()}
    for bits in new.values():
        where = rng.permutation(bits.size)[: int(np.ceil(fraction * bits.size))]
        bits[where] ^= bits.dtype.type(1 << int(rng.integers(8 * bits.itemsize)))
    return new


@dataclass
class Related:
    """One source, whose second version is sent relative to its first."""

    sender: Sender
    unpacker: Unpacker
    versions: list[dict[str, Bits]]
    taken: list[dict[str, Bits]]

    def whole(self) -> None:
        """The first version arrives."""
        self.unpacker.begin(1, self.taken[0])
        for packet, payload in self.sender.pack(1):
            self.unpacker.accept(packet, payload).result()
        self.unpacker.verify()

    def relate(self) -> list[tuple[Packet, Payload]]:
        """Packets of the second version."""
        self.sender.renew(self.versions[1])
        self.sender.relate_to(Base(1, self.versions[0]))
        self.unpacker.begin(2, self.taken[1], Base(1, self.taken[0]))
        return list(self.sender.pack(2))


def related(seed: int, fraction: float, limit: int | None = None) -> Related:
    plan, (source,), wanted = dense_plan(seed)
    old = random_bits(seed, source)
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=limit))
    rooms = [{name: np.zeros_like(bits) for name, bits in old.items()} for _ in range(2)]
    versions = [old, changed_bits(seed, old, fraction)]
    return Related(Sender(plan, 0, old, terms), Unpacker(plan, wanted, terms), versions, rooms)


@settings(max_examples=examples(200), deadline=None, phases=[Phase.generate])
@given(
    seed=st.integers(0, 2**32),
    fraction=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 1.0]),
    limit=st.one_of(st.none(), st.integers(8, 300)),
)
def test_what_changed_brings_the_bits_that_the_whole_would(seed: int, fraction: float, limit: int | None) -> None:
    """Loads of all widths, from rows to columns; whatever is not less is sent whole."""
    pair = related(seed, fraction, limit)
    pair.whole()
    packets = pair.relate()
    assert all(len(payload) <= load.nbytes for (_, payload), load in zip(packets, pair.sender.loads[0], strict=True))
    for packet, payload in packets:
        pair.unpacker.accept(packet, payload).result()
    pair.unpacker.verify()
    if fraction == 0.0:
        assert {(len(payload), packet.delta) for packet, payload in packets} == {(0, Delta(1, 0))}
    again = related(seed, fraction, limit)
    again.sender.renew(again.versions[1])
    again.unpacker.begin(2, again.taken[1])
    for packet, payload in again.sender.pack(2):
        again.unpacker.accept(packet, payload).result()
    for name, bits in again.taken[1].items():
        assert np.array_equal(pair.taken[1][name], bits)


def test_changes_are_put_over_the_memory_that_serves() -> None:
    pair = related(3, 0.1)
    pair.whole()
    pair.taken[1] = pair.taken[0]
    other = related(3, 0.1)
    for packet, payload in pair.relate():
        pair.unpacker.accept(packet, payload).result()
    pair.unpacker.verify()
    other.sender.renew(other.versions[1])
    other.unpacker.begin(2, other.taken[1])
    for packet, payload in other.sender.pack(2):
        other.unpacker.accept(packet, payload).result()
    assert all(np.array_equal(pair.taken[0][name], bits) for name, bits in other.taken[1].items())


def test_a_base_that_differs_by_a_bit_is_noticed_before_anything_serves() -> None:
    pair = related(4, 1e-9)
    pair.whole()
    name, bits = max(pair.taken[0].items(), key=lambda item: item[1].size)
    bits[-1] ^= 1
    for packet, payload in pair.relate():
        pair.unpacker.accept(packet, payload).result()
    with pytest.raises(DigestError, match=rf"{name}\[.* in {name} of destination rank 0"):
        pair.unpacker.verify()


def test_a_change_that_a_source_misses_is_noticed() -> None:
    """Its copy of the base has the new bits already, so it finds no change."""
    pair = related(6, 0.2)
    pair.whole()
    for name, bits in pair.versions[1].items():
        pair.versions[0][name][...] = bits
    packets = pair.relate()
    assert {packet.delta for packet, _ in packets} == {Delta(1, 0)}
    for packet, payload in packets:
        pair.unpacker.accept(packet, payload).result()
    with pytest.raises(DigestError, match="version 2 is not taken"):
        pair.unpacker.verify()


def test_changes_since_another_version_are_refused() -> None:
    pair = related(5, 0.1)
    pair.whole()
    packet, payload = next(packed for packed in pair.relate() if packed[0].delta is not None)
    assert packet.delta is not None
    with pytest.raises(TransferError, match=r"which holds version 1, what changed since version 7"):
        pair.unpacker.accept(structs.replace(packet, delta=Delta(7, packet.delta.changed)), payload)
    pair.unpacker.begin(2, pair.taken[1])
    with pytest.raises(TransferError, match=r"which holds none, what changed since version 1"):
        pair.unpacker.accept(packet, payload)
    pair.unpacker.begin(2, pair.taken[1], Base(1, pair.taken[0]))
    with pytest.raises(TransferError, match=r"bytes and not the \d+ planned"):
        pair.unpacker.accept(structs.replace(packet, delta=Delta(1, packet.delta.changed + 100)), payload)
    on_a_device = {name: torch.zeros(bits.size, device="meta") for name, bits in pair.taken[0].items()}
    with pytest.raises(TransferError, match="all storages must be on the host"):
        pair.unpacker.begin(2, pair.taken[1], Base(1, on_a_device))


@dataclass
class Straight:
    """A matrix whose rows lie apart on the source, and one after the other on the destination."""

    sender: Sender
    unpacker: Unpacker
    held: Bits
    taken: Bits
    plan: Plan
    wanted: Manifest
    terms: dict[tuple[int, int], Terms]

    def move(self, load: Load) -> Packet:
        """As a wire moves a direct load."""
        packet = self.sender.digest((load,), 1)[0].result()
        assert packet.nbytes == load.nbytes
        announced = self.unpacker.load_of(structs.replace(packet, digests=()))
        assert announced.direct
        assert announced.items == load.items
        for source, target in in_place(load, self.sender, self.unpacker):
            assert np.shares_memory(source, self.held)
            assert np.shares_memory(target, self.taken)
            np.copyto(target, source)
        return packet


@pytest.fixture
def straight() -> Straight:
    spec = TensorSpec("w", (9, 400), "bfloat16")
    apart = Manifest(
        0,
        "",
        (Storage("w", "bfloat16", 9 * 500, 9 * 500),),
        (Placement(spec.box, View("w", 50, spec.shape, (500, 1))),),
    )
    side = manifest(0, [spec], flip=False)
    plan = make_plan([spec], [apart], [side])
    held: Bits = np.random.default_rng(1).integers(0, 2**16, 9 * 500, dtype=np.uint16)
    taken: Bits = np.zeros(3600, dtype=np.uint16)
    terms = {(0, 0): Terms(packet_bytes=240, reach=Reach.ROWS, direct_bytes=800)}
    unpacker = Unpacker(plan, side, terms)
    unpacker.begin(1, {"w": taken})
    return Straight(Sender(plan, 0, {"w": held}, terms), unpacker, held, taken, plan, side, terms)


def test_what_consists_of_rows_is_neither_packed_nor_unpacked(straight: Straight) -> None:
    for load in straight.sender.loads[0]:
        straight.unpacker.accept(straight.move(load), b"").result()
    straight.unpacker.verify()
    assert np.array_equal(straight.taken.reshape(9, 400), straight.held.reshape(9, 500)[:, 50:450])


def test_what_was_received_in_place_is_compared_like_everything_else(straight: Straight) -> None:
    *others, last = straight.sender.loads[0]
    for load in others:
        straight.unpacker.accept(straight.move(load), b"").result()
    packet = straight.move(last)
    straight.taken[777] ^= 1
    straight.unpacker.accept(packet, b"").result()
    with pytest.raises(DigestError, match=r"w\[0:9, 0:400\] in w of destination rank 0"):
        straight.unpacker.verify()


def test_a_packet_with_a_payload_where_none_is_planned_is_refused(straight: Straight) -> None:
    packet = straight.move(straight.sender.loads[0][0])
    with pytest.raises(TransferError, match="has 4 bytes and not the 0 planned"):
        straight.unpacker.accept(packet, b"four")


def test_nothing_is_received_that_is_not_planned(straight: Straight) -> None:
    packet = straight.sender.digest((straight.sender.loads[0][0],), 1)[0].result()
    for announced, error in (
        (structs.replace(packet, version=2), StaleVersionError),
        (structs.replace(packet, plan_digest="0" * 64), PlanMismatchError),
        (structs.replace(packet, number=9), TransferError),
        (structs.replace(packet, destination=1), TransferError),
    ):
        with pytest.raises(error):
            straight.unpacker.load_of(announced)


def test_a_version_may_come_into_other_memory_than_the_last(straight: Straight) -> None:
    straight.sender.renew({"w": straight.held[::-1].copy()})
    again = np.zeros_like(straight.taken)
    straight.unpacker.begin(2, {"w": again})
    loads = straight.sender.loads[0]
    assert [load for wave in straight.sender.waves() for load in wave] == loads
    for load, packing in zip(loads, straight.sender.digest(tuple(loads), 2), strict=True):
        for source, target in in_place(load, straight.sender, straight.unpacker):
            np.copyto(target, source)
        assert packing.load == load
        straight.unpacker.accept(packing.result(), b"").result()
    straight.unpacker.verify()
    assert np.array_equal(again.reshape(9, 400), straight.held[::-1].reshape(9, 500)[:, 50:450])


def test_what_goes_directly_is_what_was_agreed_on(straight: Straight) -> None:
    item = straight.sender.loads[0][0].items[0]
    flat = replace(item, read=replace(item.read, strides=(400, 1)))
    rows, contiguous = Terms(reach=Reach.ROWS, direct_bytes=1), Terms(reach=Reach.CONTIGUOUS, direct_bytes=1)
    assert goes_directly(item, rows)
    assert goes_directly(flat, contiguous)
    assert not goes_directly(item, contiguous)
    assert not goes_directly(item, Terms(direct_bytes=1))
    assert not goes_directly(item, replace(rows, hidden=frozenset({"w"})))
    assert not goes_directly(item, replace(rows, direct_bytes=item.nbytes + 1))
    assert not goes_directly(replace(item, source_dtype="float16"), rows)
    assert not goes_directly(replace(item, read=replace(item.read, strides=(1, 9))), rows)  # columns


def test_a_slot_smaller_than_an_element_is_refused() -> None:
    spec = TensorSpec("w", (3,), "int64")
    plan = make_plan([spec], [manifest(0, [spec], flip=False)], [manifest(0, [spec], flip=False)])
    with pytest.raises(TransferError, match=r"an element of w\[0:3\] has 8 bytes and a packet at most 7"):
        cut_into_loads(plan.transfers, {(0, 0): Terms(packet_bytes=7)})


def test_what_a_port_cannot_use_is_named() -> None:
    spec = TensorSpec("w", (3,), "bfloat16")
    plan = make_plan([spec], [manifest(0, [spec], flip=False)], [manifest(0, [spec], flip=False)])
    short = torch.zeros(2, dtype=torch.bfloat16)
    for memory, message in (
        ({"v": short}, "w on source rank 0 is missing; a flat array of u2 was described"),
        ({"w": torch.zeros(3)}, "w on source rank 0 is uint32 of 1 dimensions"),
        ({"w": short}, "w on source rank 0 has 2 elements; the plan uses 0 to 3"),
        ({"w": short.to("meta"), "v": np.zeros(2)}, "w on source rank 0 is on meta; all storages must be on the host"),
    ):
        with pytest.raises(TransferError, match=message):
            list(Sender(plan, 0, memory).pack(1))  # type: ignore[arg-type]
    batch = Batch((Piece(View("w", 0, (3,), (1,)), "bfloat16", spec.box, spec.shape),))
    for tensors, message in (
        ({"v": short}, "w on a GPU is missing; a flat tensor of bfloat16 was described"),
        ({"w": torch.zeros(3)}, "w on a GPU is torch.float32 of 1 dimensions"),
        ({"w": short}, "w on a GPU has 2 elements; the plan uses 0 to 3"),
        ({"w": short, "v": short.to("meta")}, r"lie on \['cpu', 'meta'\]; one device is needed"),
    ):
        with pytest.raises(TransferError, match=message):
            DevicePort(tensors, "a GPU").storages(batch)
    port = DevicePort({"w": short}, "a GPU")
    with pytest.raises(TransferError, match="have moved from cpu to meta; bring them back, or prepare again"):
        port.renew({"w": short.to("meta")})


def test_nothing_holds_a_versions_memory_once_it_is_there(straight: Straight) -> None:
    """It may be as large as all weights; between versions a party has none of it."""
    taken, held = np.zeros(3600, dtype=np.uint16), straight.held.copy()
    watched = [weakref.ref(taken), weakref.ref(held)]
    plan, terms = straight.plan, straight.terms
    sender = Sender(plan, 0, {"w": held}, terms)
    unpacker = Unpacker(plan, straight.wanted, terms)
    unpacker.begin(1, {"w": taken})
    for load in sender.loads[0]:
        packet = sender.digest((load,), 1)[0].result()
        for source, target in in_place(load, sender, unpacker):
            np.copyto(target, source)
        unpacker.accept(packet, b"").result()
    unpacker.verify()
    sender.close()
    unpacker.close()
    del taken, held, source, target
    assert [reference() for reference in watched] == [None, None]
