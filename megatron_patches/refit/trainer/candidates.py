"""Who can send a version: a JSON document, for engines that join and for programs that watch a fleet.

docs/refit.md documents the schema.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import msgspec

CANDIDATES_SCHEMA = 1


class Source(msgspec.Struct, frozen=True):
    """One source of a version.

    Attributes:
        name: of the engine; ``trainer`` for the trainer.
        kind: ``engine`` or ``trainer``. The trainer is a source only while it sends this version.
        workers: number of the engine's workers, or of trainer ranks.
        receivers: names of the engines to which it sends the version now.
    """

    name: str
    kind: Literal["engine", "trainer"]
    workers: int
    receivers: Sequence[str]


class Candidates(msgspec.Struct, frozen=True):
    """The sources of the newest version that an engine serves.

    Attributes:
        schema: changes if a key changes its meaning.
        version: number of the version; -1 if no engine serves one.
        sources: all that have exactly this version.
        waiting: names of engines that wait for a source.
        digest: sha256, in hexadecimal digits, of the document with an empty digest.
    """

    schema: int
    version: int
    sources: Sequence[Source]
    waiting: Sequence[str]
    digest: str


def candidates_of(version: int, sources: Sequence[Source], waiting: Sequence[str]) -> Candidates:
    """The document, with its digest."""
    found = Candidates(CANDIDATES_SCHEMA, version, sources, waiting, "")
    return msgspec.structs.replace(found, digest=hashlib.sha256(msgspec.json.encode(found)).hexdigest())


def candidates_json(candidates: Candidates) -> str:
    """The document as JSON, with its keys in the order above and without blanks."""
    return msgspec.json.encode(candidates).decode()
