"""Checks that ranks hold equal values of equally named parameters, because a checkpoint keeps one entry per name."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from etp.collectives.works import gather_objects
from etp.digest import tensor_digest

_LABEL = "comparison of parameters of equal names"

PartIndex = tuple[int, int]
"""Index of a part of a parameter, and the number of parts."""


def differing_copies(held: Mapping[tuple[str, PartIndex], torch.Tensor], group: dist.ProcessGroup | None) -> str:
    """Compare what the ranks hold of the same parts by checksum. Collective.

    Only ranks with equal lists of names for a part are compared. Pipeline stages that share some names are not.

    Args:
        held: this rank's parts, by name and part.
        group: the ranks; all of them if None.

    Returns:
        which parameter differs on which ranks, the same text on all ranks; empty if none differs.
    """
    by_part: dict[PartIndex, dict[str, torch.Tensor]] = defaultdict(dict)
    for (name, part), tensor in held.items():
        by_part[part][name] = tensor
    digests = {
        _topic(part, tensors): {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        for part, tensors in by_part.items()
    }
    summaries = gather_objects({topic: _hashed(repr(found)) for topic, found in digests.items()}, group, _LABEL)
    values: dict[str, set[str]] = defaultdict(set)
    for summary in summaries:
        for topic, value in summary.items():
            values[topic].add(value)
    # The same on all ranks, so that either all or none take part in the next collective.
    unequal = [topic for topic in sorted(values) if len(values[topic]) > 1]
    if not unequal:
        return ""
    return _description(gather_objects(digests.get(unequal[0], {}), group, _LABEL), group)


def _topic(part: PartIndex, tensors: Mapping[str, torch.Tensor]) -> str:
    return _hashed(repr((part, [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()])))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _description(everyone: Sequence[Mapping[str, int]], group: dist.ProcessGroup | None) -> str:
    ranks = list(range(len(everyone))) if group is None else dist.get_process_group_ranks(group)
    holders = [(rank, digests) for rank, digests in zip(ranks, everyone, strict=True) if digests]
    first, reference = holders[0]
    differing = [name for name in reference if any(digests[name] != reference[name] for _, digests in holders)]
    other = next(rank for rank, digests in holders if digests[differing[0]] != reference[differing[0]])
    more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
    return f"{differing[0]}{more} has other values on rank {other} than on rank {first}"
