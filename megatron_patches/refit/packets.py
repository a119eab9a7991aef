"""A load on its way from a source to a destination, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

from megatron_patches.refit.boxes import Box
from megatron_patches.refit.delta import Delta, delta_bytes
from megatron_patches.refit.errors import TransferError
from megatron_patches.refit.loads import Load
from megatron_patches.refit.ports import Payload, Pending


@dataclass(frozen=True, slots=True)
class Part:
    """One box in a packet.

    Attributes:
        box: the box.
        dtype: its element type.
        digest: its digest, computed from what the sender read.
    """

    box: Box
    dtype: str
    digest: int


class PlannedParts(Sequence[Part]):
    """The boxes that the plan has in a load, with the digests computed by their sender.

    Parts are made on demand: every version has thousands of boxes, and a part is only needed if something is wrong.

    Args:
        load: the load.
        digests: digests of its boxes, in order.

    Raises:
        TransferError: if the number of digests differs from that of boxes.
    """

    def __init__(self, load: Load, digests: Sequence[int]) -> None:
        if len(digests) != len(load.items):
            raise TransferError(f"{len(digests)} digests came for {len(load.items)} boxes")
        self.load, self.digests = load, digests

    def __len__(self) -> int:
        return len(self.digests)

    @overload
    def __getitem__(self, at: int) -> Part: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[Part, ...]: ...

    def __getitem__(self, at: int | slice) -> Part | tuple[Part, ...]:
        """One part, or several."""
        if isinstance(at, slice):
            pairs = zip(self.load.items[at], self.digests[at], strict=True)
            return tuple(Part(item.box, item.dtype, digest) for item, digest in pairs)
        item = self.load.items[at]
        return Part(item.box, item.dtype, self.digests[at])


@dataclass(frozen=True, slots=True)
class Packet:
    """A load in transfer.

    Attributes:
        plan_digest: digest of the link's part of the sender's plan.
        version: version of the weights.
        number: number of the packet within its link.
        source: rank that sends.
        destination: rank that receives.
        parts: the boxes, in the load's order.
        payload: their elements, one box after another, each in row-major order; empty for a direct load.
        delta: what the payload holds instead, if not all elements.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    parts: Sequence[Part]
    payload: Payload
    delta: Delta | None = None

    @property
    def digests(self) -> Sequence[int]:
        """The digests of the boxes."""
        if isinstance(self.parts, PlannedParts):
            return self.parts.digests
        return [part.digest for part in self.parts]


class Packing:
    """A packet whose boxes are being packed, or only digested.

    Args:
        packet: the packet, with room for all elements of a packed load.
        load: what it carries.
        digests: of the boxes.
        delta: what its payload will hold instead of all elements.
    """

    def __init__(
        self, packet: Packet, load: Load, digests: Pending[list[int]], delta: Pending[Delta | None] | None = None
    ) -> None:
        self._packet, self.load, self._digests, self._delta = packet, load, digests, delta

    def done(self) -> bool:
        """Whether the packet is ready to send."""
        return self._digests.done() and (self._delta is None or self._delta.done())

    def result(self) -> Packet:
        """Waits until the packet is ready, and returns it."""
        packet = replace(self._packet, parts=PlannedParts(self.load, self._digests.result()))
        if self._delta is None:
            return packet
        delta = self._delta.result()
        return replace(packet, payload=packet.payload[: payload_bytes(self.load, delta)], delta=delta)


def payload_bytes(load: Load, delta: Delta | None) -> int:
    """Size of the payload of a packet.

    Args:
        load: what the packet carries.
        delta: what it holds of a packed load, if not all elements.
    """
    return load.nbytes if delta is None else delta_bytes(delta.changed, load.nbytes // load.width, load.width)


def check_parts(packet: Packet, load: Load, what: str) -> None:
    """Checks that the packet holds exactly the planned boxes, in order, with the planned dtypes.

    Args:
        packet: the packet.
        load: what the plan has.
        what: from whom and to whom it goes, for messages.

    Raises:
        TransferError: if it does not; names the first box that differs.
    """
    if isinstance(packet.parts, PlannedParts) and packet.parts.load is load:
        return
    items = load.items
    sent = {part.box for part in packet.parts}
    missing = [item.box for item in items if item.box not in sent]
    if missing:
        raise TransferError(f"the packet from {what}, lacks {missing[0]}")
    if len(packet.parts) != len(items):
        raise TransferError(f"the packet from {what}, has {len(packet.parts)} boxes and not the {len(items)} planned")
    for part, item in zip(packet.parts, items, strict=True):
        if part.box != item.box:
            raise TransferError(f"the packet from {what}, has {part.box} in the place of {item.box}")
        if part.dtype != item.dtype:
            raise TransferError(f"the packet from {what}, has {part.box} as {part.dtype}; {item.dtype} is planned")
