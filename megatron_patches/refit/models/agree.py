"""Checks that all ranks describe one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.traits import ModelTraits


def check_ranks_agree(found: Sequence[tuple[str, ModelTraits]], kind: type[RefitError]) -> None:
    """Compares the ranks' architectures and traits.

    Args:
        found: architecture and traits of each rank, by rank.
        kind: the error to raise.

    Raises:
        RefitError: of the given kind, with the first rank and field that differ from rank 0's.
    """
    architecture, first = found[0]
    for rank, (name, traits) in enumerate(found):
        pairs = [("architecture", name, architecture)]
        if name == architecture:
            pairs = [(item.name, getattr(traits, item.name), getattr(first, item.name)) for item in fields(traits)]
        for what, mine, other in pairs:
            if mine != other:
                raise kind(f"rank {rank} describes another model than rank 0: {what} {mine} instead of {other}")
