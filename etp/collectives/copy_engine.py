"""Transport by peer copies between the GPUs of one host: shards move without kernels on the SMs.

[Note: publication] Every rank keeps a copy of its shards in an arena that all peers map. The copy is updated when
weights change (:meth:`CopyEngineTransport.publish`), between two exchanges of signals: after all peers have finished
reading the old version, and before any of them reads the new one. A gather in between is one copy per peer on the copy
engines, with no handshake. Gathering shards that were not published raises StaleWeightError. If the owner of the shards
keeps them in symmetric memory, no copy is made; the owner must then wait for the readers itself
(:meth:`CopyEngineTransport.finish_reading`) before changing them.

The copies of a gather are planned once for each pair of shards and slot, those of a reduction and the launches of its
sum once for each group and place in the ring: a gradient may be in new memory each time, and so may its sum. One copy
per peer is enough even for all experts of a layer, if these lie at a constant distance (see [Note: runs] in
:mod:`etp.stack`).

[Note: own chunk] A copy within one device is a kernel on the SMs. Next to a large GEMM it may wait for the GEMM's last
wave, so a gather copies this rank's own chunk after those of its peers. On a stream of its own, which costs the host an
event and two waits for each gather, it made no step faster.

[Note: receive ring] For a reduction, each rank copies chunk p of its gradient into peer p's receive ring, signals,
waits for its peers' signals, and sums what arrived with its own chunk (:mod:`etp.collectives.sums`). Two places are
used in turn, so a rank may send reduction s while its peers still sum s - 1. A place needs no signal that it is free:
by raising ARRIVED for s - 1, a peer shows that it has summed s - 2.

The replay of a graph breaks these turns, since it uses the places that the capture has used. From the first capture on,
a rank therefore sends only after PLACE_FREE flags, which peers raise after their sums. All of them are raised when this
begins. Whatever is reduced first, replayed or not, must hence be in the place whose turn it was then: each change of
mode goes back to that turn.

[Note: flags] See [Note: signals] in :mod:`etp.collectives.symmetric`. A place's ARRIVED flags are raised again only
after its PLACE_FREE flags, or the other place's ARRIVED flags, were received. PLACE_FREE is raised again only after
the place's ARRIVED flags were received. ARRIVED is raised with a number that identifies the weight:
ranks that reduce different weights do not add one to the other, but wait until their timeout. (Gathers read by address
and need no common order. An all-reduce of other code over the group is preceded by an empty reduction, with a number
that identifies what it combines.) READERS_DONE and PUBLISHED alternate: between raising one of them twice, a rank
receives the other from all peers. Between two calls, only the flags of free places are raised. A reduction is on one
stream, its sends before its waits, and on each peer only earlier reductions precede the sends that it waits for. The
exchanges around a publication come after all reductions so far.

[Note: staged shards] A gather of shards that have only just arrived in this rank's memory, such as those of other
hosts (``etp/collectives/hierarchical.py``), is not preceded by a publication. The calling stream writes them into a
place of another ring, raises STAGED, and goes on. Peers copy from there on a stream of their own, which waits for
STAGED and then raises STAGE_FREE, so that the next shards arrive while these are copied. These flags alternate like
those of the receive ring. Ranks whose gathers differ wait until their timeout.

[Note: capture] Every method except :meth:`CopyEngineTransport.symmetric_memory` and :meth:`CopyEngineTransport.stage`
may be captured into a CUDA graph, if it has run outside of one before, because no memory is allocated inside a capture.
Memory that a graph refers to is never freed. The flags of staged shards order the gathers of one stream, not those of a
graph beside them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from etp.collectives.base import Transport
from etp.collectives.driver import Copies, CudaDriver, MemoryOperations
from etp.collectives.sums import Launch, accumulate_parts
from etp.collectives.symmetric import RAISED, Signals, SymmetricBuffer
from etp.collectives.watchdog import Watchdog
from etp.collectives.works import WorkLine, gather_numbers, who
from etp.errors import EtpStateError, StaleWeightError
from etp.stack import PitchedCopy, Run, Stack, pitched_copies
from etp.streams import Event, InFlight, current_stream

_PLACES = 2
# Copies are fastest between addresses that are multiples of this.
_ALIGNMENT = 512


_Published = list[list[Run]]
"""Where each rank's shards of one group are read, by rank, as this process addresses them."""


