"""Messages of the two ends of a link on their control connection.

A source says hello once, announces packets, and passes on what its wire has to tell; a destination answers with the
numbers of slots that it has unpacked, one byte each.
"""

from __future__ import annotations

import struct

import msgspec


class Hello(msgspec.Struct):
    """The first message on a link, behind the secret.

    Attributes:
        source: rank of the source.
        plan_digest: digest of what its plan moves over this link.
        slot_bytes: size that it takes slots to have.
    """

    source: int
    plan_digest: str
    slot_bytes: int


class Told(msgspec.Struct, tag=True, array_like=True):
    """What a source's wire tells its destination's.

    Attributes:
        content: as the wire has written it.
    """

    content: bytes


class Head(msgspec.Struct, tag=True, array_like=True):
    """Announces a packet.

    The boxes are not named: both ends have cut the same plan on the same terms.

    Attributes:
        plan_digest: digest of what the source's plan moves over this link.
        version: number of the weights.
        number: number of the packet among those of its link.
        source: rank of the source.
        destination: rank of the destination.
        digests: of its boxes, in order.
        nbytes: of its boxes together.
        slot: where it lies.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    digests: tuple[int, ...]
    nbytes: int
    slot: int


decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_message = msgspec.msgpack.Decoder(Told | Head).decode
encode = msgspec.msgpack.Encoder().encode
SLOT = struct.Struct("<B")
NO_SLOT = 255  # of a direct load
