"""Weight gradients on their way to the shards: leased buffers, reductions in flight, and their destinations.

[Note: deferred accumulation] A reduction starts as soon as its GEMM is enqueued. It is finished once the reductions in
flight hold more than twice the bytes of the largest one, when its buffer is needed again, or at the end of the backward
pass. It thus overlaps with the next layers' GEMMs, and compute does not wait for it. Only when it is finished do the
shard's ``grad`` or ``main_grad`` contain it, and only then do hooks run: a data-parallel bucket that was sent earlier
would lack this gradient. A reduction that is finished in a later pass runs no hooks, because they would be attributed
to that pass, and Megatron sends a bucket once it has counted the last microbatch's hooks.

[Note: home streams] Compute may use several streams. The memory of a gradient, pooled or fresh, goes back to the stream
that it came from, its *home*, as in PyTorch's allocator. Only that stream can lease the memory again, and is first
ordered after the reduction that read it, whichever stream finished the reduction.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_, methodcaller
from typing import Any, Self

import torch

from etp.errors import EtpStateError
from etp.group import WeightGroup
from etp.layout import ShardLayout
from etp.shard import Shard, read_grad, write_grad
from etp.shard_grad import ShardGrad, plain
from etp.stack import Stack
from etp.streams import InFlight

# For map(), which runs them in C: a Python call for each expert of a layer would take long.
_ADDRESS = methodcaller("data_ptr")
_IS_CONTIGUOUS = methodcaller("is_contiguous")


BlockKind = tuple[int, torch.dtype, torch.device, Any]
"""Elements, dtype, device and stream of a block of the pool."""


class _Block:
    """A flat block of the pool, and its views as stacks."""

    def __init__(self, kind: BlockKind) -> None:
        numel, dtype, device, _ = self.kind = kind
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self.stacks: dict[tuple[int, tuple[int, ...]], Stack] = {}
        """Its memory as a number of tensors of a shape, as it was lent before."""


class WgradPool:
    """Recycled memory of full (padded) gradients, keyed by element count, dtype, device and stream.

    The pool accepts back only what it lent. ``stream`` is the current one, None where there are no streams; see
    [Note: home streams].
    """

    def __init__(self) -> None:
        self._free: dict[BlockKind, list[_Block]] = defaultdict(list)
        self._lent: dict[int, _Block] = {}

    def lease(
        self, count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: Any = None
    ) -> Stack:
        """``count`` tensors of ``shape`` in one block, with arbitrary content, which ``stream`` may write."""
        kind = count * math.prod(shape), dtype, device, stream
        free = self._free[kind]
        block = free.pop() if free else _Block(kind)
        self._lent[block.flat.data_ptr()] = block
        stack = block.stacks.get((count, shape))
        if stack is None:
            stack = block.stacks[count, shape] = Stack.within(block.flat, count, shape)
        return stack

    def has_free(self, numel: int, dtype: torch.dtype, device: torch.device, stream: Any = None) -> bool:
        """Whether a lease of this kind needs no new memory."""
        return bool(self._free[numel, dtype, device, stream])

    def kind_of(self, buffer: torch.Tensor) -> BlockKind | None:
        """The kind of the block that starts at the address of ``buffer`` and is lent out now; None if there is none."""
        block = self._lent.get(buffer.data_ptr())
        return None if block is None else block.kind

    def leased(self, tensors: Sequence[torch.Tensor], shape: tuple[int, ...]) -> Stack | None:
        """The leased stack whose tensors, of ``shape``, have the addresses of ``tensors``; None if there is none."""
        block = self._lent.get(tensors[0].data_ptr())
        stack = None if block is None else block.stacks.get((len(tensors), shape))
        # The first tensor's address is the block's.
        if stack is None or len(tensors) == 1:
            return stack
        return stack if list(map(_ADDRESS, tensors)) == list(map(_ADDRESS, stack.tensors)) else None

    def restore(self, buffer: torch.Tensor) -> None:
        """Take a block back by its first tensor, for its stream to write; EtpStateError if it is not lent out."""
        block = self._lent.pop(buffer.data_ptr(), None)
        if block is None:
            raise EtpStateError(
                f"a gradient buffer of shape {tuple(buffer.shape)} was returned to a pool that did not lend it, "
                "or was returned twice"
            )
        self._free[block.kind].append(block)

    def write_off(self) -> None:
        """Forget all leases: their users have failed and will not return them."""
        self._lent.clear()

    def nbytes(self) -> int:
        """Bytes of all blocks, lent or free."""
        blocks = [*self._lent.values(), *(block for free in self._free.values() for block in free)]
        return sum(block.flat.nbytes for block in blocks)

    def clear(self) -> None:
        """Free the blocks that are not lent."""
        self._free.clear()


@dataclass(slots=True, eq=False)
class PendingReduction:
    """One group's reduction, started and not yet finished.

    Attributes:
        group: the group whose gradient is reduced.
        ready: the reduction's end.
        wgrads: the full gradients, which the side stream reads until then.
        nbytes: bytes of these.
        pool: takes back those that are leased.
        block: the kind of the block that it takes back; None if the gradients are not leased.
        home: the stream that the memory of ``wgrads`` goes back to; see [Note: home streams].
        publish: makes the gradient visible on the shards; its argument says whether hooks may run. None if autograd
            delivers the gradient.
        belated: whether another pass has begun since it was started.
    """

    group: WeightGroup
    ready: InFlight
    wgrads: Stack
    nbytes: int
    pool: WgradPool
    block: BlockKind | None
    home: Any
    publish: Callable[[bool], None] | None
    belated: bool = False

    def finish(self, *, publish: bool = True) -> None:
        """Wait, then publish the gradient on the shards, unless its backward pass was abandoned."""
        try:
            self.ready.wait()
            if publish and self.publish is not None:
                self.publish(not self.belated)
        finally:
            # Even if a peer is late or a hook raises, the weight must be usable in the next step.
            self.group.reducing = False
            self.ready.wait(self.home)
            if self.block is not None:
                self.pool.restore(self.wgrads.tensors[0])


def padded_wgrads(wgrads: Sequence[torch.Tensor], layout: ShardLayout, pool: WgradPool, stream: Any = None) -> Stack:
    """A group's gradients as contiguous tensors of the padded shape, with zeros in the padding rows.

    Args:
        wgrads: gradients of the logical shape: fresh tensors, or the leading rows of those leased from ``pool``.
        layout: how each weight is cut.
        pool: provides memory where ``wgrads`` cannot be used in place.
        stream: the current stream, None where there are none.
    """
    padded = pool.leased(wgrads, layout.padded_shape)
    if padded is None:
        if layout.pad_rows == 0 and all(map(_IS_CONTIGUOUS, wgrads)):
            return Stack(wgrads)
        padded = pool.lease(len(wgrads), layout.padded_shape, wgrads[0].dtype, wgrads[0].device, stream)
        torch._foreach_copy_([whole[: layout.rows] for whole in padded], list(wgrads))
    if layout.pad_rows:
        padded.block()[:, layout.rows :].zero_()
    return padded


def gradient_is_absent(param: Shard) -> bool:
    """Whether a shard has neither a gradient nor a ``main_grad``."""
    return param.grad is None and getattr(param, "main_grad", None) is None


def gradient_dtype(param: torch.Tensor) -> torch.dtype:
    """The dtype of a new ``grad`` of the parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        # None allows any.
        return param.grad_dtype or param.dtype


