"""Weight gradients on their way to the shards: leased buffers, reductions in flight, and their destinations.

[Note: deferred accumulation] A reduction starts as soon as its GEMM is enqueued. It is finished once the reductions in
flight hold more than twice the bytes of the largest one, when its buffer is needed again, or at the end of the backward
pass. It thus runs beside the next layers' GEMMs, and compute does not wait for it. Only when it is finished do the
shard's ``grad`` or ``main_grad`` contain it, and only then do hooks run: a data-parallel bucket that was sent earlier
would lack this gradient. A reduction that is finished in a later pass runs no hooks, because they would be attributed
to that pass, and Megatron sends a bucket once it has counted the last microbatch's hooks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from etp.collectives.base import GradSink
from etp.errors import EtpStateError
from etp.group import ReduceState, WeightGroup
from etp.shard_grad import plain
from etp.streams import Ready


class WgradPool:
    """Recycled buffers of full (padded) gradients, keyed by element count, dtype and device.

    The pool accepts back only buffers that it lent.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, torch.Tensor] = {}

    def lease(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous buffer of ``shape`` with arbitrary content."""
        numel = math.prod(shape)
        free = self._free[numel, dtype, device]
        flat = free.pop() if free else torch.empty(numel, dtype=dtype, device=device)
        self._lent[flat.data_ptr()] = flat
        return flat.view(shape)

    def has_free(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether a lease of this kind needs no new memory."""
        return bool(self._free[math.prod(shape), dtype, device])

    def owns(self, buffer: torch.Tensor) -> bool:
        """Whether ``buffer`` starts at the address of a buffer that is lent out now."""
        return buffer.data_ptr() in self._lent

    def restore(self, buffer: torch.Tensor) -> None:
        """Take a leased buffer back."""
        flat = self._lent.pop(buffer.data_ptr(), None)
        if flat is None:
            raise EtpStateError(
                f"a gradient buffer of shape {tuple(buffer.shape)} was returned to a pool that did not lend it, "
                "or was returned twice"
            )
        self._free[flat.numel(), flat.dtype, flat.device].append(flat)

    def write_off(self) -> None:
        """Forget the buffers that are lent out: their users have failed and will not return them."""
        self._lent.clear()

    def nbytes(self) -> int:
        """Bytes of all buffers, lent or free."""
        buffers = [*self._lent.values(), *(flat for free in self._free.values() for flat in free)]
        return sum(flat.numel() * flat.dtype.itemsize for flat in buffers)

    def clear(self) -> None:
        """Free the buffers that are not lent."""
        self._free.clear()


class PendingReduction:
    """One group's reduction, started and not yet finished."""

    def __init__(
        self,
        group: WeightGroup,
        ready: Ready,
        wgrads: list[torch.Tensor],
        pool: WgradPool,
        publish: Callable[[bool], None],
    ) -> None:
        self.group = group
        self._ready = ready
        # Held until finished: the side stream still reads them.
        self._wgrads = wgrads
        self._pool = pool
        self._publish = publish
        self.belated = False
        """Whether another pass has begun since it was started."""
        self.nbytes = sum(wgrad.nbytes for wgrad in wgrads)
        """Bytes of the gradients that it keeps alive until it is finished."""

    def holds(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
        """Whether finishing it gives the pool a buffer for this shape back."""
        return any(
            wgrad.numel() == math.prod(shape) and wgrad.dtype == dtype and wgrad.device == device
            for wgrad in self._wgrads
            if self._pool.owns(wgrad)
        )

    def order(self) -> None:
        """Order the current stream after the sum, which others add to as well; publish nothing yet."""
        self._ready.wait()

    def finish(self) -> None:
        """Wait, then publish the gradient on the shards."""
        try:
            self._wait()
            self._publish(not self.belated)
        finally:
            # A peer may be late, a hook may raise; the weight must be usable in the next step all the same.
            self._release()

    def discard(self) -> None:
        """Wait, and drop the result, because its backward pass was abandoned."""
        try:
            self._wait()
        finally:
            self._release()

    def _wait(self) -> None:
        try:
            self._ready.wait()
        finally:
            self.group.set_reduce_state(ReduceState.READY)

    def _release(self) -> None:
        self.group.set_reduce_state(ReduceState.NONE)
        for wgrad in self._wgrads:
            if self._pool.owns(wgrad):
                self._pool.restore(wgrad)
        self._wgrads = []


def padded_wgrad(wgrad: torch.Tensor, padded_shape: tuple[int, ...], pool: WgradPool) -> torch.Tensor:
    """The gradient as a contiguous tensor of the padded shape, with zeros in the padding rows.

    Args:
        wgrad: gradient of the logical shape: a fresh tensor, or the leading rows of a buffer leased from ``pool``.
        padded_shape: shape with padding rows.
        pool: provides a buffer when ``wgrad`` cannot be used in place.
    """
    rows = wgrad.shape[0]
    if tuple(wgrad.shape) == padded_shape and wgrad.is_contiguous():
        return wgrad
    if pool.owns(wgrad):
        padded = wgrad.as_strided(padded_shape, wgrad.stride())
    else:
        padded = pool.lease(padded_shape, wgrad.dtype, wgrad.device)
        padded[:rows].copy_(wgrad)
    padded[rows:].zero_()
    return padded


def gradient_is_absent(param: Any) -> bool:
    """Whether a trained shard has no gradient and no ``main_grad``."""
    return param.requires_grad and param.grad is None and getattr(param, "main_grad", None) is None


def gradient_sink(param: torch.nn.Parameter) -> GradSink:
    """The destination of a reduction into ``param``: ``main_grad`` if it has one, else ``grad`` or a new tensor.

    A new tensor becomes ``param.grad`` only when the reduction is published.
    """
    target: torch.Tensor | None = getattr(param, "main_grad", None)
    if target is None:
        target = param.grad
    if target is not None:
        return GradSink(plain(target), accumulate=True)
    # Preserve-format would keep a view's strides; a gradient is contiguous like its shard.
    fresh = torch.empty_like(param, memory_format=torch.contiguous_format, requires_grad=False)
    return GradSink(fresh, accumulate=False)
