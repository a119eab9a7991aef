"""Transport by peer copies inside one NVLink domain: shards move without a kernel on the multiprocessors.

[Note: publication] Every rank keeps a copy of its shards in an arena that all peers map. The copy is renewed when
weights change (:meth:`CopyEngineTransport.publish`), between two exchanges of signals: after all peers have finished
reading the old one, and before any of them reads the new one. A gather in between is one copy per peer on the copy
engines, with no handshake. A shard that lies elsewhere than the published one is refused. Where the owner of the
shards keeps them in symmetric memory, no copy is made; it then has to wait for the readers itself
(:meth:`CopyEngineTransport.finish_reading`) before it changes them.

[Note: own chunk] A copy within one device is a kernel on the multiprocessors. Beside a large GEMM it waits for the
GEMM's last wave, and everything behind it in its stream waits with it. A gather therefore copies this rank's own chunk
on a stream of its own, and only the consumer waits for it.

[Note: receive ring] For a reduction each rank copies chunk p of its gradient into peer p's receive ring, signals,
waits for its peers' signals, sums what arrived with its own chunk (:mod:`etp.collectives.sums`) and signals that its
place in the ring is free again. Places are used in turn, so a rank may send reduction s while its peers still sum
s - 1.

[Note: flags] See [Note: signals] in :mod:`etp.collectives.symmetric`. ARRIVED of a place is raised again only behind
that place's FREE, and the other way round. READERS_DONE and PUBLISHED are exchanged by all ranks in turn: whoever
raises one has seen all others raise the other since. All flags are down between two calls but those of free places.
All of a reduction is on one stream, its sends before its waits, and what a wait needs from a peer is behind nothing
but earlier reductions there; the exchanges around a publication are behind all reductions so far.

[Note: capture] Every method but :meth:`CopyEngineTransport.symmetric_memory` may be captured into a CUDA graph, if it
ran outside of one before: memory is not made inside. What a graph refers to is kept for good.
"""

from __future__ import annotations

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
    """A reduction, which waits for its peers' parts."""

    def __init__(self, transport: CopyEngineTransport, label: str) -> None:
        super().__init__()
        self._transport = transport
        self._label = label

    def expect(self, end: Any) -> None:
        """See :class:`etp.streams.InFlight`."""
        self._transport.expect(end, self._label)


