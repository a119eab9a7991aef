"""Messages of the parties at the rendezvous: what each holds or wants, and how a version was moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_patches.refit.boxes import TensorSpec
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.planning.layouts import Layout, Region
from megatron_patches.refit.planning.requests import Request
from megatron_patches.refit.planning.tensors import TensorGrid

DESCRIBING = "describing the trainer's weights"
RECORDING = "recording the engine's layout"
PLANNING = "planning"
"""Steps in which each party is told what the registry (``parties/registry.py``) makes of all parts."""


@dataclass(frozen=True)
class Held:
    """What a source holds. Of all but the manifest, what the first source says counts, and others may leave it out.

    Attributes:
        config: content of the model's ``config.json``.
        shapes: global shape of every tensor of the model, by Hugging Face name.
        manifest: its own part.
        allow_narrowing: see :class:`megatron_patches.refit.plan.PlanOptions`.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    manifest: Manifest
    allow_narrowing: bool = False

    def tensors(self) -> list[TensorSpec]:
        """The tensors of the model, without their types, which their holders know."""
        return [TensorSpec(name, tuple(shape), "") for name, shape in self.shapes.items()]


class Registered(msgspec.Struct, frozen=True):
    """:class:`Held` in few words.

    Attributes:
        rank: of the source.
        host: name of its machine.
        config: content of the model's ``config.json``.
        tensors: every tensor of the model, without types.
        layout: its own part.
        allow_narrowing: see :class:`megatron_patches.refit.plan.PlanOptions`.
    """

    rank: int
    host: str
    config: dict[str, Any]
    tensors: tuple[TensorGrid, ...]
    layout: Layout
    allow_narrowing: bool


class Registration(msgspec.Struct):
    """What any party answers when all are asked what they hold; a destination holds None."""

    held: Registered | None


class ModelAnswer(msgspec.Struct, frozen=True):
    """What all are told of the model; see :class:`Model`."""

    config: dict[str, Any]
    tensors: tuple[TensorGrid, ...]
    allow_narrowing: bool


class Wanted(msgspec.Struct, frozen=True):
    """What any party answers when all are asked what they want; a source wants nothing."""

    regions: tuple[Region, ...]


class Overlap(msgspec.Struct, frozen=True):
    """What a destination is told of the sources that overlap what it wants.

    Attributes:
        layouts: distinct ones, less what does not overlap.
        holders: rank and host of each source, and the index of its layout.
    """

    layouts: list[Layout]
    holders: list[tuple[int, str, int]]


class Asked[R: (list[Request], msgspec.Raw)](msgspec.Struct, frozen=True):
    """What a destination asks of each source, by rank; digest and bytes of its plan.

    The registry passes requests on as they come, without reading them: the source checks them.
    """

    requests: dict[int, R]
    digest: str
    nbytes: int


class Orders[R: (list[Request], msgspec.Raw)](msgspec.Struct, frozen=True):
    """What is asked of a source, by rank of the destination; digest and bytes of the plans of all destinations."""

    requests: list[tuple[int, R]]
    digest: str
    nbytes: int


@dataclass(frozen=True)
class Model:
    """What destinations are told of the model; each makes it of what the sources have answered.

    Attributes:
        config: content of its ``config.json``.
        tensors: its tensors, with the trainer's element types.
    """

    config: Mapping[str, Any]
    tensors: Sequence[TensorSpec]


class Moved(msgspec.Struct, frozen=True):
    """How a party moved a version, or how all did.

    Attributes:
        seconds: what its parts took; of all, the longest on any. On a source ``look_up`` its storages. On a destination
            ``move`` (packing, the way and unpacking, which overlap), ``allocate`` before and ``verify`` after it.
        staged_bytes: the most memory that packets took at a time; of all, on any party.
        beside_bytes: memory that a destination made for the version beside what serves; of all, on any.
        backup_bytes: memory of its host in which it keeps what serves; of all, on any.
    """

    seconds: dict[str, float]
    staged_bytes: int
    beside_bytes: int = 0
    backup_bytes: int = 0


def moved_by_all(moved: Sequence[Moved], sources: int) -> Moved:
    """How all parties moved a version.

    Args:
        moved: how each did, sources first.
        sources: number of sources.
    """
    destinations = moved[sources:]
    parts = sorted({part for item in destinations for part in item.seconds})
    looked_up = max(item.seconds.get("look_up", 0.0) for item in moved[:sources])
    seconds = {part: max(item.seconds.get(part, 0.0) for item in destinations) for part in parts}
    return Moved(
        seconds={"look_up": looked_up, **seconds},
        staged_bytes=max(item.staged_bytes for item in moved),
        beside_bytes=max(item.beside_bytes for item in moved),
        backup_bytes=max(item.backup_bytes for item in moved),
    )


def commit_topic(version: int) -> str:
    """Under which topic workers post how they have committed a version."""
    return f"committing version {version}"
