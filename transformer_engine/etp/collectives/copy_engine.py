"""Transport by peer copies inside one NVLink domain: shards move without kernels on the SMs.

[Note: publication] Every rank keeps a copy of its shards in an arena that all peers map. The copy is updated when
weights change (:meth:`CopyEngineTransport.publish`), between two exchanges of signals: after all peers have finished
reading the old version, and before any of them reads the new one. A gather in between is one copy per peer on the copy
engines, with no handshake. A shard at another address than the published one is refused. If the owner of the shards
keeps them in symmetric memory, no copy is made; the owner must then wait for the readers itself
(:meth:`CopyEngineTransport.finish_reading`) before changing them.

[Note: own chunk] A copy within one device is a kernel on the SMs. Beside a large GEMM it waits for the GEMM's last
wave, and so does everything behind it in its stream. A gather therefore copies this rank's own chunk on a separate
stream, and only the consumer waits for it.

[Note: receive ring] For a reduction, each rank copies chunk p of its gradient into peer p's receive ring, signals,
waits for its peers' signals, sums what arrived with its own chunk (:mod:`etp.collectives.sums`) and signals that its
place in the ring is free again. Places are used in turn, so a rank may send reduction s while its peers still sum
s - 1.

[Note: flags] See [Note: signals] in :mod:`etp.collectives.symmetric`. ARRIVED of a place is raised again only behind
that place's FREE, and the other way round. It is raised with a number of the weight: ranks that reduce different
weights do not add one to the other, but wait until their timeout. (Gathers go by addresses and need no common order.
An all-reduce of other code over the group is preceded by a reduction of nothing, with a number of what it combines.)
READERS_DONE and PUBLISHED are exchanged by all ranks in turn: whoever raises one has seen all others raise the other
since. All flags are down between two calls but those of free places. All of a reduction is on one stream, its sends
before its waits, and what a wait needs from a peer comes after nothing but earlier reductions there; the exchanges
around a publication come after all reductions so far.

[Note: capture] Every method except :meth:`CopyEngineTransport.symmetric_memory` may be captured into a CUDA graph, if
it has run outside of one before, because no memory is allocated inside a capture. Memory that a graph refers to is
never freed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from etp.collectives.base import GradSink
from etp.collectives.driver import CudaDriver
from etp.collectives.sums import accumulate_parts
from etp.collectives.symmetric import Signals, SymmetricBuffer
from etp.collectives.watchdog import Watchdog
from etp.errors import EtpStateError, StaleWeightError
from etp.streams import Enqueued, InFlight

_PLACES = 2
# Copies are fastest between addresses that are multiples of this.
_ALIGNMENT = 512


class _Channel(IntEnum):
    READERS_DONE = 0
    PUBLISHED = 1
    # One for each place of the ring.
    ARRIVED = 2
    PLACE_FREE = ARRIVED + _PLACES


_CHANNELS = _Channel.PLACE_FREE + _PLACES


class _Reduction(Enqueued):
    """A reduction in flight, which waits for the peers' parts."""

    def __init__(self, transport: CopyEngineTransport, label: str) -> None:
        super().__init__()
        self._transport = transport
        self._label = label

    def expect(self, end: Any) -> None:
        """See :class:`etp.streams.InFlight`."""
        self._transport.expect(end, self._label)


