"""Messages between a rendezvous and its parties: msgpack over zmq."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Join(msgspec.Struct, tag=True):
    """A party introduces itself."""

    party: int
    name: str


class Outcome(msgspec.Struct, tag=True):
    """The result of a party's part of a step."""

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
    """A party has failed in a step that others are still working on."""

    step: int
    reason: str


class Notice(msgspec.Struct, tag=True):
    """A party's message outside of any step. An empty topic means that the party has disconnected."""

    topic: str
    party: int
    reason: str | None = None


class Rejection(msgspec.Struct, tag=True):
    """The party may not join."""

    reason: str


class Beat(msgspec.Struct, tag=True):
    """The rendezvous is alive."""


LONGEST_TIMEOUT_S = 3600.0
"""Longest timeout of a step, in seconds. An engine may answer no requests while it waits."""
BEAT_S = 1.0
"""Interval of the server's :class:`Beat`, in seconds."""
TICK_S = 0.2
"""Polling interval of waits on either side, in seconds."""

decode_of_party = msgspec.msgpack.Decoder(Join | Outcome | Notice).decode
decode_of_server = msgspec.msgpack.Decoder(Results | Failure | Alert | Notice | Rejection | Beat).decode
encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class Invitation:
    """What a party needs to know to join.

    Attributes:
        host: address that the server listens on.
        port: its port.
        token: the server's public key as 64 hexadecimal digits. Secret nevertheless: anyone who has it may join.
        timeout_s: seconds that a step may take after its first party has finished.
    """

    host: str
    port: int
    token: str
    timeout_s: float


def endpoint(host: str, port: int | str) -> str:
    """The zmq endpoint of a port at an IPv4 or IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
