"""The parties' messages at the rendezvous: what each holds or wants, and how a version was moved."""

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
"""Steps in which the registry (``parties/registry.py``) computes an answer for each party from all parts."""


@dataclass(frozen=True)
class Held:
    """What a source holds. Only the manifest is used of sources other than the first; they may leave the rest empty.

    Attributes:
        config: content of the model's ``config.json``.
        shapes: global shape of every tensor of the model, by Hugging Face name.
        manifest: this source's part.
        allow_narrowing: see :class:`megatron_patches.refit.plan.PlanOptions`.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    manifest: Manifest
    allow_narrowing: bool = False

    def tensors(self) -> list[TensorSpec]:
        """The tensors of the model, without dtypes, which only the holders know."""
        return [TensorSpec(name, tuple(shape), "") for name, shape in self.shapes.items()]


class Registered(msgspec.Struct, frozen=True):
    """:class:`Held` in compact form.

    Attributes:
        rank: of the source.
        host: name of its machine.
        config: content of the model's ``config.json``.
        tensors: every tensor of the model, without types.
        layout: this source's part.
        allow_narrowing: see :class:`megatron_patches.refit.plan.PlanOptions`.
    """

    rank: int
    host: str
    config: dict[str, Any]
    tensors: tuple[TensorGrid, ...]
    layout: Layout
    allow_narrowing: bool


class Registration(msgspec.Struct):
    """A party's answer in the step ``DESCRIBING``; None for a destination."""

    held: Registered | None


class ModelAnswer(msgspec.Struct, frozen=True):
    """The model, sent to all parties; see :class:`Model`."""

    config: dict[str, Any]
    tensors: tuple[TensorGrid, ...]
    allow_narrowing: bool


class Wanted(msgspec.Struct, frozen=True):
    """A party's answer in the step ``RECORDING``: the regions that it wants; none for a source."""

    regions: tuple[Region, ...]


class Overlap(msgspec.Struct, frozen=True):
    """The sources that overlap what a destination wants.

    Attributes:
        layouts: distinct layouts, without the parts that do not overlap.
        holders: rank, host and index of the layout of each source.
    """

    layouts: list[Layout]
    holders: list[tuple[int, str, int]]


class Asked[R: (list[Request], msgspec.Raw)](msgspec.Struct, frozen=True):
    """What a destination requests of each source, by rank; digest and bytes of its plan.

    The registry forwards the requests without decoding them: the source checks them.
    """

    requests: dict[int, R]
    digest: str
    nbytes: int


class Orders[R: (list[Request], msgspec.Raw)](msgspec.Struct, frozen=True):
    """What is requested of a source, by destination rank; digest and bytes of the plans of all destinations."""

    requests: list[tuple[int, R]]
    digest: str
    nbytes: int


@dataclass(frozen=True)
class Model:
    """The model as destinations see it; each builds it from the sources' answers.

    Attributes:
        config: content of its ``config.json``.
        tensors: its tensors, with the trainer's element types.
    """

    config: Mapping[str, Any]
    tensors: Sequence[TensorSpec]


class Moved(msgspec.Struct, frozen=True):
    """How one party moved a version, or all parties together.

    Attributes:
        seconds: time of each part; for all parties, the longest of any. A source has ``look_up`` (of its storages). A
            destination has ``move`` (packing, transfer and unpacking, which overlap), ``allocate`` before it and
            ``verify`` after it.
        staged_bytes: peak memory of packets; for all parties, the highest of any.
        beside_bytes: memory that a destination allocated for the version beside the one served; likewise.
        backup_bytes: host memory in which a destination keeps the version served; likewise.
    """

    seconds: dict[str, float]
    staged_bytes: int
    beside_bytes: int = 0
    backup_bytes: int = 0


def moved_by_all(moved: Sequence[Moved], sources: int) -> Moved:
    """How all parties moved a version.

    Args:
        moved: of each party, sources first.
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
    """Topic under which workers post the results of their commits."""
    return f"committing version {version}"


def served_topic(version: int) -> str:
    """Topic under which the first rank posts how an engine's commit of a version went."""
    return f"serving version {version}"