class CopyEngineTransport:
    """See the module's docstring. Constructed collectively, by ranks that can access each other's memory.

    Args:
        group: the shard group.
        device: this rank's CUDA device.
        timeout_s: end the process if a peer's signal takes longer, in seconds; None uses the process group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, timeout_s: float | None = None) -> None:
        self._group = group
        self._device = device
        if timeout_s is None:
            timeout_s = group._get_backend(device).options._timeout.total_seconds()
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._who = f"on rank {dist.get_rank()} (shard group: ranks {dist.get_process_group_ranks(group)})"
        self._peers = [(self._rank + step) % self._size for step in range(1, self._size)]
        self._driver = CudaDriver()
        free = range(_Channel.PLACE_FREE, _Channel.PLACE_FREE + _PLACES)
        self._signals = Signals(self._group, _CHANNELS, device, self._driver, raised=free)
        self._local = torch.cuda.Stream(device, priority=-1)
        self._local_end: torch.cuda.Event | None = None
        self._watchdog = Watchdog(timeout_s, self._driver.allow_calls_during_capture)
        self._adopted: list[SymmetricBuffer] = []
        self._arena: SymmetricBuffer | None = None
        self._sizes: tuple[int, ...] = ()
        self._sources: dict[int, tuple[SymmetricBuffer, int]] = {}
        self._gathered = False
        self._capturing = self._captured = False
        self._kept: list[SymmetricBuffer] = []
        self._ring: SymmetricBuffer | None = None
        self._reductions = 0

    def nbytes(self) -> dict[str, int]:
        """Bytes of symmetric memory by purpose, none of which PyTorch's allocator reports."""
        return {
            "shards_in_place": sum(buffer.nbytes for buffer in self._adopted),
            "arena": 0 if self._arena is None else self._arena.nbytes,
            "receive_ring": 0 if self._ring is None else self._ring.nbytes,
            "kept_for_graphs": sum(buffer.nbytes for buffer in self._kept),
        }

    def change_mode(self, *, capturing: bool) -> None:
        """A CUDA graph capture begins, with the device idle, or has ended: drop events recorded before."""
        self._local_end = None
        self._capturing = capturing
        self._captured |= capturing

    # Gathering -----------------------------------------------------------------------------------------------

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory for shards, ``[numel]``, which peers read in place, without a published copy. Collective.

        The owner calls :meth:`finish_reading` before it changes the shards.
        """
        buffer = SymmetricBuffer(self._group, numel * dtype.itemsize, self._device)
        self._adopted.append(buffer)
        return buffer.view(0, numel, dtype)

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read this rank's shards in place."""
        return bool(self._adopted)

    def finish_reading(self) -> None:
        """Behind the gathers on the calling stream: wait until no peer reads this rank's shards. Collective."""
        # Gathers of a replayed graph are not visible here.
        if not self._gathered and not self._captured:
            return
        self._exchange(_Channel.READERS_DONE)
        self._exchange(_Channel.PUBLISHED)
        self.watch("the end of peers' gathers")

    def publish(self, shards: Sequence[torch.Tensor]) -> None:
        """Let peers see these shards as they are now; enqueued on the calling stream. Collective.

        Args:
            shards: all shards that will be gathered, in the same order on all ranks; contiguous.
        """
        copies = self._place(shards)
        self._exchange(_Channel.READERS_DONE)
        for destination, source, nbytes in copies:
            self._driver.copy(destination, source, nbytes, self._stream())
        self._exchange(_Channel.PUBLISHED)
        self.watch("the publication of weights")

    def _exchange(self, channel: _Channel) -> None:
        """Barrier of all ranks on the calling stream, after this rank's gathers."""
        if self._local_end is not None:
            # This rank's own chunks are read beside the calling stream.
            torch.cuda.current_stream(self._device).wait_event(self._local_end)
        self._gathered, self._local_end = False, None
        self._signals.send(channel, self._stream())
        self._signals.receive(channel, self._stream())

    def _place(self, shards: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        """Assign each shard its published address.

        Returns:
            the copies that bring the arena up to date: destination address, source address, bytes.
        """
        addresses = [shard.data_ptr() for shard in shards]
        homes = [_home(self._adopted, address) for address in addresses]
        sizes = tuple(0 if home else _nbytes(shard) for shard, home in zip(shards, homes, strict=True))
        if any(sizes) and (self._arena is None or sizes != self._sizes):
            # Allocation synchronizes the device and all ranks, so nobody reads the former arena afterwards.
            self._arena = self._renew(self._arena, sum(_aligned(size) for size in sizes), "published weights")
            self._sizes = sizes
        self._sources, offset, copies = {}, 0, []
        for address, size, home in zip(addresses, sizes, homes, strict=True):
            if home is not None:
                self._sources[address] = home
            elif self._arena is not None:
                self._sources[address] = (self._arena, offset)
                copies.append((self._arena.addresses[self._rank] + offset, address, size))
                offset += _aligned(size)
        return copies

    def all_gather(self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], label: str) -> InFlight:
        """See :class:`etp.collectives.base.Transport`.

        Raises:
            StaleWeightError: if a shard is not among those published last.
        """
        # Before any copy: a gather that is refused writes nothing.
        sources = [self._source(shard, label) for shard in shards]
        calling = torch.cuda.current_stream(self._device)
        stream, local = calling.cuda_stream, self._local.cuda_stream
        begin, end = torch.cuda.Event(), torch.cuda.Event()
        begin.record(calling)
        self._local.wait_event(begin)
        for output, shard, (buffer, offset) in zip(outputs, shards, sources, strict=True):
            size, target = _nbytes(shard), output.data_ptr()
            for peer in self._peers:
                self._driver.copy(target + peer * size, buffer.addresses[peer] + offset, size, stream)
            own = target + self._rank * size
            self._driver.copy(own, buffer.addresses[self._rank] + offset, size, local)
        end.record(self._local)
        self._gathered, self._local_end = True, end
        return Enqueued(end)

    def _source(self, shard: torch.Tensor, label: str) -> tuple[SymmetricBuffer, int]:
        """The buffer that the shard was published in, and its offset in bytes."""
        source = self._sources.get(shard.data_ptr())
        if source is None:
            raise StaleWeightError(
                f"{label} {self._who}: the shard at {shard.data_ptr():#x} was never published to its peers; it was "
                "bound to new storage or belongs to a weight that was added inside a pass. Bind and add weights "
                "between passes"
            )
        return source

    # Reducing ------------------------------------------------------------------------------------------------

    def reduce_scatter(
        self, wgrads: Sequence[torch.Tensor], sinks: Sequence[GradSink], divisor: int, label: str
    ) -> InFlight:
        """See :class:`etp.collectives.base.Transport`. Sums in fp32 whatever the gradients' dtype."""
        return self._reduce(wgrads, sinks, divisor, label, _purpose(label))

    def pair(self, label: str, members: Sequence[str]) -> InFlight:
        """See :class:`etp.collectives.base.PairingTransport`. Ranks that differ wait until their timeout."""
        return self._reduce((), (), 1, label, _purpose("\n".join((label, *members))))

    def _reduce(
        self, wgrads: Sequence[torch.Tensor], sinks: Sequence[GradSink], divisor: int, label: str, purpose: int
    ) -> InFlight:
        """The reduction ``label``, with peers whose ``purpose`` is the same."""
        chunks = [_nbytes(wgrad) // self._size for wgrad in wgrads]
        offsets = _running_offsets([_aligned((self._size - 1) * chunk) for chunk in chunks])
        ring, place, number = self._place_for(offsets[-1])
        stream = self._stream()
        self._signals.receive(_Channel.PLACE_FREE + number, stream)
        for peer in self._peers:
            # The receiver's rows leave out its own.
            row = self._rank - (self._rank > peer)
            for wgrad, chunk, offset in zip(wgrads, chunks, offsets[:-1], strict=True):
                target = ring.addresses[peer] + place + offset + row * chunk
                self._driver.copy(target, wgrad.data_ptr() + peer * chunk, chunk, stream)
        self._signals.send(_Channel.ARRIVED + number, stream, purpose)
        self._signals.receive(_Channel.ARRIVED + number, stream, purpose)
        for wgrad, sink, offset in zip(wgrads, sinks, offsets[:-1], strict=True):
            numel = wgrad.numel() // self._size
            parts = ring.view(place + offset, (self._size - 1) * numel, wgrad.dtype)
            own = wgrad.view(-1)[self._rank * numel : (self._rank + 1) * numel]
            accumulate_parts(parts, sink, divisor, own=own, rank=self._rank)
        self._signals.send(_Channel.PLACE_FREE + number, stream)
        return _Reduction(self, label)

    def _place_for(self, nbytes: int) -> tuple[SymmetricBuffer, int, int]:
        """A place for the next reduction: the ring (enlarged if needed), the place's offset in bytes, its number."""
        if self._ring is None or _PLACES * nbytes > self._ring.nbytes:
            # Allocation synchronizes the device and all ranks, so every former place is free afterwards.
            self._ring = self._renew(self._ring, _PLACES * nbytes, "gradients on their way")
        number = self._reductions % _PLACES
        self._reductions += 1
        return self._ring, number * (self._ring.nbytes // _PLACES), number

    def _renew(self, former: SymmetricBuffer | None, nbytes: int, what: str) -> SymmetricBuffer:
        """Allocate symmetric memory to replace ``former``. Collective."""
        if torch.cuda.is_current_stream_capturing():
            raise EtpStateError(
                f"{nbytes} bytes of symmetric memory for {what} cannot be made while a CUDA graph is captured; run "
                "the same passes at least once before the capture"
            )
        if former is not None and self._captured:
            self._kept.append(former)
        # A group of one rank sends nothing, but symmetric memory cannot be empty.
        return SymmetricBuffer(self._group, max(nbytes, _ALIGNMENT), self._device)

    def watch_replays(self) -> None:
        """Watch that work enqueued so far on the calling stream, graph replays included, ends within the timeout."""
        if self._captured:
            self.watch("the replay of a CUDA graph")

    def _stream(self) -> int:
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream

    def watch(self, label: str) -> None:
        """See :class:`etp.collectives.base.WatchedTransport`."""
        self._watchdog.expect_stream(self._device, f"{label} {self._who}")

    def expect(self, end: Any, label: str) -> None:
        """End the process if ``end``, an event after the collective ``label``, does not happen within the timeout."""
        # Nothing runs while a graph is captured; watch_replays covers replays.
        if not self._capturing:
            self._watchdog.expect(end, f"{label} {self._who}")


def _purpose(label: str) -> int:
    """A number of 32 bits that tells collectives apart; never 0."""
    return zlib.crc32(label.encode()) or 1


def _home(buffers: Sequence[SymmetricBuffer], address: int) -> tuple[SymmetricBuffer, int] | None:
    """The buffer that contains ``address``, and the offset in it in bytes; None if none does."""
    for buffer in buffers:
        offset = address - buffer.local.data_ptr()
        if 0 <= offset < buffer.nbytes:
            return buffer, offset
    return None


def _nbytes(tensor: torch.Tensor) -> int:
    nbytes: int = tensor.nbytes
    return nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _running_offsets(sizes: Sequence[int]) -> list[int]:
    """Start offsets of consecutive pieces of the given sizes, followed by the end of the last one."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets
