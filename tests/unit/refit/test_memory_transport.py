"""The memory transport: random layouts arrive whole, and every corruption is caught, named, and takes no effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from megatron_patches.refit.errors import (
    DigestError,
    PlanMismatchError,
    RefitError,
    StaleVersionError,
    TransferError,
)
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.packets import Packet
from megatron_patches.refit.memory.ports import Batch, Bits, Payload, host_bytes
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.planning.plan import Plan, make_plan
from megatron_patches.refit.planning.proof import prove
from tests.support.memory_transport import Receiver, refit
from tests.support.quick import examples
from tests.support.refit_cases import Case, elements, random_case, random_options, region


def bits_of(manifest: Manifest, fill: Callable[[Box], np.ndarray] | None, rng: np.random.Generator) -> dict[str, Bits]:
    """Storages with random bits everywhere, and those of ``fill`` where the manifest places boxes."""
    found: dict[str, Bits] = {}
    for storage in manifest.storages:
        found[storage.name] = rng.integers(0, 2**32, storage.numel, dtype=np.uint32)
    if fill is not None:
        for placement in manifest.placements:
            found[placement.view.storage][elements(placement.view)] = fill(placement.box)
    return found


def dense_bits(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random bits for every tensor."""
    return {spec.name: rng.integers(0, 2**32, spec.shape, dtype=np.uint32) for spec in case.tensors}


@settings(
    max_examples=examples(1600), deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow]
)
@given(st.integers(0, 2**32))
def test_random_layouts_arrive_whole_and_nothing_else_is_written(seed: int) -> None:
    case, rng = random_case(seed), np.random.default_rng(seed)
    options, limit = random_options(seed), int(rng.integers(8, 400))
    plan = make_plan(*case.sides, options)
    prove(plan, case.sources, case.destinations, options)
    dense = dense_bits(case, rng)
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=limit))
    senders = [
        Sender(plan, m.rank, bits_of(m, lambda box: dense[box.tensor][region(box)], rng), terms) for m in case.sources
    ]
    memory = {m.rank: bits_of(m, None, rng) for m in case.destinations}
    expected = {rank: {name: bits.copy() for name, bits in held.items()} for rank, held in memory.items()}
    receivers = {m.rank: Receiver(plan, m, memory[m.rank], terms) for m in case.destinations}
    assert refit(senders, receivers, 1) <= limit
    for manifest in case.destinations:
        for placement in manifest.placements:
            values = dense[placement.box.tensor][region(placement.box)]
            expected[manifest.rank][placement.view.storage][elements(placement.view)] = values
        for name, bits in expected[manifest.rank].items():
            assert np.array_equal(memory[manifest.rank][name], bits)


SPECS = (TensorSpec("a", (8, 6), "bfloat16"), TensorSpec("b", (8, 6), "bfloat16"), TensorSpec("c", (5,), "float32"))


def whole(rank: int, *boxes: Box) -> Manifest:
    """A rank with one storage a box, with two elements of padding."""
    dtypes = {spec.name: spec.dtype for spec in SPECS}
    return Manifest(
        rank,
        "",
        tuple(Storage(box.tensor, dtypes[box.tensor], box.volume + 2, box.volume) for box in boxes),
        tuple(Placement(box, View(box.tensor, 0, box.shape, row_major_strides(box.shape))) for box in boxes),
    )


@dataclass
class Scene:
    """Two sources that halve every matrix, one destination that wants all, serving old weights."""

    plan: Plan
    senders: list[Sender]
    receiver: Receiver
    serving: dict[str, Bits]
    held: list[dict[str, Bits]]
    old: dict[str, Bits]

    def packets(self, version: int) -> list[tuple[Packet, Payload]]:
        return [packed for sender in self.senders for packed in sender.pack(version)]

    def deliver(self, packets: list[tuple[Packet, Payload]]) -> None:
        for packet, payload in packets:
            self.receiver.accept(packet, payload)
        self.receiver.verify()
        self.receiver.commit()


def random_memory(manifest: Manifest, rng: np.random.Generator) -> dict[str, Bits]:
    return {
        item.name: rng.integers(1, 2**15, item.numel).astype(np.uint16 if item.dtype == "bfloat16" else np.uint32)
        for item in manifest.storages
    }


