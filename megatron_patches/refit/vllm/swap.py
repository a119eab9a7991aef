"""Swaps new content into serving memory and keeps the old content in place of the new, without a third copy.

[Note: exchange] Two tensors swap their content. On a GPU, pairs of tensors with equal layouts are swapped in one kernel
launch, which only copies if nobody could ask for the old content afterwards. Other pairs are swapped piece by piece,
through a buffer of bounded size. Swapping requires memory that nothing else reads or writes. So if a new tensor shares
elements with another one, or processing has kept a reference to its memory, its content is copied instead, and the old
content is kept in new memory.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch

ROOM_BYTES = 64 << 20

Pair = tuple[torch.Tensor, torch.Tensor]
"""Serving memory and its new content, of the same shape and dtype."""
Span = tuple[int, int, int]
"""A span of memory: identity of its storage, its first byte, and the byte after its last."""


def span_of(tensor: torch.Tensor) -> Span:
    """The memory span of a tensor's elements, gaps included; empty for a tensor without elements."""
    low = int(tensor.storage_offset()) * tensor.element_size()
    return int(tensor.untyped_storage()._cdata), low, low + _extent(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * (1 + sum((extent - 1) * step for extent, step in steps))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its span without overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    dims = ((step, extent) for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent != 1)
    for step, extent in sorted(dims):
        if step != expected:
            return False
        expected *= extent
    return True


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same elements in the same places."""
    return one.data_ptr() == other.data_ptr() and one.device == other.device and one.stride() == other.stride()


def overlapping(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Indices of the tensors whose span overlaps another's, by address: devices share one range of addresses."""
    starts = ((tensor.data_ptr(), tensor, index) for index, tensor in enumerate(tensors) if tensor.numel())
    spans = sorted((start, start + _extent(tensor), index) for start, tensor, index in starts)
    found: set[int] = set()
    highest, owner = 0, -1  # the highest byte so far, and the index of its tensor
    for low, high, index in spans:
        if low < highest:
            found |= {index, owner}
        if high > highest:
            highest, owner = high, index
    return found


class Users:
    """Counts of the tensors that refer to memory, at the time of construction.

    Args:
        tensors: the tensors whose memory is counted.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._tensors = list(tensors)  # kept, because an identity is valid only while its object lives
        self._known = {int(holder._cdata) for tensor in self._tensors for holder in _holders(tensor)}
        self._count = {int(tensor.untyped_storage()._cdata): users_of(tensor) for tensor in self._tensors}

    def settle(self) -> None:
        """Lowers the counts for references dropped since, while nothing has been made from the memory yet."""
        for tensor in self._tensors:
            storage = int(tensor.untyped_storage()._cdata)
            self._count[storage] = min(self._count[storage], users_of(tensor))

    def joined_only_by(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Identities of the storages of ``tensors`` to which no other tensor has begun to refer since."""
        # The storage itself counts as one.
        return {
            storage
            for storage, found in self._new_holders(tensors).items()
            if torch._C._storage_Use_Count(storage) <= self._count.get(storage, 1) + len(found)
        }

    def _new_holders(self, tensors: Iterable[torch.Tensor]) -> dict[int, set[int]]:
        """By storage: the tensors, or the bases of views among them, that have begun to refer to it since."""
        found: dict[int, set[int]] = defaultdict(set)
        for tensor in tensors:
            of_storage = found[int(tensor.untyped_storage()._cdata)]
            of_storage |= {int(holder._cdata) for holder in _holders(tensor)} - self._known
        return found


class Swap:
    """Replaces the content of serving memory, and can restore the old content.

    Args:
        pairs: the memory and its new content, in order. The caller must not use the new tensors afterwards.
        users: counts for the memory of the new content, from before ``pairs`` were made from it.
        plain: further pairs, from whose new content nothing was made, so that nobody can have kept a part of it.
        room_bytes: size of the buffer on each device.
        kernels: whether to use the Triton kernel; None to use it where Triton and a GPU are available.

    Attributes:
        copied_bytes: size of the content that is copied, not swapped; see [Note: exchange].
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        users: Users | None = None,
        room_bytes: int = ROOM_BYTES,
        *,
        plain: Sequence[Pair] = (),
        kernels: bool | None = None,
    ) -> None:
        made, given = ([pair for pair in some if pair[0].numel() and not same_memory(*pair)] for some in (pairs, plain))
        exchanged, self._copied = _sort(made, users or Users(), given)
        self.copied_bytes = sum(old.nbytes for old, _ in self._copied)
        by_kernel, by_pieces = _by_kernel(exchanged, kernels)
        self._of_kernel = [pair for pairs in by_kernel.values() for pair in pairs]  # kept: steps know only addresses
        rooms = _Rooms(room_bytes)
        pieces = (piece for pair in by_pieces for piece in _cut(*pair, room_bytes))
        self._steps: list[_Step] = [_Piece(old, new, rooms.place(old)) for old, new in pieces]
        self._steps += [_exchange_of(device, pairs) for device, pairs in by_kernel.items()]
        self._kept: list[Pair] = []

    def run(self, *, keeps_old: bool = True) -> None:
        """Puts the new content in place. After an error, call :meth:`undo`.

        Args:
            keeps_old: whether :meth:`undo` must also work after success. If not, and if a kernel comes last, its last
                launch overwrites: nothing fails after it.
        """
        for old, new in self._copied:
            self._kept.append((old, old.clone()))
            old.copy_(new)
        for step in self._steps:
            step.run(keeps_old=keeps_old or step is not self._steps[-1])

    def undo(self) -> None:
        """Restores what :meth:`run` has replaced so far. The new content is lost.

        Raises:
            TransferError: if the old content was overwritten.
        """
        for step in reversed(self._steps):
            step.undo()
        for old, before in reversed(self._kept):
            old.copy_(before)


class _Step(Protocol):
    """Part of an exchange."""

    def run(self, *, keeps_old: bool) -> None:
        """Puts the new content in place, and the old where the new was; ``keeps_old`` as for :meth:`Swap.run`."""

    def undo(self) -> None:
        """Restores the old content, as far as it was replaced."""


class _Piece:
    """A piece that is swapped through a buffer.

    Args:
        serving: a piece of serving memory.
        other: the same piece of its new content.
        place: memory of the buffer, in the shape of the piece.
    """

    def __init__(self, serving: torch.Tensor, other: torch.Tensor, place: torch.Tensor) -> None:
        self._serving, self._other, self._place = serving, other, place
        self._old_in: torch.Tensor | None = None  # where the old content is while it is replaced

    def run(self, *, keeps_old: bool) -> None:  # noqa: ARG002 - another piece may fail, and all are undone then
        self._place.copy_(self._serving)
        self._old_in = self._place
        self._serving.copy_(self._other)
        self._other.copy_(self._place)
        self._old_in = self._other

    def undo(self) -> None:
        if self._old_in is not None:
            self._serving.copy_(self._old_in)
            self._old_in = None


class _Rooms:
    """The buffers, by device."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._made: dict[torch.device, torch.Tensor] = {}

    def place(self, like: torch.Tensor) -> torch.Tensor:
        """The beginning of the buffer, in the shape of ``like``."""
        room = self._made.get(like.device)
        if room is None:
            room = self._made[like.device] = torch.empty(self._nbytes, dtype=torch.uint8, device=like.device)
        return room[: like.nbytes].view(like.dtype).view(like.shape)


def _holders(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor and its base, if it is a view: the base may be kept alive by the view alone."""
    return [tensor] if tensor._base is None else [tensor, tensor._base]


def users_of(tensor: torch.Tensor) -> int:
    """Number of tensors that refer to a tensor's storage, plus one for the storage itself."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def _sort(made: Sequence[Pair], users: Users, given: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs into those that can be swapped and those whose content must be copied."""
    pairs = [*given, *made]
    shared = overlapping(tensor for pair in pairs for tensor in pair)
    own = users.joined_only_by([new for _, new in made])
    exchanged: list[Pair] = []
    copied: list[Pair] = []
    for index, (old, new) in enumerate(pairs):
        apart = not shared & {2 * index, 2 * index + 1} and is_dense(old) and is_dense(new)
        is_own = index < len(given) or int(new.untyped_storage()._cdata) in own
        (exchanged if is_own and apart else copied).append((old, new))
    return exchanged, copied


def _by_kernel(pairs: Sequence[Pair], kernels: bool | None) -> tuple[dict[torch.device, list[Pair]], list[Pair]]:
    """Splits pairs into those that a kernel swaps, by device, and those that are swapped through the buffer."""
    there = importlib.util.find_spec("triton") is not None if kernels is None else kernels
    flat: dict[torch.device, list[Pair]] = defaultdict(list)
    others: list[Pair] = []
    for old, new in pairs:
        apt = there and (old.is_cuda if kernels is None else True)
        alike = old.dtype == new.dtype and old.stride() == new.stride() and old.device == new.device
        if apt and alike:
            flat[old.device].append((old, new))
        else:
            others.append((old, new))
    return flat, others


def make_ready(device: torch.device) -> None:
    """Compiles the kernel, so that the first swap on a device does not wait for it."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from megatron_patches.refit.vllm.exchange_kernel import compile_for

        compile_for(device)


def _exchange_of(device: torch.device, pairs: Sequence[Pair]) -> _Step:
    from megatron_patches.refit.vllm.exchange_kernel import MemorySwap

    return MemorySwap([(old.data_ptr(), new.data_ptr(), old.nbytes) for old, new in pairs], device)


def _cut(old: torch.Tensor, new: torch.Tensor, limit: int) -> Iterator[Pair]:
    """Cuts a pair into pieces of at most ``limit`` bytes."""
    if old.stride() == new.stride() and old.dim() != 1:
        # Equal strides: cut as flat spans.
        flat = (old.numel(),), (1,)
        yield from _cut(old.as_strided(*flat), new.as_strided(*flat), limit)
        return
    width = old.element_size()
    if old.numel() * width <= limit:
        yield old, new
        return
    if old.shape[0] == 1:
        yield from _cut(old[0], new[0], limit)
        return
    rows = max(limit // (old.numel() // old.shape[0] * width), 1)
    bounds = [*range(0, old.shape[0], rows), old.shape[0]]
    for low, high in pairwise(bounds):
        yield from _cut(old[low:high], new[low:high], limit)
