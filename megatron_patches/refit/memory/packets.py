"""A load on its way from a source to a destination."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from megatron_patches.refit.memory.delta import Delta, delta_bytes
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.memory.ports import Pending

NO_SLOT = 255
"""In place of a slot's number."""


class Packet(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A load in transfer, as its source announces it. The payload travels by itself.

    The boxes are not named, because both ends have cut the same plan on the same terms.

    Attributes:
        plan_digest: digest of the link's part of the source's plan.
        version: version of the weights.
        number: number of the packet within its link.
        source: rank that sends.
        destination: rank that receives.
        digests: digests of the load's boxes, in its order.
        nbytes: size of the payload; for a direct load, of its boxes.
        delta: what the payload holds if not all elements, one box after another, each in row-major order.
        slot: number of the link's slot that the payload is in; :data:`NO_SLOT` for a direct load, and outside of links.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    digests: tuple[int, ...]
    nbytes: int
    delta: Delta | None = None
    slot: int = NO_SLOT


class Packing:
    """A packet whose boxes are being packed, or only digested.

    Args:
        packet: the packet, without digests, as if its payload held all elements.
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
        digests = tuple(self._digests.result())
        delta = None if self._delta is None else self._delta.result()
        nbytes = payload_bytes(self.load, delta)
        return replace(self._packet, digests=digests, nbytes=nbytes, delta=delta)


def payload_bytes(load: Load, delta: Delta | None) -> int:
    """Size of the payload of a packet.

    Args:
        load: what the packet carries.
        delta: what it holds of a packed load, if not all elements.
    """
    return load.nbytes if delta is None else delta_bytes(delta.changed, load.nbytes // load.width, load.width)
