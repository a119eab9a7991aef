"""Checks that the ranks of a group hold the same weights, by checksums, so that nothing large is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from etp.collectives.works import WorkLine, gather_numbers, gather_objects
from etp.errors import PeerMismatchError

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
