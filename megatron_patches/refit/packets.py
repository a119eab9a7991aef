"""A load on its way from a source to a destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_patches.refit.delta import Delta, delta_bytes
from megatron_patches.refit.loads import Load
from megatron_patches.refit.ports import Payload, Pending


@dataclass(frozen=True, slots=True)
class Packet:
    """A load in transfer.

    Attributes:
        plan_digest: digest of the link's part of the sender's plan.
        version: version of the weights.
        number: number of the packet within its link.
        source: rank that sends.
        destination: rank that receives.
        digests: digests of the load's boxes, in its order. Boxes are not named: both ends have cut the same plan.
        payload: their elements, one box after another, each in row-major order; empty for a direct load.
        delta: what the payload holds instead, if not all elements.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    digests: Sequence[int]
    payload: Payload
    delta: Delta | None = None


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
        packet = replace(self._packet, digests=self._digests.result())
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
