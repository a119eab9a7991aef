"""Messages between a rendezvous and its parties: msgpack in messages of zmq."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Join(msgspec.Struct, tag=True):
    """A party introduces itself."""

    party: int
    name: str


class Outcome(msgspec.Struct, tag=True):
    """What a party's part of a step came to."""

    step: int
    what: str
    payload: bytes = b""
    reason: str | None = None


class Results(msgspec.Struct, tag=True):
    """All parts of a step, by party."""

    step: int
    payloads: list[bytes]


class Failure(msgspec.Struct, tag=True):
    """A step has failed."""

    step: int
    reasons: list[str]


class Alert(msgspec.Struct, tag=True):
    """A party has failed in a step that others are still at work in."""

    step: int
    reason: str


class Notice(msgspec.Struct, tag=True):
    """What a party has to say outside of any step; with an empty topic, that it has ended."""

    topic: str
    party: int
    reason: str | None = None


class Refusal(msgspec.Struct, tag=True):
    """Who wanted to join may not."""

    reason: str


class Beat(msgspec.Struct, tag=True):
    """The rendezvous is there."""


LONGEST_TIMEOUT_S = 3600.0
"""The longest that a step may wait for a party, whoever asks for it; an engine may answer no request meanwhile."""
BEAT_S = 1.0
"""How often it says so."""
TICK_S = 0.2
"""How often a wait on either side looks around."""

decode_of_party = msgspec.msgpack.Decoder(Join | Outcome | Notice).decode
decode_of_server = msgspec.msgpack.Decoder(Results | Failure | Alert | Notice | Refusal | Beat).decode
encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class Invitation:
    """What a party needs to know to join.

    Attributes:
        host: address that the server listens on.
        port: its port.
        token: the server's public key as 64 hexadecimal digits, secret all the same: who has it is invited.
        parties: how many there are.
        timeout_s: seconds that a step may take after its first party has finished.
    """

    host: str
    port: int
    token: str
    parties: int
    timeout_s: float


def endpoint(host: str, port: int | str) -> str:
    """What zmq calls a port of an address, which may be of either IP version."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
