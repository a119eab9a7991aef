"""Ticketed cache of gather buffers: stable addresses, shared slots, and a check at every read.

[Note: tickets and slots] A weight group reserves a *ticket* once; every gather of the group then writes to the same
*slot*, at the same address. Groups of one shape share slots round-robin, so neighbours in the chain never use the
same slot. A slot records its content by owner and generation. Each claim increments the generation, and a reader with
another owner or generation gets StaleWeightError instead of another group's weight. A claim also increments
autograd's version counter of the buffers: code outside the engine that saved a gathered weight for backward is then
stopped by autograd's own in-place check.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from etp.errors import EtpStateError, StaleWeightError


@dataclass(frozen=True)
class BufferSpec:
    """Shape, dtype and device of one gathered weight, padding included."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Tenant(Protocol):
    """What a slot's next user needs from the group whose gather it still holds (:class:`etp.group.WeightGroup`)."""

    def abandon_gather(self) -> None:
        """Wait for the gather, and drop it."""


class Slot:
    """Storage for the gathered weights of one group at a time."""

    def __init__(self, specs: tuple[BufferSpec, ...]) -> None:
        self.specs = specs
        self.owner: str | None = None
        self.generation = 0
        self.reader_stream: Any = None
        """The stream of the last reader; a new gather must not overtake it."""
        self.last_read: Any = None
        """An event after the last read, once the reader's work is known to be enqueued (see
        :meth:`etp.group.WeightGroup.read_until_here`), or after a gather that was never consumed."""
        self.tenant: Tenant | None = None
        """The group whose gather into this slot has not been consumed yet, or None."""
        self.sharers = 0
        """How many tickets share it; 0 for a dedicated slot."""
        self._buffers: list[torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of storage when allocated."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def allocated(self) -> bool:
        """Whether storage exists now."""
        return self._buffers is not None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The storage, allocated at first use; one tensor for each weight, of the padded shape."""
        if self._buffers is None:
            # Outside inference mode even when called inside: these buffers outlive the caller's mode.
            with torch.inference_mode(False):
                self._buffers = [torch.empty(s.shape, dtype=s.dtype, device=s.device) for s in self.specs]
        return self._buffers

    def claim(self, owner: str) -> int:
        """Assign the slot to ``owner`` for a new gather, which voids its content. Returns the new generation."""
        self.owner = owner
        self.generation += 1
        torch.autograd.graph.increment_version(self.buffers)
        return self.generation

    def check(self, owner: str, generation: int) -> None:
        """Raise StaleWeightError unless the slot still holds what ``owner`` gathered as ``generation``."""
        if self.owner != owner or self.generation != generation:
            raise StaleWeightError(
                f"{owner} reads its gathered weight (generation {generation}) from a slot that now holds "
                f"{self.owner} (generation {self.generation}). A gathered weight is valid until another weight of "
                "its shape is gathered; gather it again where it is used"
            )

    def void(self) -> None:
        """Void the content and forget its readers. The storage stays."""
        self.owner = None
        self.generation += 1
        self.tenant = None
        self.reader_stream = None
        self.last_read = None

    def drop(self) -> None:
        """Free the storage. Tickets stay valid; the content is gone."""
        self._buffers = None
        self.void()


class Ticket:
    """A group's claim on one slot, for the group's life. Made by :meth:`BufferCache.reserve`."""

    def __init__(self, slot: Slot, dedicated: bool) -> None:
        self.slot = slot
        self.dedicated = dedicated


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
        self._shared: dict[tuple[BufferSpec, ...], list[Slot]] = defaultdict(list)
        self._dedicated: list[Slot] = []
        self._tickets: set[Ticket] = set()
        self._pinned = False

    def pin(self) -> None:
        """Never free storage from now on: a CUDA graph reads and writes it whenever it is replayed."""
        self._pinned = True

    def reserve(self, specs: tuple[BufferSpec, ...]) -> Ticket:
        """Reserve a slot for gathers of these buffers: a dedicated one while the budget lasts, then a shared one."""
        slot = Slot(specs)
        if slot.nbytes <= self._resident_left:
            self._resident_left -= slot.nbytes
            self._dedicated.append(slot)
            ticket = Ticket(slot, dedicated=True)
        else:
            shared = self._shared[specs]
            if len(shared) < self.slots_per_shape:
                shared.append(slot)
            else:
                # The first slot with the fewest tickets: round-robin as long as no ticket was returned.
                slot = min(shared, key=lambda candidate: candidate.sharers)
            slot.sharers += 1
            ticket = Ticket(slot, dedicated=False)
        self._tickets.add(ticket)
        return ticket

    def get(self, ticket: Ticket) -> Slot:
        """The ticket's slot; the same for the life of the ticket."""
        if ticket not in self._tickets:
            raise EtpStateError("this ticket was returned or belongs to another cache; reserve one from this cache")
        return ticket.slot

    def unreserve(self, ticket: Ticket) -> None:
        """Give a ticket back, because its group's shape, dtype or device changed."""
        self.get(ticket)
        self._tickets.discard(ticket)
        if self._pinned:
            return
        if ticket.dedicated:
            self._dedicated.remove(ticket.slot)
            self._resident_left += ticket.slot.nbytes
            ticket.slot.drop()
            return
        ticket.slot.sharers -= 1
        if ticket.slot.sharers == 0:
            self._shared[ticket.slot.specs].remove(ticket.slot)
            ticket.slot.drop()

    def void(self) -> None:
        """Void all content; storage, tickets and the slots they name stay."""
        for slot in self.slots():
            slot.void()

    def clear(self) -> None:
        """Free all storage and void all content; tickets and the slots they name stay valid. Pinned storage stays."""
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
        return sum(slot.nbytes for slot in self.slots() if slot.allocated)
