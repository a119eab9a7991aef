"""Where communication runs: one side stream for each direction, and a plain call on devices without streams.

[Note: lanes] A collective is *started* on a lane and later *waited for* where its result is needed. With CUDA
the lane is a side stream: starting enqueues the work there and records an event, waiting makes the caller's
stream wait for that event, and the host never blocks. Without streams (CPU and gloo) starting hands the work to
the backend's threads and waiting blocks the host. :class:`Lane` hides the difference from its callers.

[Note: capture] A stream joins the capture of a CUDA graph only by waiting for a stream that takes part in it, and must
not wait for events recorded before the capture. A lane therefore forks from the caller's stream at its first start in
each mode, and events are dropped when the mode changes (:meth:`Lane.change_mode`).

[Note: streams in C] The Python parts of ``torch.cuda`` take longer than the calls of CUDA below them, and a visit or a
reduction makes a dozen. So CUDA streams are read and set through C functions, as PyTorch's compiler does, events are
:data:`Event`, and there is one object for each stream (:func:`current_stream`), which is compared by identity.

[Note: profiler ranges] Under a profiler, work that starts on a lane is in a range named after its label. Whether a
profiler is active is read from an attribute, because a function call at each visit would take too long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler

RANGE = "etp: {}"
"""Names of the engine's ranges in a profile."""

Event: Any = torch._C._CudaEventBase
"""CUDA's events, without the Python methods of ``torch.cuda.Event``; see [Note: streams in C]."""


class InFlight:
    """Work that a transport has started, to :meth:`wait` for. This class is for work that is enqueued already.

    Args:
        end: an event after all of the work, for its readers to wait for. The stream that the work was started on need
            not wait for it. None: that stream, as it is now, is after all of the work.
        among_peers: whether it waits for peers, and is therefore to be watched.
    """

    end: Any = None
    among_peers = False
    _lane: Lane | None = None
    """Where it was started; None without streams."""
    _event: Any = None
    """The one to wait for: its end, or one that the lane has recorded."""
    _waited: Sequence[Any] = ()
    """The streams that have waited for it."""
    _done = False

    def __init__(self, end: Any = None, *, among_peers: bool = False) -> None:
        self.end, self.among_peers = end, among_peers

    def join(self) -> None:
        """Order the calling stream after the work, or block until it is done where there are no streams.

        Called once.
        """

    def wait(self, stream: Any = None) -> Any:
        """Order ``stream``, or the current one of the lane's device, after the work; without streams, block.

        Repeated calls for the same stream cost nothing.

        Returns:
            the stream; None without streams.
        """
        if self._lane is not None:
            stream = stream or self._lane.current_stream()
            if stream not in self._waited:
                self._event.wait(stream)
                self._waited = (*self._waited, stream)
            return stream
        if not self._done:
            self._done = True
            self.join()
        return None


class Together(InFlight):
    """Several pieces of work that were started one after the other on one stream: the last one's end is after all."""

    def __init__(self, works: Sequence[InFlight]) -> None:
        super().__init__(works[-1].end, among_peers=works[-1].among_peers)
        self._works = works

    def join(self) -> None:
        """See :class:`InFlight`."""
        for work in self._works:
            work.join()


class _Stream(torch.cuda.Stream):
    """A CUDA stream of which there is one object, so that comparing and hashing it takes no Python call."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@functools.cache
def _stream(number: int, index: int, kind: int) -> _Stream:
    return _Stream(stream_id=number, device_index=index, device_type=kind)


def current_stream(device: torch.device) -> Any:
    """The calling stream of a CUDA device, which has an index; the same object at every call."""
    # See [Note: streams in C].
    return _stream(*torch._C._cuda_getCurrentStream(device.index))


def _in_range(work: Callable[[], InFlight | None], label: str) -> InFlight | None:
    """See [Note: profiler ranges]."""
    with profiler.record_function(RANGE.format(label)):
        return work()


def let_follow(stream: Any, other: Any) -> None:
    """Order ``stream`` after all work enqueued on ``other`` so far; no-op if they are the same, or both None."""
    if stream != other:
        stream.wait_stream(other)


class Lane:
    """One direction of traffic (gathers, or reductions) of one runtime on one device.

    Args:
        device: where it runs.
        expect: watches for lost peers: an event that should happen within the timeout, and what it is the end of.
    """

    def __init__(self, device: torch.device, expect: Callable[[Any, str], None] | None = None) -> None:
        self.device = device
        self._expect = expect
        self._device_module: Any = None
        self._new_event: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._device_module = torch.get_device_module(device)
            self._new_event = Event if self._device_module is torch.cuda else self._device_module.Event
            # High priority: a copy or collective that is ready should not queue behind a wave of GEMM blocks.
            self._stream = self._device_module.Stream(device=device, priority=-1)
        self._begin: Any = None
        """Recorded where work starts, and waited for at once."""
        self._forked = False
        """Whether any work was started in this mode."""

    def change_mode(self) -> None:
        """Drop events recorded so far: a capture begins, with the device idle, or has ended."""
        self._forked = False

    def start(
        self,
        work: Callable[[], InFlight | None],
        *,
        waits: Sequence[Any] | None = None,
        label: str = "",
    ) -> InFlight:
        """Start ``work`` on the lane.

        Args:
            work: starts the collective and returns a handle to it, or None if it is only enqueued.
            waits: events (from :meth:`mark`) that ``work`` must come after, such as the last read of a buffer that
                it overwrites. None: all work enqueued on the current stream so far.
            label: names the work in profiles, see [Note: profiler ranges], and in messages about lost peers.

        Returns:
            the work, to wait for.
        """
        if label and profiler._is_profiler_enabled:
            work = partial(_in_range, work, label)
        stream = self._stream
        if stream is None:
            return work() or InFlight()
        if waits is None or not self._forked:
            self._begin = self.mark(event=self._begin)
            waits, self._forked = (self._begin, *(waits or ())), True
        for event in waits:
            event.wait(stream)
        if self._device_module is not torch.cuda or torch._C._cuda_getDevice() != self.device.index:
            with self._device_module.stream(stream):
                return self._started(work, label)
        # See [Note: streams in C].
        number, index, kind = torch._C._cuda_getCurrentStream(self.device.index)
        torch._C._cuda_setStream(stream.stream_id, stream.device_index, stream.device_type)
        try:
            return self._started(work, label)
        finally:
            torch._C._cuda_setStream(number, index, kind)

    def _started(self, work: Callable[[], InFlight | None], label: str) -> InFlight:
        """Start ``work`` on the lane's stream, which is the calling one."""
        started = work() or InFlight()
        started.join()
        # All anew: a transport may return the same object for the same gather each time. Who waited for its event has
        # enqueued that.
        started._event = started.end or self.mark(self._stream, started._event)
        started._lane, started._waited = self, ()
        if started.among_peers and self._expect is not None:
            self._expect(started._event, label)
        return started

    def join(self, other: Lane | None = None) -> None:
        """Order ``other``, or the caller's stream, after all work started in this mode; no-op without streams."""
        if self._forked:
            self.mark(self._stream).wait(self.current_stream() if other is None else other._stream)

    def mark(self, stream: Any = None, event: Any = None) -> Any:
        """An event after all work enqueued on ``stream`` (None: the current one) so far; None without streams.

        Args:
            stream: where it is recorded.
            event: a former one to record again: who waited for it has waited for what it was then.
        """
        if self._stream is None:
            return None
        event = event or self._new_event()
        event.record(stream or self.current_stream())
        return event

    def current_stream(self) -> Any:
        """The caller's stream on this lane's device, or None where there are no streams."""
        if self._device_module is torch.cuda:
            return _stream(*torch._C._cuda_getCurrentStream(self.device.index))
        return None if self._stream is None else self._device_module.current_stream(self.device)
