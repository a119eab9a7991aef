"""The copies of a direct load, as tables that are equal for every version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.layout.boxes import pitch_of
from megatron_patches.refit.layout.dtypes import itemsize
from megatron_patches.refit.memory.loads import Load
from megatron_patches.refit.planning.transfers import Transfer

type Int64s = NDArray[np.int64]

type End = tuple[int, int, int, int]
"""Index of a storage and an offset in bytes, at the source; the same at the target."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of equal length.

    Attributes:
        count: number of rows.
        nbytes: bytes per row.
        source_step: bytes from one row to the next at the source.
        target_step: the same at the target.
    """

    count: int
    nbytes: int
    source_step: int
    target_step: int


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Start and target of copies, as far as they are equal in every version.

    Attributes:
        source: ``[copies]``, index of each copy's source storage.
        source_offset: ``[copies]``, first byte in the source storage.
        target: ``[copies]``, index of each copy's target storage.
        target_offset: ``[copies]``, first byte in the target storage.
    """

    source: Int64s
    source_offset: Int64s
    target: Int64s
    target_offset: Int64s

    @classmethod
    def of(cls, found: Sequence[End]) -> Self:
        """Makes the arrays from a list."""
        return cls(*np.array(found, dtype=np.int64).reshape(-1, 4).T.copy())

    def addresses(self, sources: Int64s, targets: Int64s) -> tuple[Int64s, Int64s]:
        """Addresses at both ends, given the addresses of the storages."""
        return sources[self.source] + self.source_offset, targets[self.target] + self.target_offset


@dataclass(frozen=True, slots=True, eq=False)
class DirectCopies:
    """The copies of a direct load. Boxes that are consecutive at both ends form one run.

    Attributes:
        sources: names of the source storages.
        targets: names of the target storages.
        runs: contiguous copies.
        nbytes: length of each run.
        pitched: other copies.
        rows: rows of each pitched copy.
    """

    sources: list[str]
    targets: list[str]
    runs: Ends
    nbytes: Int64s
    pitched: Ends
    rows: list[Rows]

    @classmethod
    def of(cls, load: Load) -> Self:
        """The table of a load.

        Raises:
            PartyFailedError: if a box does not consist of rows.
        """
        sources: dict[str, int] = {}
        targets: dict[str, int] = {}
        runs: list[End] = []
        lengths: list[int] = []
        pitched: list[tuple[End, Rows]] = []
        for item in load.items:
            width = itemsize(item.dtype)
            source = sources.setdefault(item.read.storage, len(sources))
            target = targets.setdefault(item.write.storage, len(targets))
            end = source, item.read.offset * width, target, item.write.offset * width
            rows = _rows_of(item)
            if rows.count > 1:
                pitched.append((end, rows))
            elif runs and end == _behind(runs[-1], lengths[-1]):
                lengths[-1] += rows.nbytes
            else:
                runs.append(end)
                lengths.append(rows.nbytes)
        ends, shapes = [end for end, _ in pitched], [rows for _, rows in pitched]
        nbytes = np.array(lengths, dtype=np.int64)
        return cls(list(sources), list(targets), Ends.of(runs), nbytes, Ends.of(ends), shapes)


def _behind(end: End, nbytes: int) -> End:
    source, source_offset, target, target_offset = end
    return source, source_offset + nbytes, target, target_offset + nbytes


def _rows_of(item: Transfer) -> Rows:
    pitch = pitch_of(item.read, item.write)
    if pitch is None:
        raise PartyFailedError(f"{item.box} does not consist of rows, and was announced as if it did")
    width = itemsize(item.dtype)
    return Rows(pitch.rows, pitch.length * width, pitch.steps[0] * width, pitch.steps[1] * width)
