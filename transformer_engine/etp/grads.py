"""Weight gradients on their way to the shards: leased buffers, reductions under way, and where they end.

[Note: deferred accumulation] A reduction is started as soon as its GEMM is done and finished when the reductions after
it hold twice the bytes of the largest, when its buffer is needed again (or at the end of the backward pass), so that
it runs beside the next layers' GEMMs and compute does not wait for it. Only when it is finished do
the shard's ``grad`` or ``main_grad`` hold it, and only then do hooks run: a data-parallel bucket that went off
earlier would carry a gradient that is not there yet. A reduction that is finished in a later pass runs no hooks: they
would be taken for that pass's, and Megatron sends a bucket off once it has counted the last microbatch's.
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
    """Recycled buffers of full (padded) gradients, keyed by element count and dtype.

    The pool takes back only what it lent: a buffer that came from elsewhere is left to its owner.
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
        """Forget what is lent: whoever leased it has failed and will not bring it back."""
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

    def finish(self) -> None:
        """Wait, then publish the gradient on the shards."""
        try:
            self._wait()
            self._publish(not self.belated)
        finally:
            # A peer may be late, a hook may raise; the weight must be usable in the next step all the same.
            self._release()

    def discard(self) -> None:
        """Wait, and drop the result: the backward pass that it belongs to was abandoned."""
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
    """The gradient as a contiguous tensor of the padded shape, its padding rows zero.

    Args:
        wgrad: gradient of the logical shape: a fresh tensor, or the leading rows of a buffer leased from ``pool``.
        padded_shape: shape with padding rows.
        pool: where a buffer comes from when ``wgrad`` cannot be used as it lies.
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
    """Where a reduction into ``param`` goes: ``main_grad`` if it has one, else ``grad``, made now if there is none.

    A gradient made here is not yet ``param.grad``: it becomes that when the reduction is published.
    """
    target: torch.Tensor | None = getattr(param, "main_grad", None)
    if target is None:
        target = param.grad
    if target is not None:
        return GradSink(plain(target), accumulate=True)
    # Preserve-format would keep a view's strides; a gradient is contiguous like its shard.
    fresh = torch.empty_like(param, memory_format=torch.contiguous_format, requires_grad=False)
    return GradSink(fresh, accumulate=False)
