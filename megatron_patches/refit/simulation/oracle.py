"""Executes a plan in memory and compares every byte with a dense random model, without using the planner's code.

What a destination must hold is derived from its manifest alone, by separate index arithmetic that does not use the
pairing, the views that the plan cuts, or the transport. Padding starts as random bits and must not change.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.layout.manifest import Manifest, Placement
from megatron_patches.refit.memory.loads import Terms
from megatron_patches.refit.memory.ports import Bits
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.memory.unpacker import Unpacker
from megatron_patches.refit.planning.plan import Plan

COPIES_OF_DESTINATIONS = 3
"""Copies of a destination in memory: received, expected, and about as much for indices of elements."""


class OracleError(RefitError):
    """A byte at a destination differs from the dense model."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared.

    Attributes:
        elements: elements of wanted boxes, each equal to the dense model's.
        untouched: elements of destinations outside all boxes, each unchanged.
        peak_staged_bytes: bytes of the largest packet.
    """

    elements: int
    untouched: int
    peak_staged_bytes: int


def memory_needed(tensors: Sequence[TensorSpec], sources: Sequence[Manifest], destinations: Sequence[Manifest]) -> int:
    """Approximate peak memory of :func:`verify_in_memory`, in bytes."""
    held, wanted = (
        sum(storage.numel * itemsize(storage.dtype) for manifest in side for storage in manifest.storages)
        for side in (sources, destinations)
    )
    return sum(spec.nbytes for spec in tensors) + held + COPIES_OF_DESTINATIONS * wanted


def verify_in_memory(
    plan: Plan,
    sources: Sequence[Manifest],
    destinations: Sequence[Manifest],
    seed: int = 0,
    staging_bytes: int = 256 << 20,
) -> Verification:
    """Fills the sources from a random dense model, executes ``plan``, and compares the destinations with the model.

    Args:
        plan: the plan.
        sources: what each source rank holds.
        destinations: what each destination rank wants.
        seed: seed of the random bits.
        staging_bytes: most bytes of a packet.

    Raises:
        OracleError: with the first element that differs, its tensor, box and rank.
        RefitError: if the transfer itself fails.
    """
    copies = _copies(sources)
    dense = {
        spec.name: _random_bits(spec.numel, spec.dtype, f"{seed}|{copies.get(spec.name, spec.name)}")
        for spec in plan.tensors
    }
    shapes = {spec.name: spec.shape for spec in plan.tensors}
    terms = dict.fromkeys(plan.by_link, Terms(packet_bytes=staging_bytes))
    senders = []
    for manifest in sources:
        memory = _noise(manifest, f"{seed}|source")
        for placement in manifest.placements:
            memory[placement.view.storage][_positions(placement)] = dense[placement.box.tensor][
                _indices(placement.box, shapes[placement.box.tensor])
            ]
        senders.append(Sender(plan, manifest.rank, memory, terms))
    received = {manifest.rank: _noise(manifest, f"{seed}|destination") for manifest in destinations}
    before = {rank: {name: bits.copy() for name, bits in held.items()} for rank, held in received.items()}
    unpackers = {manifest.rank: Unpacker(plan, manifest, terms) for manifest in destinations}
    for rank, unpacker in unpackers.items():
        unpacker.begin(1, received[rank])
    peak = elements = untouched = 0
    for sender in senders:
        for packet, payload in sender.pack(1):
            peak = max(peak, packet.nbytes)
            unpackers[packet.destination].accept(packet, payload).result()
    for manifest in destinations:
        unpackers[manifest.rank].verify()
        expected = before[manifest.rank]
        inside = 0
        for placement in manifest.placements:
            positions = _positions(placement)
            expected[placement.view.storage][positions] = dense[placement.box.tensor][
                _indices(placement.box, shapes[placement.box.tensor])
            ]
            inside += positions.size
        _compare(manifest, received[manifest.rank], expected)
        elements += inside
        untouched += sum(storage.numel for storage in manifest.storages) - inside
    return Verification(elements, untouched, peak)


def _copies(sources: Sequence[Manifest]) -> Mapping[str, str]:
    """Tensors that share memory with another on some source, and so are one weight: copy to original."""
    found: dict[str, str] = {}
    for manifest in sources:
        first: dict[View, str] = {}
        for placement in manifest.placements:
            original = first.setdefault(placement.view, placement.box.tensor)
            if original != placement.box.tensor:
                found[placement.box.tensor] = original
    return found


def _compare(manifest: Manifest, found: Mapping[str, Bits], expected: Mapping[str, Bits]) -> None:
    for name, bits in expected.items():
        wrong = np.flatnonzero(found[name] != bits)
        if wrong.size:
            at = int(wrong[0])
            owner = next(
                (
                    str(placement.box)
                    for placement in manifest.placements
                    if placement.view.storage == name and bool((_positions(placement) == at).any())
                ),
                "padding",
            )
            raise OracleError(
                f"destination rank {manifest.rank} holds {int(found[name][at]):#x} in element {at} of {name} "
                f"({owner}); the dense model has {int(bits[at]):#x}; {wrong.size} elements differ"
            )


def _positions(placement: Placement) -> NDArray[np.int64]:
    """Storage index of every element of a placement, in row-major order of its box."""
    index = np.full(1, placement.view.offset, dtype=np.int64)
    for extent, step in zip(placement.view.shape, placement.view.strides, strict=True):
        index = (index[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
    return index


def _indices(box: Box, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Index in the flat dense tensor of every element of a box, in row-major order."""
    index = np.zeros(1, dtype=np.int64)
    for low, high, extent in zip(box.start, box.stop, shape, strict=True):
        index = (index[:, None] * extent + np.arange(low, high, dtype=np.int64)).reshape(-1)
    return index


def _noise(manifest: Manifest, seed: str) -> dict[str, Bits]:
    return {
        storage.name: _random_bits(storage.numel, storage.dtype, f"{seed}|{manifest.rank}|{storage.name}")
        for storage in manifest.storages
    }


def _random_bits(count: int, dtype: str, seed: str) -> Bits:
    width = itemsize(dtype)
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    return np.frombuffer(generator.bytes(count * width), dtype=f"u{width}").copy()