@dataclass(frozen=True, slots=True)
class Destinations:
    """Where the reduced gradients of some shards go.

    Attributes:
        sinks: a tensor of the shard's shape for each.
        accumulate: whether the gradients are added to the sinks; otherwise they overwrite them.
        fresh: shards whose sink is a new tensor, which becomes their ``grad``, or is added to it, by :meth:`publish`.
        lasting: whether all sinks are the shards' ``main_grad``, which outlive the iteration.
    """

    sinks: Stack
    accumulate: bool
    fresh: Sequence[tuple[Shard, torch.Tensor]] = ()
    lasting: bool = False

    @classmethod
    def of(cls, shards: Sequence[Shard], former: Self | None = None) -> Self:
        """``main_grad`` of each shard if it has one, else ``grad`` or a new tensor.

        Args:
            shards: at least one, of one layout.
            former: what this function returned for the same shards before; returned again if nothing has changed.
        """
        if former is not None:
            mains = [getattr(shard, "main_grad", None) for shard in shards]
            if len(mains) == len(former.sinks.tensors) and all(map(is_, mains, former.sinks.tensors)):
                return former
        # Otherwise each attribute of a Tensor subclass would cost a Python call.
        with torch._C.DisableTorchFunctionSubclass():
            mains = [getattr(shard, "main_grad", None) for shard in shards]
            found = [read_grad(shard) if main is None else main for shard, main in zip(shards, mains, strict=True)]
            known = [
                target.as_subclass(torch.Tensor) if isinstance(target, ShardGrad) else target
                for target in found
                if target is not None and target.is_contiguous()
            ]
        if len(known) == len(shards):
            # A list: a generator would cost a Python call per shard.
            lasting = all([main is not None for main in mains])  # noqa: C419
            return cls(Stack(known), accumulate=True, lasting=lasting)
        local = shards[0].local_shard()
        if not known:
            made = new_gradients(len(shards), local, gradient_dtype(shards[0]))
            return cls(made, accumulate=False, fresh=list(zip(shards, made, strict=True)))
        # Some have a gradient to add to. The others get negative zeros, which change no number that is added to them.
        targets, fresh = [], []
        for shard, target in zip(shards, found, strict=True):
            if target is not None and target.is_contiguous():
                targets.append(plain(target))
                continue
            dtype = gradient_dtype(shard) if target is None else target.dtype
            targets.append(torch.full_like(local, -0.0, dtype=dtype, memory_format=torch.contiguous_format))
            fresh.append((shard, targets[-1]))
        return cls(Stack(targets), accumulate=True, fresh=fresh)

    def publish(self) -> None:
        """Make the gradients in new tensors visible on their shards, once the reduction is done."""
        with torch._C.DisableTorchFunctionSubclass():
            for shard, made in self.fresh:
                # Autograd may have set a gradient meanwhile, for example that of a penalty on the shard itself.
                target = read_grad(shard) if (main := getattr(shard, "main_grad", None)) is None else main
                if target is None:
                    write_grad(shard, made)
                else:
                    target.add_(made)


def new_gradients(count: int, local: torch.Tensor, dtype: torch.dtype) -> Stack:
    """``count`` new gradients of the shape of the shard ``local``, with arbitrary content."""
    if count == 1:
        # Preserve-format would keep a view's strides; a gradient is contiguous like its shard.
        return Stack([torch.empty_like(local, dtype=dtype, memory_format=torch.contiguous_format)])
    return Stack.allocate(count, local.shape, dtype, local.device)
