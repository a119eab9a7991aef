"""Messages of the two ends of a link on their control connection.

A source sends one hello, announces each packet, and tells of its storages. A destination answers with one byte each:
the number of a slot that it has unpacked, :data:`megatron_patches.refit.memory.packets.NO_SLOT` for a direct load that
has arrived, or one of those below.
"""

from __future__ import annotations

import struct

import msgspec

from megatron_patches.refit.memory.packets import Packet


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


decode_hello = msgspec.msgpack.Decoder(Hello).decode
decode_message = msgspec.msgpack.Decoder(Told | Packet).decode
encode_message = msgspec.msgpack.Encoder().encode
decode_numbers = msgspec.msgpack.Decoder(list[int]).decode
SLOT = struct.Struct("<B")
TAKEN = 254
"""The destination has taken what it was told."""
ASK = 253
"""The destination asks for file descriptors; a message with their numbers follows."""