def make_scene(packet_bytes: int = 1 << 20) -> Scene:
    rng = np.random.default_rng(5)
    a, b, c = (spec.box for spec in SPECS)
    sources = [
        whole(0, a.with_range(0, 0, 3), b.with_range(0, 0, 3), c),
        whole(1, a.with_range(0, 3, 8), b.with_range(0, 3, 8)),
    ]
    wanted = whole(0, a, b, c)
    plan = make_plan(SPECS, sources, [wanted])
    prove(plan, sources, [wanted])
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=packet_bytes))
    held = [random_memory(manifest, rng) for manifest in sources]
    serving = random_memory(wanted, rng)
    old = {name: bits.copy() for name, bits in serving.items()}
    senders = [Sender(plan, rank, memory, terms) for rank, memory in enumerate(held)]
    receiver = Receiver(plan, wanted, serving, terms)
    receiver.begin(1)
    return Scene(plan, senders, receiver, serving, held, old)


def test_an_intact_version_replaces_the_old_one_and_the_next_replaces_it() -> None:
    scene = make_scene()
    scene.deliver(scene.packets(1))
    assert scene.receiver.version == 1
    rows = [scene.held[0]["a"][:18], scene.held[1]["a"][:30]]
    assert np.array_equal(scene.serving["a"][:48], np.concatenate(rows))
    assert np.array_equal(scene.serving["a"][48:], scene.old["a"][48:]), "padding is left alone"
    assert np.array_equal(scene.serving["c"][:5], scene.held[0]["c"][:5])
    scene.held[1]["a"] += 1
    scene.receiver.begin(2)
    scene.deliver(scene.packets(2))
    assert np.array_equal(scene.serving["a"][18:48], scene.held[1]["a"][:30])


type Packed = tuple[Packet, Payload]


def content(packed: Packed) -> bytes:
    return bytes(host_bytes(packed[1]))


def flip(packed: Packed, position: int) -> Packed:
    payload = bytearray(content(packed))
    payload[position] ^= 0x10
    return packed[0], bytes(payload)


def altered(packed: Packed, **changes: Any) -> Packed:
    return structs.replace(packed[0], **changes), packed[1]