@dataclass(slots=True)
class _Ring:
    """Symmetric memory that is divided into places, which are used in turn.

    Attributes:
        what: name of its content in messages.
        buffer: the memory; None before the first use.
        uses: how often a place has been used so far.
    """

    what: str
    buffer: SymmetricBuffer | None = None
    uses: int = 0

    @property
    def nbytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A place for the shards of one gather; see [Note: staged shards].

    Attributes:
        number: index of the place in the ring.
        shards: the shards, stored in the place.
        gather: the copies from there.
    """

    number: int
    shards: Stack
    gather: _Gather


@dataclass(frozen=True, slots=True)
class _Gather:
    """The copies of one gather, from the peers and then of this rank's own chunk; valid while ``published`` is.

    ``started`` is the same object each time, so that its lane records one event again.
    """

    published: _Published
    copies: Copies
    started: InFlight


@dataclass(slots=True)
class _Sum:
    """What the reductions of one label enqueue for their way through one place of the ring, at whatever addresses.

    Attributes:
        conditions: what it is valid for, besides the label. It keeps no memory alive.
        sends: the copies to the peers, from addresses relative to the gradients'.
        flags: what comes before the copies, after them, and after the sum; see :meth:`CopyEngineTransport._flags`.
        launches: sum it; see :func:`etp.collectives.sums.accumulate_parts`. Empty before the first time.
    """

    conditions: tuple[Any, ...]
    sends: Copies
    flags: tuple[MemoryOperations, MemoryOperations, MemoryOperations]
    launches: Sequence[Launch] = ()


class _Channel(IntEnum):
    READERS_DONE = 0
    PUBLISHED = 1
    # One for each place of the ring.
    ARRIVED = 2
    PLACE_FREE = ARRIVED + _PLACES
    STAGED = PLACE_FREE + _PLACES
    STAGE_FREE = STAGED + _PLACES


_CHANNELS = _Channel.STAGE_FREE + _PLACES


class CopyEngineTransport(Transport):
    """See the module's docstring. Constructed collectively, by ranks that can access each other's memory.

    Args:
        group: the shard group.
        device: this rank's CUDA device.
        timeout_s: end the process if a peer's signal takes longer, in seconds; None uses the process group's timeout.
    """

    publishes = pairs = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float | None = None) -> None:
        self._group = group
        self._device = device
        if timeout_s is None:
            timeout_s = group._get_backend(device).options._timeout.total_seconds()
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._driver = CudaDriver()
        free = [channel + place for channel in (_Channel.PLACE_FREE, _Channel.STAGE_FREE) for place in range(_PLACES)]
        self._signals = Signals(self._group, _CHANNELS, device, self._driver, raised=free)
        self.watchdog = Watchdog(timeout_s, who(group), self._driver.allow_calls_during_capture, device)
        self._adopted: list[SymmetricBuffer] = []
        self._quantized: list[SymmetricBuffer] = []
        self._arena: SymmetricBuffer | None = None
        self._sizes: tuple[int, ...] = ()
        self._published: dict[Stack, _Published] = {}
        self._updates = Copies([])
        """The copies that update the arena from the shards."""
        self._gathered = False
        self._kept: list[SymmetricBuffer] = []
        self._ring, self._stages = _Ring("gradients on their way"), _Ring("shards on their way")
        self._turn = 0
        """``uses`` of the ring when the first capture began."""
        self._sums: dict[tuple[str, int], _Sum] = {}
        """What reductions enqueue, by label and place of the ring."""
        self._copying: torch.cuda.Stream | None = None
        """Where staged shards are copied from peers; None before the first ones."""
        self._staged: _Staged | None = None
        """What :meth:`stage` has returned and no gather has read yet."""
        self._own_read: dict[int, Any] = {}
        """For each place for staged shards, an event after this rank's own last copy from there."""
        self._line = WorkLine()

    def nbytes(self) -> dict[str, int]:
        """Bytes of symmetric memory by purpose, none of which PyTorch's allocator reports."""
        return {
            "shards_in_place": sum(buffer.nbytes for buffer in self._adopted),
            "quantized_copies": sum(buffer.nbytes for buffer in self._quantized),
            "arena": 0 if self._arena is None else self._arena.nbytes,
            "receive_ring": self._ring.nbytes,
            "staged_shards": self._stages.nbytes,
            "kept_for_graphs": sum(buffer.nbytes for buffer in self._kept),
        }

    def change_mode(self, *, capturing: bool) -> None:
        """See :class:`etp.collectives.base.Transport`. Drops the events recorded so far."""
        if not self.captured:
            self._turn = self._ring.uses
        super().change_mode(capturing=capturing)
        # See [Note: receive ring].
        self._ring.uses = self._turn
        self._own_read.clear()

    # Gathering -----------------------------------------------------------------------------------------------

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for shards, ``[numel]``, which peers read in place, without a published copy. Collective."""
        buffer = SymmetricBuffer(self._group, numel * dtype.itemsize, self._device)
        self._adopted.append(buffer)
        return buffer.view(0, numel, dtype)

    @property
    def reads_in_place(self) -> bool:
        """See :class:`etp.collectives.base.Transport`."""
        return bool(self._adopted)

    def finish_reading(self) -> None:
        """See :class:`etp.collectives.base.Transport`."""
        # Gathers of a replayed graph are not visible here.
        if not self._gathered and not self.captured:
            return
        self._exchange(_Channel.READERS_DONE)
        self._exchange(_Channel.PUBLISHED)
        self.watch("the end of peers' gathers")

    def published_memory(self, numel: int) -> torch.Tensor:
        """See :class:`etp.collectives.base.Transport`."""
        buffer = SymmetricBuffer(self._group, numel, self._device)
        self._quantized.append(buffer)
        return buffer.view(0, numel, torch.uint8)

    def publish(self, groups: Sequence[Stack], write: Callable[[], None] | None = None) -> None:
        """Publish the current shards to the peers, on the calling stream. Collective.

        Args:
            groups: all shards that will be gathered, or their quantized copies, in the same order on all ranks.
            write: see :class:`etp.collectives.base.Transport`.
        """
        if list(self._published) != list(groups):
            self._place(groups)
        self._exchange(_Channel.READERS_DONE)
        if write is not None:
            write()
        self._driver.copy(self._updates, self._stream())
        self._exchange(_Channel.PUBLISHED)
        self.watch("the publication of weights")

    def _exchange(self, channel: _Channel) -> None:
        """Barrier of all ranks on the calling stream, after this rank's gathers."""
        self._gathered = False
        self._signals.exchange(channel, self._stream())

    def _place(self, groups: Sequence[Stack]) -> None:
        """Assign these shards their published addresses, and plan the copies that update the arena."""
        homes = [self._home(shards) for shards in groups]
        sizes = tuple(
            0 if home else _aligned(len(shards) * shards.nbytes) for shards, home in zip(groups, homes, strict=True)
        )
        if any(sizes) and (self._arena is None or sizes != self._sizes):
            # Allocation synchronizes the device and all ranks, so no rank reads the former arena afterwards.
            self._arena = self._renew(self._arena, sum(sizes), "published weights")
            self._sizes = sizes
        self._drop_unused(groups)
        self._published, updates, offset = {}, [], 0
        for shards, home, size in zip(groups, homes, sizes, strict=True):
            if home is not None:
                self._published[shards] = home
            elif self._arena is not None:
                self._published[shards] = published = _on_all_ranks(_alike(shards, offset), self._arena)
                updates += pitched_copies(published[self._rank], shards.runs, shards.nbytes)
                offset += size
        self._updates = Copies(updates)

    def _drop_unused(self, groups: Sequence[Stack]) -> None:
        """Free memory for quantized copies that holds none of ``groups``, unless a graph may refer to it."""
        used = [buffer for buffer in self._quantized if any(_holds(buffer, shards) for shards in groups)]
        if self.captured:
            self._kept += [buffer for buffer in self._quantized if buffer not in used]
        self._quantized = used

    def _home(self, shards: Stack) -> _Published | None:
        """Where peers read these shards in place; None if they do not."""
        for buffer in (*self._adopted, *self._quantized):
            if _holds(buffer, shards):
                start = buffer.local.data_ptr()
                return _on_all_ranks([run.at(-start) for run in shards.runs], buffer)
        return None

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        """See :class:`etp.collectives.base.Transport`.

        Raises:
            StaleWeightError: if the shards are not among those published last.
        """
        if self._staged is not None and self._staged.shards is shards:
            staged, self._staged = self._staged, None
            return self._gather_staged(staged, label)
        # Before any copy: a gather that is refused writes nothing.
        published = self._published.get(shards)
        if published is None:
            raise StaleWeightError(
                f"{label} {who(self._group)}: the shard at {shards[0].data_ptr():#x} was never published to its peers; "
                "it was bound to new storage or belongs to a weight that was added inside a pass. Bind and add weights "
                "between passes"
            )
        plan = outputs.plans.get(id(shards))
        if not isinstance(plan, _Gather) or plan.published is not published:
            plan = outputs.plans[id(shards)] = self._plan(published, outputs, shards.nbytes)
        self._driver.copy(plan.copies, self._stream())
        self._gathered = True
        return plan.started

    def stage(self, outputs: Stack) -> Stack:
        """See :class:`etp.collectives.base.Transport` and [Note: staged shards]. Not inside a capture."""
        chunk = outputs.nbytes // self._size
        buffer, place, number = self._place_for(self._stages, _aligned(chunk * len(outputs)))
        self._signals.receive(_Channel.STAGE_FREE + number, self._stream())
        if number in self._own_read:
            self._own_read[number].wait(current_stream(self._device))

        def staged() -> _Staged:
            numel = outputs.numel // self._size
            shards = Stack.within(buffer.view(place, numel * len(outputs), outputs.dtype), len(outputs), (numel,))
            published = _on_all_ranks(_alike(shards, place), buffer)
            return _Staged(number, shards, self._plan(published, outputs, chunk))

        self._staged = outputs.derived(buffer, number, staged)
        return self._staged.shards

    def _gather_staged(self, staged: _Staged, label: str) -> InFlight:
        if self._copying is None:
            self._copying = torch.cuda.Stream(self._device, priority=-1)
        calling, copying = current_stream(self._device), self._copying
        purpose, handle = _purpose(label), copying.cuda_stream
        self._signals.send(_Channel.STAGED + staged.number, calling.cuda_stream, purpose)
        begin, end = Event(), Event()
        begin.record(calling)
        begin.wait(copying)
        self._signals.receive(_Channel.STAGED + staged.number, handle, purpose)
        self._driver.copy(staged.gather.copies, handle)
        self._signals.send(_Channel.STAGE_FREE + staged.number, handle)
        end.record(copying)
        self._own_read[staged.number] = end
        return InFlight(end, among_peers=True)

    def _plan(self, published: _Published, outputs: Stack, chunk: int) -> _Gather:
        def copies(rank: int) -> list[PitchedCopy]:
            return pitched_copies([run.at(rank * chunk) for run in outputs.runs], published[rank], chunk)

        # See [Note: own chunk].
        every = [copy for rank in (*self._peers, self._rank) for copy in copies(rank)]
        return _Gather(published, Copies(every), InFlight())

    # Reducing ------------------------------------------------------------------------------------------------

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        """See :class:`etp.collectives.base.Transport`. Sums in at least fp32 whatever the gradients' dtype."""
        size = wgrads.nbytes // self._size * len(wgrads.tensors)
        ring, place, number = self._place_for(self._ring, _aligned((self._size - 1) * size))
        conditions = ring.addresses, place, wgrads.placement, sinks.placement, divisor, accumulate
        known = self._sums.get((label, number))
        if known is None or known.conditions != conditions:
            sends = [copy for peer in self._peers for copy in self._sends(wgrads, peer, ring.addresses[peer] + place)]
            known = self._sums[label, number] = _Sum(conditions, Copies(sends), self._flags(number, _purpose(label)))
        stream, driver = self._stream(), self._driver
        wait_for_place, exchange, free_place = known.flags
        if self.captured:
            driver.enqueue(wait_for_place, stream)
        driver.copy(known.sends, stream, wgrads.address)
        driver.enqueue(exchange, stream)
        for launch in known.launches:
            launch(ring.addresses[self._rank] + place, wgrads.address, sinks.address, stream)
        if not known.launches:
            parts = ring.view(place, (self._size - 1) * size // wgrads.dtype.itemsize, wgrads.dtype)
            known.launches = accumulate_parts(parts, sinks, divisor, accumulate=accumulate, own=wgrads, rank=self._rank)
        if self.captured:
            driver.enqueue(free_place, stream)
        return InFlight(among_peers=True)

    def _flags(self, number: int, purpose: int) -> tuple[MemoryOperations, MemoryOperations, MemoryOperations]:
        """What waits for a place of the ring, exchanges the flags of ``purpose`` there, and frees the place.

        Without graphs, the second is enough; see [Note: receive ring].
        """
        operations = self._signals.operations
        return (
            operations(_Channel.PLACE_FREE + number, RAISED, False, True),
            operations(_Channel.ARRIVED + number, purpose, True, True),
            operations(_Channel.PLACE_FREE + number, RAISED, True, False),
        )

    def _sends(self, wgrads: Stack, peer: int, place: int) -> list[PitchedCopy]:
        """The copies of ``peer``'s chunk of each gradient into this rank's row of the ``place`` in the peer's ring.

        Their sources are relative to ``wgrads.address``.
        """
        chunk = wgrads.nbytes // self._size
        # The receiver has no row for its own part.
        row = place + (self._rank - (self._rank > peer)) * len(wgrads) * chunk
        sources = [run.at(peer * chunk - wgrads.address) for run in wgrads.runs]
        return pitched_copies([Run(row, len(wgrads), chunk)], sources, chunk)

    def exchange(self, numbers: torch.Tensor, label: str) -> torch.Tensor:
        """See :class:`etp.collectives.base.Transport`: by NCCL, once for each version of the weights."""
        everyone = gather_numbers(numbers, self._group, self._line, None, label)
        self.watch(label)
        return everyone

    def pair(self, label: str, members: Sequence[str]) -> InFlight:
        """See :class:`etp.collectives.base.Transport`. Ranks that differ wait until their timeout."""
        _, _, number = self._place_for(self._ring, 0)
        stream = self._stream()
        flags = self._flags(number, _purpose("\n".join((label, *members))))
        for operations in flags if self.captured else flags[1:2]:
            self._driver.enqueue(operations, stream)
        return InFlight(among_peers=True)

    def _place_for(self, ring: _Ring, nbytes: int) -> tuple[SymmetricBuffer, int, int]:
        """The next place of a ring: its memory (enlarged if needed), the place's offset in bytes, its number."""
        if ring.buffer is None or _PLACES * nbytes > ring.buffer.nbytes:
            # Allocation synchronizes the device and all ranks, so every former place is free afterwards.
            ring.buffer = self._renew(ring.buffer, _PLACES * nbytes, ring.what)
        number = ring.uses % _PLACES
        ring.uses += 1
        return ring.buffer, number * (ring.buffer.nbytes // _PLACES), number

    def _renew(self, former: SymmetricBuffer | None, nbytes: int, what: str) -> SymmetricBuffer:
        """Allocate symmetric memory to replace ``former``. Collective."""
        if torch.cuda.is_current_stream_capturing():
            raise EtpStateError(
                f"{nbytes} bytes of symmetric memory for {what} cannot be made while a CUDA graph is captured; run "
                "the same passes at least once before the capture"
            )
        if former is not None and self.captured:
            self._kept.append(former)
        # A group of one rank sends nothing, but symmetric memory cannot be empty.
        return SymmetricBuffer(self._group, max(nbytes, _ALIGNMENT), self._device)

    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device.index)


def _purpose(label: str) -> int:
    """A 32-bit number that identifies a collective; never 0."""
    return zlib.crc32(label.encode()) or 1


def _on_all_ranks(offsets: Sequence[Run], buffer: SymmetricBuffer) -> _Published:
    """What lies at these offsets in each rank's memory."""
    return [[run.at(base) for run in offsets] for base in buffer.addresses]


def _alike(shards: Stack, offset: int) -> tuple[Run, ...]:
    """Offsets for shards stored from ``offset`` on without gaps, in the order of their addresses."""
    longest = max(shards.runs, key=lambda run: run.count)
    if longest.stride < 0:
        return (Run(offset + (len(shards) - 1) * shards.nbytes, len(shards), -shards.nbytes),)
    return (Run(offset, len(shards), shards.nbytes),)


def _holds(buffer: SymmetricBuffer, shards: Stack) -> bool:
    start = buffer.local.data_ptr()
    return all(start <= shard.data_ptr() < start + buffer.nbytes for shard in shards)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
