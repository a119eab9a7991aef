"""Finds the mapping files, and the family of a model among them.

A mapping file is a module of ``models`` with a constant ``FAMILY``; nothing else refers to it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_patches.refit import models
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models.family import Declaration, ModelFamily

if TYPE_CHECKING:
    import torch


def declared() -> Sequence[Declaration]:
    """The declarations of this package's mapping files, in order of file name.

    Raises:
        ValueError: if two files declare the same architecture.
    """
    found: dict[str, tuple[str, Declaration]] = {}
    for entry in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"{models.__name__}.{entry.name}")
        family = getattr(module, "FAMILY", None)
        if not isinstance(family, Declaration):
            continue
        if family.architecture in found:
            raise ValueError(
                f"both {found[family.architecture][0]} and {entry.name} in {models.__name__} are for "
                f"{family.architecture}; remove one"
            )
        found[family.architecture] = entry.name, family
    return [family for _, family in found.values()]


def family_of(model: torch.nn.Module, vocab_size: int) -> ModelFamily:
    """The family of a live Megatron model, with its traits.

    Args:
        model: the model, or any pipeline stage of it, without wrappers.
        vocab_size: number of embedding rows that belong to tokens; the rest is padding.

    Raises:
        UnsupportedModelError: with every feature that cannot be expressed, and its flag.
    """
    against = {family: list(family.refusals(model, vocab_size)) for family in declared() if family.claims(model)}
    able = [family for family, clauses in against.items() if not clauses]
    if len(able) == 1:
        return able[0].read(model, vocab_size)
    if able:
        raise UnsupportedModelError(
            f"cannot export this model: it may be {' or '.join(family.architecture for family in able)}; the mapping "
            "files of all others than the right one must refuse it"
        )
    if not against:
        raise UnsupportedModelError(f"cannot export this model: no mapping file is for such a {type(model).__name__}")
    if len(against) == 1:
        (clauses,) = against.values()
        raise UnsupportedModelError("cannot export this model: " + "; ".join(clauses))
    each = (f"as {family.architecture}, {', '.join(clauses)}" for family, clauses in against.items())
    raise UnsupportedModelError("cannot export this model: " + "; ".join(each))
