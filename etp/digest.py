"""Checks that the ranks of a group hold the same weights, by checksums, so that nothing large is sent."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from etp.collectives.works import WorkLine, gather_numbers, gather_objects
from etp.errors import PeerMismatchError

PartIndex = tuple[int, int]
"""Index of a part of a parameter, and the number of parts."""

_OF_COPIES = "comparison of parameters of equal names"

# 32-bit words at a time: enough for a GPU, and few enough for a CPU's cache.
_CHUNK = 1 << 20
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, as a signed 64-bit integer


def tensor_digest(tensor: torch.Tensor) -> int:
    """A position-weighted sum, modulo 2^64, of a tensor's bytes; equal bytes give equal digests on any device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = data.numel()
    if size % 4 or data.storage_offset() % 4:
        data = nn.functional.pad(data, (0, -size % 4))
    words = data.view(torch.int32)
    places = torch.arange(1, min(words.numel(), _CHUNK) + 1, device=data.device, dtype=torch.int64) * _MULTIPLIER
    total = torch.full((), _signed(size * _MULTIPLIER), device=data.device, dtype=torch.int64)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK]
        # int64 arithmetic wraps, which is the modulus wanted. Odd factors are invertible, so no changed bit vanishes.
        factors = places[: chunk.numel()] + _signed(start * _MULTIPLIER)
        total += factors.bitwise_or_(1).mul_(chunk).sum()
    return int(total) % (1 << 64)


def _signed(number: int) -> int:
    """The number modulo 2^64, as a signed integer of 64 bits."""
    number %= 1 << 64
    return number - (1 << 64) if number >= 1 << 63 else number


def unless_refused[T](own: T | Exception, groups: Sequence[dist.ProcessGroup], what: str) -> T:
    """Raise on all ranks, with the reason, if one of them refuses its arguments. Collective over each group.

    Args:
        own: this rank's result, or the exception with which it refuses.
        groups: the ranks that would wait for each other otherwise.
        what: name of the call in the error message.

    Returns:
        ``own``.

    Raises:
        Exception: ``own``, on a rank that refuses.
        PeerMismatchError: on the others.
    """
    found = f"rank {dist.get_rank()} refuses: {type(own).__name__}: {own}" if isinstance(own, Exception) else ""
    for group in groups:
        everyone = gather_objects(found, group, f"start of {what}")
        # A rank in two groups passes on what it has learned.
        found = found or next(filter(None, everyone), "")
    if isinstance(own, Exception):
        raise own
    if found:
        raise PeerMismatchError(f"{what}: {found}")
    return own


def check_peers_agree(tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Compare names, shapes, dtypes and bytes over a group. Collective.

    Args:
        tensors: what this rank holds, by name.
        group: the ranks that must agree.
        what: name of these tensors in the error message.

    Raises:
        PeerMismatchError: on every rank of the group, naming what differs from the group's first rank.
    """
    manifest = [f"{name} {list(t.shape)} {t.dtype}" for name, t in tensors.items()]
    # The device that the group's backend needs; the tensors may be elsewhere, such as a state dict read from a file.
    device = torch.device(dist.distributed_c10d._get_object_coll_device(group))
    shape_digest = int.from_bytes(hashlib.sha256("\n".join(manifest).encode()).digest()[:8], "little", signed=True)
    if not _all_equal(torch.tensor([shape_digest], device=device), group, what).all():
        _raise_for_manifests(gather_objects(manifest, group, f"comparison of names in {what}"), group, what)
    if not tensors:
        return
    signed = [_signed(tensor_digest(tensor)) for tensor in tensors.values()]
    equal = _all_equal(torch.tensor(signed, dtype=torch.int64, device=device), group, what)
    if not equal.all():
        differing = [name for name, same in zip(tensors, equal.tolist(), strict=True) if not same]
        raise PeerMismatchError(
            f"{what}: ranks {dist.get_process_group_ranks(group)} hold different values of {_some(differing)}. "
            "Give all ranks the same weights first: one seed, one checkpoint, or a broadcast"
        )


def _all_equal(values: torch.Tensor, group: dist.ProcessGroup, what: str) -> torch.Tensor:
    everyone = gather_numbers(values, group, WorkLine(), None, f"comparison of weights in {what}")
    return (everyone == everyone[0]).all(dim=0)


def _raise_for_manifests(manifests: list[list[str]], group: dist.ProcessGroup, what: str) -> None:
    ranks = dist.get_process_group_ranks(group)
    for rank, manifest in zip(ranks, manifests, strict=True):
        only_first = [entry for entry in manifests[0] if entry not in manifest]
        only_here = [entry for entry in manifest if entry not in manifests[0]]
        if only_first or only_here:
            raise PeerMismatchError(
                f"{what}: rank {rank} has {_some(only_here) or 'nothing'} where rank {ranks[0]} has "
                f"{_some(only_first) or 'nothing'}; build the same model on all ranks"
            )
    raise PeerMismatchError(f"{what}: ranks {ranks} list the same weights in different orders")


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
    summaries = gather_objects({topic: _hashed(repr(found)) for topic, found in digests.items()}, group, _OF_COPIES)
    values: dict[str, set[str]] = defaultdict(set)
    for summary in summaries:
        for topic, value in summary.items():
            values[topic].add(value)
    # The same on all ranks, so that either all or none take part in the next collective.
    unequal = [topic for topic in sorted(values) if len(values[topic]) > 1]
    if not unequal:
        return ""
    return _description(gather_objects(digests.get(unequal[0], {}), group, _OF_COPIES), group)


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
