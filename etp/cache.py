"""Cache of gather buffers: stable addresses, shared slots, and a check at every read.

[Note: slots] A weight group reserves a *slot* once; every gather of the group then writes to it, at the same address.
Groups of one shape share slots round-robin, so neighbours in the chain normally use different slots. A slot records its
content by owner and generation. Each claim increments the generation, and a reader with another owner or generation
gets StaleWeightError instead of another group's weight. A claim also increments autograd's version counter of the
buffers. If code outside the engine saved a gathered weight for backward, autograd's own in-place check then raises.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from etp.errors import EtpStateError, StaleWeightError
from etp.stack import Stack

if TYPE_CHECKING:
    from etp.group import WeightGroup


@dataclass(frozen=True)
class BufferSpec:
    """The buffers that a group's gather fills.

    Attributes:
        shape: of one gathered weight, padding included.
        dtype: of the weights.
        device: where they are.
        count: how many weights the group has.
        descending: whether the first weight has the highest address, like shards in Megatron's buffers. One copy moves
            all weights if its source and destination have the same order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    count: int = 1
    descending: bool = False

    @cached_property
    def nbytes(self) -> int:
        """Bytes that the buffers take."""
        return self.count * math.prod(self.shape) * self.dtype.itemsize


class Slot:
    """Storage for the gathered weights of one group at a time. Made by :meth:`BufferCache.reserve`."""

    def __init__(self, spec: BufferSpec) -> None:
        self.spec = spec
        self.owner: WeightGroup | None = None
        """The group that claimed it last."""
        self.generation = 0
        self.reads: dict[Any, Any] = {}
        """Streams that have read the content, or waited for a gather that was never read. A new gather must not
        overtake them. Each has an event after its last read, or None until the reader's work is known to be enqueued;
        see :meth:`etp.group.WeightGroup.read_until_here`. On a device without streams, the key is None."""
        self.marks: dict[Any, Any] = {}
        """The event of each stream that has ever been in :attr:`reads`, to record again: making events takes time."""
        self.sharers = 0
        """Number of groups that share it; 0 for a dedicated slot, which belongs to one group."""
        self._aliases: dict[tuple[int, tuple[bool, ...]], list[torch.Tensor]] = {}

    @property
    def allocated(self) -> bool:
        """Whether storage exists now."""
        return "buffers" in self.__dict__

    @cached_property
    def buffers(self) -> Stack:
        """The storage, allocated at first use: one block, a tensor of the padded shape for each weight."""
        # Outside inference mode even when called inside: these buffers outlive the caller's mode.
        with torch.inference_mode(False):
            spec = self.spec
            buffers = torch.empty((spec.count, *spec.shape), dtype=spec.dtype, device=spec.device).unbind(0)
            return Stack(buffers[::-1] if spec.descending else buffers)

    def weights(self, rows: int, trained: tuple[bool, ...]) -> list[torch.Tensor]:
        """The gathered weights without their padding: aliases whose ``requires_grad`` does not affect the slot.

        Args:
            rows: logical rows of each weight.
            trained: for each weight, its alias's ``requires_grad``.

        Returns:
            one tensor for each weight, made once and handed out again, to save host time at every visit, unless a
            consumer has changed ``requires_grad`` of the first one.
        """
        made = self._aliases.get((rows, trained))
        if made is None or made[0].requires_grad is not trained[0]:
            padded = rows < self.spec.shape[0]
            made = [(buffer[:rows] if padded else buffer).detach() for buffer in self.buffers.tensors]
            for alias, requires_grad in zip(made, trained, strict=True):
                alias.requires_grad_(requires_grad)
            self._aliases[rows, trained] = made
        return list(made)

    def claim(self, owner: WeightGroup) -> int:
        """Assign the slot to ``owner`` for a new gather, which voids its content. Returns the new generation."""
        self.owner = owner
        self.generation += 1
        # All tensors of the block share one counter.
        torch._C._increment_version(self.buffers.tensors[:1])
        return self.generation

    def check(self, owner: WeightGroup, generation: int) -> None:
        """Raise StaleWeightError unless the slot still holds what ``owner`` gathered as ``generation``."""
        if self.owner is owner and self.generation == generation:
            return
        holder = "nothing" if self.owner is None else self.owner.name
        raise StaleWeightError(
            f"{owner.name} reads its gathered weight (generation {generation}) from a slot that now holds {holder} "
            f"(generation {self.generation}). A gathered weight is valid until another weight of its shape is "
            "gathered; gather it again where it is used"
        )

    def void(self) -> None:
        """Void the content and forget its readers. The storage stays."""
        self.owner = None
        self.generation += 1
        self.reads.clear()

    def drop(self) -> None:
        """Free the storage, which is allocated again on demand; the content is gone."""
        if self.allocated and self.spec.device.type == "cuda":
            # The allocator would reuse it on the stream that it was allocated on, while others may still read it.
            for stream in self.reads:
                self.buffers[0].record_stream(stream)
        self.__dict__.pop("buffers", None)
        self._aliases.clear()
        self.void()


class BufferCache:
    """The gather buffers of one chain.

    Args:
        slots_per_shape: how many slots the groups of one shape share.
        resident_bytes: budget for slots that belong to one group alone, given out in order of reservation.
    """

    def __init__(self, slots_per_shape: int, resident_bytes: int) -> None:
        if slots_per_shape < 1:
            raise ValueError(f"slots_per_shape is {slots_per_shape}; a gather needs at least one")
        self.slots_per_shape = slots_per_shape
        self._resident_left = resident_bytes
        self._shared: dict[BufferSpec, list[Slot]] = defaultdict(list)
        self._dedicated: list[Slot] = []
        self._pinned = False

    def pin(self) -> None:
        """Never free storage from now on: a CUDA graph reads and writes it whenever it is replayed."""
        self._pinned = True

    def reserve(self, spec: BufferSpec) -> Slot:
        """A slot for gathers of this kind: a dedicated one while the budget lasts, then a shared one."""
        slot = Slot(spec)
        if spec.nbytes <= self._resident_left:
            self._resident_left -= spec.nbytes
            self._dedicated.append(slot)
            return slot
        shared = self._shared[spec]
        if len(shared) < self.slots_per_shape:
            shared.append(slot)
        else:
            # The first slot with the fewest groups: round-robin as long as no slot was given back.
            slot = min(shared, key=lambda candidate: candidate.sharers)
        slot.sharers += 1
        return slot

    def unreserve(self, slot: Slot) -> None:
        """Give a slot back, because its group's shape, dtype or device changed.

        Raises:
            EtpStateError: if it is not reserved in this cache.
        """
        if slot not in self.slots():
            raise EtpStateError("this slot was given back or belongs to another cache")
        if self._pinned:
            return
        slot.sharers -= slot.sharers > 0
        if slot.sharers:
            return
        if slot in self._dedicated:
            self._dedicated.remove(slot)
            self._resident_left += slot.spec.nbytes
        else:
            self._shared[slot.spec].remove(slot)
        slot.drop()

    def void(self) -> None:
        """Void all content; storage and reservations stay."""
        for slot in self.slots():
            slot.void()

    def clear(self) -> None:
        """Free all storage and void all content; reservations stay. Pinned storage stays."""
        for slot in self.slots():
            if self._pinned:
                slot.void()
            else:
                slot.drop()

    def slots(self) -> list[Slot]:
        """Every slot, dedicated ones first."""
        return [*self._dedicated, *(slot for shared in self._shared.values() for slot in shared)]

    def nbytes(self) -> int:
        """Bytes of storage allocated now."""
        return sum(slot.spec.nbytes for slot in self.slots() if slot.allocated)