class CopyEngineTransport:
    """See the module's docstring. Collective to make, over ranks that reach each other's memory.

    Args:
        group: the shard group.
        device: this rank's CUDA device.
        timeout_s: end the process if a peer's signal takes longer; None takes the process group's own time-out.
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
        """Bytes of symmetric memory by purpose; PyTorch's allocator knows of none of it."""
        return {
            "shards_in_place": sum(buffer.nbytes for buffer in self._adopted),
            "arena": 0 if self._arena is None else self._arena.nbytes,
            "receive_ring": 0 if self._ring is None else self._ring.nbytes,
            "kept_for_graphs": sum(buffer.nbytes for buffer in self._kept),
        }

    def change_mode(self, *, capturing: bool) -> None:
        """A capture into a CUDA graph begins, with the device idle, or has ended: forget events of before."""
        self._local_end = None
        self._capturing = capturing
        self._captured |= capturing

    # Gathering -----------------------------------------------------------------------------------------------

    def symmetric_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to keep shards in, ``[numel]``, zero: peers read them there, and no copy is made. Collective.

        The owner calls :meth:`finish_reading` before it changes them.
        """
        buffer = SymmetricBuffer(self._group, numel * dtype.itemsize, self._device)
        self._adopted.append(buffer)
        return buffer.view(0, numel, dtype)

    @property
    def reads_in_place(self) -> bool:
        """Whether peers read this rank's shards where they lie."""
        return bool(self._adopted)

    def finish_reading(self) -> None:
        """Behind the gathers on the calling stream: wait until no peer reads this rank's shards. Collective."""
        # What a graph gathers when it is replayed is not seen here.
        if not self._gathered and not self._captured:
            return
        self._exchange(_Channel.READERS_DONE)
        self._exchange(_Channel.PUBLISHED)
        self._watch("the end of peers' gathers")

    def publish(self, shards: Sequence[torch.Tensor]) -> None:
        """Let peers see these shards as they are now; enqueued on the calling stream. Collective.

        Args:
            shards: all that will be gathered, in the same order on all ranks; contiguous.
        """
        copies = self._place(shards)
        self._exchange(_Channel.READERS_DONE)
        for destination, source, nbytes in copies:
            self._driver.copy(destination, source, nbytes, self._stream())
        self._exchange(_Channel.PUBLISHED)
        self._watch("the publication of weights")

    def _exchange(self, channel: _Channel) -> None:
        """Go on when all ranks have come here, and this rank's gathers are done."""
        if self._local_end is not None:
            # This rank's own chunks are read beside the calling stream.
            torch.cuda.current_stream(self._device).wait_event(self._local_end)
        self._gathered, self._local_end = False, None
        self._signals.send(channel, self._stream())
        self._signals.receive(channel, self._stream())

    def _place(self, shards: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        """Decide where peers find each shard. Returns the copies that bring the arena up to date."""
        addresses = [shard.data_ptr() for shard in shards]
        homes = [_home(self._adopted, address) for address in addresses]
        sizes = tuple(0 if home else _nbytes(shard) for shard, home in zip(shards, homes, strict=True))
        if any(sizes) and (self._arena is None or sizes != self._sizes):
            # Allocating waits for the device, and for all ranks: nobody reads the former arena after that.
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
        """Where the shard was published: in which memory, and how far from its start."""
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
        self._signals.send(_Channel.ARRIVED + number, stream)
        self._signals.receive(_Channel.ARRIVED + number, stream)
        for wgrad, sink, offset in zip(wgrads, sinks, offsets[:-1], strict=True):
            numel = wgrad.numel() // self._size
            parts = ring.view(place + offset, (self._size - 1) * numel, wgrad.dtype)
            own = wgrad.view(-1)[self._rank * numel : (self._rank + 1) * numel]
            accumulate_parts(parts, sink, divisor, own=own, rank=self._rank)
        self._signals.send(_Channel.PLACE_FREE + number, stream)
        return _Reduction(self, label)

    def _place_for(self, nbytes: int) -> tuple[SymmetricBuffer, int, int]:
        """The ring, where the next reduction's place in it begins, and its number; a bigger ring if it does not fit."""
        if self._ring is None or _PLACES * nbytes > self._ring.nbytes:
            # Allocating waits for the device, and for all ranks: every former place is free after that.
            self._ring = self._renew(self._ring, _PLACES * nbytes, "gradients on their way")
        number = self._reductions % _PLACES
        self._reductions += 1
        return self._ring, number * (self._ring.nbytes // _PLACES), number

    def _renew(self, former: SymmetricBuffer | None, nbytes: int, what: str) -> SymmetricBuffer:
        """Symmetric memory in the place of ``former``. Collective."""
        if torch.cuda.is_current_stream_capturing():
            raise EtpStateError(
                f"{nbytes} bytes of symmetric memory for {what} cannot be made while a CUDA graph is captured; run "
                "the same passes at least once before the capture"
            )
        if former is not None and self._captured:
            self._kept.append(former)
        # A group of one rank sends nothing, and there is no symmetric memory of no bytes.
        return SymmetricBuffer(self._group, max(nbytes, _ALIGNMENT), self._device)

    def watch_replays(self) -> None:
        """Expect what the calling stream was given so far, replays of graphs among it, to end in time."""
        if self._captured:
            self._watch("the replay of a CUDA graph")

    def _stream(self) -> int:
        stream: int = torch.cuda.current_stream(self._device).cuda_stream
        return stream

    def _watch(self, what: str) -> None:
        self._watchdog.expect_stream(self._device, f"{what} {self._who}")

    def expect(self, end: Any, label: str) -> None:
        """End the process if ``end``, an event behind the collective ``label``, does not happen in time."""
        # Nothing happens while a graph is captured; watch_replays looks after what it holds.
        if not self._capturing:
            self._watchdog.expect(end, f"{label} {self._who}")


def _home(buffers: Sequence[SymmetricBuffer], address: int) -> tuple[SymmetricBuffer, int] | None:
    """Which of the buffers ``address`` lies in, and how far from its start."""
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
    """Where each of several pieces starts when they lie one after the other, and where the last one ends."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets
