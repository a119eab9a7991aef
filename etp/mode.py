"""Eager or captured: whether work is being captured into a CUDA graph, and the buffers of either mode.

[Note: graphs] Host code runs once, when a graph is captured; its replays change memory without the host's knowledge.
Therefore:

- Captured work has its own gather slots and gradient buffers, which eager work never touches. The first capture takes
  over the buffers that the passes before it have filled, so that none is allocated inside a capture.
- A graph gathers everything it reads and finishes everything it starts: nothing gathered before a capture is used
  inside it, nor the other way round. Within a capture, gathered weights are reused as usual, because a replay performs
  the same operations in the same order.
- A capture is *whole* if the forward of the sharded module is called inside it. Weights change between its replays, so
  it publishes them itself; afterwards, eager passes no longer trust the count of changes.
- Any other capture is a *part*: its weights are published outside it, when the module's forward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from etp.cache import BufferCache
from etp.collectives.driver import CudaDriver
from etp.config import EtpConfig
from etp.grads import WgradPool
from etp.group import WeightGroup


@dataclass(frozen=True, slots=True, eq=False)
class Mode:
    """The mode in which work runs: eager, or one capture.

    Attributes:
        cache: its gather slots.
        pool: its buffers for full gradients.
        capture: number of the capture; None in eager mode.
        is_part: whether a part of the model is being captured.
        replays_parts: in eager mode, whether parts of the model have been captured before.
        replays_steps: in eager mode, whether whole steps have been captured before, whose replays change weights
            without the host's knowledge.
    """

    cache: BufferCache
    pool: WgradPool
    capture: int | None = None
    is_part: bool = False
    replays_parts: bool = False
    replays_steps: bool = False


class Modes:
    """The modes of one runtime.

    Args:
        config: options of the runtime.
        groups: the runtime's own list of groups, shared so that later additions are seen.

    Attributes:
        now: the current mode. Only :meth:`update` and :meth:`begin_step` assign it.
        parts: called with the mode that begins, in this order, before it becomes :attr:`now`: a capture begins, with
            the device idle, or has ended. Each drops its events, and what is in flight or held. The first may refuse
            the change by raising.
        possible: whether work can be captured at all.
        drained_after_parts: whether everything started in a captured part is finished at its end
            (:meth:`etp.EtpRuntime.drain`). Only then do forward passes of captured parts prefetch.
    """

    def __init__(self, config: EtpConfig, groups: Sequence[WeightGroup] = ()) -> None:
        self._config = config
        self._groups = groups
        self._driver: CudaDriver | None = None
        self._eager = self.now = self._new()
        self._captured: Mode | None = None
        self.parts: Sequence[Callable[[Mode], None]] = ()
        self.possible = torch.cuda.is_available() and torch.cuda.device_count() > 0
        self._is_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if self.possible else bool
        self.drained_after_parts = False

    def _new(self) -> Mode:
        return Mode(BufferCache(self._config.prefetch_depth + 1, self._config.resident_bytes), WgradPool())

    @property
    def all(self) -> list[Mode]:
        """Eager mode, and captured mode after the first capture: whatever holds buffers."""
        return [self._eager] if self._captured is None else [self._eager, self._captured]

    @property
    def capturing(self) -> bool:
        """Whether sharded weights are being captured into a CUDA graph."""
        self.update()
        return self.now.capture is not None

    def captures_part(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is computed by a part of the model that is being captured at this moment."""
        return self.now.is_part and tensor.is_cuda and torch.cuda.is_current_stream_capturing()

    # Changes ---------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Change modes if a capture has begun or ended since the last call."""
        # First, because it holds nearly always, and is asked several times for each weight.
        if self.now.capture is None and not self._is_capturing():
            return
        if not self._groups:
            return
        capture = self._current_capture(self._groups[0].spec.device)
        if capture == self.now.capture:
            return
        if self.now.capture is not None:
            self._change(self._after(self.now))
        if capture is not None:
            buffers = self._captured or self._eager
            self._change(Mode(buffers.cache, buffers.pool, capture, is_part=True))

    def begin_step(self) -> None:
        """Record that the current capture contains the forward of the sharded module: it is whole."""
        self.now = replace(self.now, is_part=False)

    def _current_capture(self, device: torch.device) -> int | None:
        """Number of the capture that the calling stream takes part in; None outside of one."""
        if device.type != "cuda" or not torch._C._cuda_isCurrentStreamCapturing():
            return None
        if self._driver is None:
            self._driver = CudaDriver()
        return self._driver.capture_id(torch.cuda.current_stream(device).cuda_stream)

    def _change(self, mode: Mode) -> None:
        for part in self.parts:
            part(mode)
        if mode.capture is None:
            self._eager = mode
        else:
            self._leave_buffers_to(mode)
        self.now = mode

    def _after(self, ended: Mode) -> Mode:
        former = self._eager
        return replace(
            former,
            replays_parts=former.replays_parts or ended.is_part,
            replays_steps=former.replays_steps or not ended.is_part,
        )

    def _leave_buffers_to(self, captured: Mode) -> None:
        """Let a capture use its buffers, which belong to it from the first capture on."""
        if self._captured is None:
            captured.cache.pin()
            self._eager = self._new()
        else:
            # Filled by the warm-up for this capture; allocated again on demand.
            self._eager.cache.clear()
            self._eager.pool.clear()
        captured.cache.void()
        self._captured = captured