def flipped_byte(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [packets[0], flip(packets[1], 7)]


def swapped_boxes(packets: list[Packed], scene: Scene) -> list[Packed]:
    """The halves of a and b that source 1 sends change places; both have 60 bytes."""
    payload = content(packets[1])
    return [packets[0], (packets[1][0], payload[60:] + payload[:60])]


def swapped_digests(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [packets[0], altered(packets[1], digests=packets[1][0].digests[::-1])]


def shifted_read(packets: list[Packed], scene: Scene) -> list[Packed]:
    payload = content(packets[1])
    return [packets[0], (packets[1][0], payload[2:] + payload[:2])]


def misdirect(receiver: Receiver, offset: Callable[[View], int]) -> None:
    """Makes a receiver write elsewhere than planned."""
    batches = receiver._unpacker._batches
    for key, batch in batches.items():
        batches[key] = Batch(
            tuple(replace(piece, view=replace(piece.view, offset=offset(piece.view))) for piece in batch.pieces)
        )


def shifted_write(packets: list[Packed], scene: Scene) -> list[Packed]:
    """The receiver writes what does not begin its memory one element too early, behind the plan's back."""
    misdirect(scene.receiver, lambda view: max(0, view.offset - 1))
    return packets


def stale_version(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [packets[0], altered(packets[1], version=0)]


def missing_digest(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [packets[0], altered(packets[1], digests=packets[1][0].digests[:-1])]


def missing_packet(packets: list[Packed], scene: Scene) -> list[Packed]:
    return packets[:1]


def doubled_packet(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [packets[0], *packets]


def extra_digest(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [altered(packets[0], digests=(*packets[0][0].digests, 3))]


def short_payload(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [(packets[0][0], content(packets[0])[:-1])]


def another_plan(packets: list[Packed], scene: Scene) -> list[Packed]:
    others = tuple(item for item in scene.plan.moves if item.region.tensor != "a")
    return [packets[0], *Sender(replace(scene.plan, moves=others), 1, scene.held[1]).pack(1)]


def unplanned_packet(packets: list[Packed], scene: Scene) -> list[Packed]:
    return [altered(packets[0], number=9)]


@pytest.mark.parametrize(
    ("corrupt", "error", "message"),
    [
        (flipped_byte, DigestError, r"a\[0:8, 0:6\] in a of destination rank 0 .* source ranks \[0, 1\] sent"),
        (swapped_boxes, DigestError, r"a\[0:8, 0:6\] in a of destination rank 0"),
        (swapped_digests, DigestError, r"a\[0:8, 0:6\] in a of destination rank 0"),
        (shifted_read, DigestError, r"a\[0:8, 0:6\] in a of destination rank 0"),
        (shifted_write, DigestError, r"a\[0:8, 0:6\] in a of destination rank 0"),
        (
            stale_version,
            StaleVersionError,
            "source rank 1 sent version 0 to destination rank 0, which receives version 1",
        ),
        (missing_digest, TransferError, "source rank 1, to destination rank 0, has 1 digests and not the 2 planned"),
        (
            missing_packet,
            TransferError,
            r"never got a\[3:8, 0:6\], which source rank 1 sends in packet 0, of version 1",
        ),
        (doubled_packet, TransferError, "packet 0 of source rank 0 twice"),
        (extra_digest, TransferError, "has 4 digests and not the 3 planned"),
        (short_payload, TransferError, "has 91 bytes and not the 92 planned"),
        (another_plan, PlanMismatchError, "source rank 1 follows plan [0-9a-f]{12}, destination rank 0 plan"),
        (unplanned_packet, TransferError, "packet 9 for rank 0 from source rank 0, which is not planned"),
    ],
)
def test_a_corruption_is_named_and_the_old_weights_serve(
    corrupt: Callable[[list[Packed], Scene], list[Packed]], error: type[RefitError], message: str
) -> None:
    scene = make_scene()
    with pytest.raises(error, match=message):
        scene.deliver(corrupt(scene.packets(1), scene))
    assert scene.receiver.version == 0
    for name, bits in scene.old.items():
        assert np.array_equal(scene.serving[name], bits), name


def test_after_a_failure_the_next_version_arrives() -> None:
    scene = make_scene(packet_bytes=32)
    packets = scene.packets(1)
    with pytest.raises(DigestError):
        scene.deliver([flip(packets[0], 0), *packets[1:]])
    scene.receiver.begin(2)
    scene.deliver(scene.packets(2))
    assert scene.receiver.version == 2
    assert len(packets) > 6


def test_one_receiver_that_fails_keeps_all_on_the_old_version() -> None:
    spec = SPECS[2]
    sources, wanted = [whole(0, spec.box)], [whole(0, spec.box), whole(1, spec.box)]
    plan = make_plan([spec], sources, wanted)
    rng = np.random.default_rng(2)
    memory = [random_memory(manifest, rng) for manifest in wanted]
    old = [held["c"].copy() for held in memory]
    receivers = {rank: Receiver(plan, manifest, memory[rank]) for rank, manifest in enumerate(wanted)}
    misdirect(receivers[1], lambda _: 1)
    with pytest.raises(DigestError, match="destination rank 1"):
        refit([Sender(plan, 0, random_memory(sources[0], rng))], receivers, 1)
    assert [receiver.version for receiver in receivers.values()] == [0, 0]
    assert all(np.array_equal(held["c"], before) for held, before in zip(memory, old, strict=True))


def test_versions_only_rise_and_only_verified_ones_are_taken() -> None:
    scene = make_scene()
    with pytest.raises(TransferError, match="has not verified version 1"):
        scene.receiver.commit()
    scene.deliver(scene.packets(1))
    with pytest.raises(TransferError, match="has not verified version 1"):
        scene.receiver.commit()
    with pytest.raises(StaleVersionError, match="asked to receive version 1 and serves 1"):
        scene.receiver.begin(1)


def test_memory_that_is_not_as_described_is_named() -> None:
    scene = make_scene()
    plan = scene.plan
    for memory, message in (
        ({}, r"a on source rank 1 is missing; a flat array of u2 was described \(bfloat16\)"),
        ({"a": np.ones(32, np.uint32)}, "a on source rank 1 is uint32 of 1 dimensions"),
        ({"a": np.ones(29, np.uint16)}, "a on source rank 1 has 29 elements; the plan uses 0 to 30"),
    ):
        with pytest.raises(TransferError, match=message):
            list(Sender(plan, 1, memory).pack(1))
    converted = replace(plan, moves=tuple(msgspec.structs.replace(item, source_dtype="float32") for item in plan.moves))
    with pytest.raises(TransferError, match=r"a\[3:8, 0:6\] is float32 on source rank 1 and bfloat16 on"):
        list(Sender(converted, 1, scene.held[1]).pack(1))
