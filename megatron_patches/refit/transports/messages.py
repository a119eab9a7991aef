"""Messages of the two ends of a link on their control connection.

A source sends one hello, announces packets, and tells of its storages. A destination answers with one byte each: the
number of a slot that it has unpacked, or one of those below.
"""

from __future__ import annotations

import struct

import msgspec


class Hello(msgspec.Struct):
    """The first message on a link, after the secret.

    Attributes:
        source: rank of the source.
        plan_digest: digest of the link's part of its plan.
        slot_bytes: size of a slot, as the source has computed it.
    """

    source: int
    plan_digest: str
    slot_bytes: int


class Told(msgspec.Struct, tag=True, array_like=True):
    """What a source tells about its storages. It announces no packet until that is taken.

    Attributes:
        content: the message, encoded by the transport.
    """

    content: bytes


class Head(msgspec.Struct, tag=True, array_like=True):
    """Announces a packet.

    The boxes are not named, because both ends have cut the same plan on the same terms.

    Attributes:
        plan_digest: digest of the link's part of the source's plan.
        version: number of the weights.
        number: number of the packet within its link.
        source: rank of the source.
        destination: rank of the destination.
        digests: digests of its boxes, in order.
        nbytes: size of its payload; for a direct load, of its boxes.
        slot: number of its slot.
        base: number of the version that the payload is relative to; -1 if it holds all elements.
        changed: number of elements that differ from the base.
    """

    plan_digest: str
    version: int
    number: int
    source: int
    destination: int
    digests: tuple[int, ...]
    nbytes: int
    slot: int
    base: int = -1
    changed: int = 0


decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_message = msgspec.msgpack.Decoder(Told | Head).decode
encode = msgspec.msgpack.Encoder().encode
decode_numbers = msgspec.msgpack.Decoder(list[int]).decode
SLOT = struct.Struct("<B")
NO_SLOT = 255
"""In place of a slot, for a direct load."""
TAKEN = 254
"""The destination has taken what it was told."""
ASK = 253
"""The destination asks for file descriptors; a message with their numbers follows."""
