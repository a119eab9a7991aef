"""Swaps new content into serving memory and keeps the old content in place of the new, without a third copy.

[Note: exchange] Two tensors swap their content: on a GPU in one kernel launch for all, which only copies if nobody
could ask for the old content afterwards; elsewhere piece by piece, through a buffer of bounded size. Swapping requires
memory that nothing else reads or writes, and the same order of elements on both sides. Where a new tensor shares
elements with another one, processing has kept a reference to its memory, or its elements lie in another order, its
content is copied instead, and the old content is kept in new memory.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_patches.refit.vllm.exchange_kernel import MemorySwap

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
        self._exchanged = exchanged  # kept: kernels know only addresses
        self._kernels: list[MemorySwap] = []
        self._pieces: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # with a part of the buffer for each
        self._replaced: list[Pair] = []  # by copies: serving memory, and where its old content is
        by_device: dict[torch.device, list[Pair]] = defaultdict(list)
        for pair in exchanged:
            by_device[pair[0].device].append(pair)
        for device, alike in by_device.items():
            if _has_kernel(device) if kernels is None else kernels:
                self._kernels.append(_kernel(device, alike))
                continue
            room = torch.empty(room_bytes, dtype=torch.uint8, device=device)
            for both in alike:
                pieces = zip(*(_bytes_of(tensor).split(room_bytes) for tensor in both), strict=True)
                self._pieces += [(old, new, room[: old.numel()]) for old, new in pieces]

    def run(self, *, keeps_old: bool = True) -> None:
        """Puts the new content in place. After an error, call :meth:`undo`.

        Args:
            keeps_old: whether :meth:`undo` must also work after success. If not, and if a kernel comes last, its last
                launch overwrites: nothing fails after it.
        """
        for old, new in self._copied:
            self._replaced.append((old, old.clone()))
            old.copy_(new)
        for old, new, room in self._pieces:
            self._replaced.append((old, room.copy_(old)))
            old.copy_(new)
            new.copy_(room)
            self._replaced[-1] = old, new
        for kernel in self._kernels:
            kernel.run(keeps_old=keeps_old or kernel is not self._kernels[-1])

    def undo(self) -> None:
        """Restores what :meth:`run` has replaced so far. The new content is lost.

        Raises:
            TransferError: if the old content was overwritten.
        """
        for kernel in reversed(self._kernels):
            kernel.undo()
        while self._replaced:
            old, before = self._replaced[-1]
            old.copy_(before)
            self._replaced.pop()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


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
        apart = not shared & {2 * index, 2 * index + 1} and _lie_alike(old, new)
        is_own = index < len(given) or int(new.untyped_storage()._cdata) in own
        (exchanged if is_own and apart else copied).append((old, new))
    return exchanged, copied


def _lie_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether two tensors of one shape are dense, with elements of one type in the same order, on one device."""
    steps = [
        [step for step, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent > 1]
        for tensor in (old, new)
    ]
    alike = old.device == new.device and old.dtype is new.dtype
    return alike and steps[0] == steps[1] and is_dense(old)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def make_ready(device: torch.device) -> None:
    """Compiles the kernel, so that the first swap on a device does not wait for it."""
    if _has_kernel(device):
        from megatron_patches.refit.vllm.exchange_kernel import compile_for

        compile_for(device)


def _kernel(device: torch.device, pairs: Sequence[Pair]) -> MemorySwap:
    from megatron_patches.refit.vllm.exchange_kernel import MemorySwap

    return MemorySwap([(old.data_ptr(), new.data_ptr(), old.nbytes) for old, new in pairs], device)
