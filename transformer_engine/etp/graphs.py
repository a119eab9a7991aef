"""CUDA graphs: whether a capture is in progress, and which buffers belong to captured work.

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

from collections.abc import Callable
from dataclasses import dataclass

import torch

from etp.cache import BufferCache
from etp.collectives.driver import CudaDriver
from etp.grads import WgradPool


@dataclass(frozen=True)
class Buffers:
    """Gather slots, and buffers for full gradients."""

    cache: BufferCache
    pool: WgradPool


class GraphModes:
    """The buffers of one runtime, inside and outside of CUDA graphs.

    Args:
        new_cache: makes a cache of gather slots.

    Attributes:
        capture: number of the capture that the engine takes part in; None outside of one.
        is_part: whether a part of the model is being captured.
        buffers: the buffers of the current mode.
        has_parts: whether parts of the model have been captured.
    """

    def __init__(self, new_cache: Callable[[], BufferCache]) -> None:
        self._new_cache = new_cache
        self._driver: CudaDriver | None = None
        self._eager = Buffers(new_cache(), WgradPool())
        self._captured: Buffers | None = None
        self.buffers = self._eager
        self.possible = torch.cuda.is_available()
        """Whether work can be captured at all."""
        self.capture: int | None = None
        self.is_part = False
        self.has_parts = False

    @property
    def all_buffers(self) -> list[Buffers]:
        """The buffers of both modes."""
        return [self._eager] if self._captured is None else [self._eager, self._captured]

    def current_capture(self, device: torch.device) -> int | None:
        """Number of the capture that the calling stream takes part in; None outside of one."""
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return None
        if self._driver is None:
            self._driver = CudaDriver()
        return self._driver.capture_id(torch.cuda.current_stream(device).cuda_stream)

    def enter(self, capture: int) -> None:
        """Switch to the captured buffers: a capture begins, with the device idle."""
        self.capture, self.is_part = capture, True
        if self._captured is None:
            self._captured = self._eager
            self._captured.cache.pin()
            self._eager = Buffers(self._new_cache(), WgradPool())
        else:
            # Filled by the warm-up for this capture; allocated again on demand.
            self._eager.cache.clear()
            self._eager.pool.clear()
        self._captured.cache.void()
        self.buffers = self._captured

    def is_whole(self) -> None:
        """Record that the current capture contains the forward of the sharded module."""
        self.is_part = False

    def leave(self) -> bool:
        """Switch back to the eager buffers: the capture has ended. Returns whether it was whole."""
        was_whole = not self.is_part
        self.has_parts |= self.is_part
        self.capture, self.is_part = None, False
        self.buffers = self._eager
        return was_whole
