"""Transport over ``torch.distributed``: NCCL on CUDA, gloo on CPU.

Gathers are ``all_gather_single``. A reduction with fp32 accumulation is an all-to-all of the chunks in their own dtype
followed by a local sum in fp32, in rank order. It moves the same (N-1)/N of the bytes as a ring reduce-scatter, rounds
once instead of at each hop, and is bitwise reproducible. Without fp32 accumulation it is the backend's
``reduce_scatter_single``.

[Note: the lane's stream] On CUDA, collectives are ``async_op=False``, which lets NCCL use the calling stream, here the
lane's, and blocks nothing. With ``async_op=True`` it would use a stream of the process group, with four more event
calls per collective. This matters more in a capture: a stream that waits for events and launches nothing accumulates
dependencies. Each gather would depend on all earlier ones, and in a graph with hundreds of gathers each would start
more slowly than the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from etp.collectives.base import Transport
from etp.collectives.driver import CudaDriver
from etp.collectives.order import CollectiveOrder
from etp.collectives.sibling import sibling_group
from etp.collectives.sums import Launch, accumulate_parts
from etp.collectives.watchdog import Watchdog
from etp.collectives.works import (
    WorkLine,
    all_gather_single,
    explained,
    free_bytes,
    gather_numbers,
    reduce_scatter_single,
    start_on_cpu,
    who,
)
from etp.config import EtpConfig
from etp.stack import KERNEL_ALIGNMENT, Stack
from etp.streams import InFlight

# How much longer NCCL waits than our watchdog, which names the weight and ends the process at once. If NCCL's watchdog
# came first, it would take another minute to end the process.
_NCCL_MARGIN_S = 30.0


class C10dTransport(Transport):
    """See the module's docstring.

    Args:
        group: the shard group.
        config: ``fp32_accumulation`` and ``timeout_s`` of it count. With CUDA the host does not wait: a collective that
            takes longer ends the process, as NCCL's own timeout does.
        device: where the weights are; None for collectives whose order need not be compared. With a CUDA device,
            reductions get their own communicator, created here collectively, because NCCL serializes the collectives of
            one communicator across streams.
        supervises: compare the ranks' orders of collectives, and watch for lost peers; False for a part of another
            transport that does.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: EtpConfig,
        *,
        device: torch.device | None = None,
        supervises: bool = True,
    ) -> None:
        self._group = self._reduce_group = group
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._size = dist.get_world_size(group)
        self._fp32_accumulation = config.fp32_accumulation
        self._timeout_s = timeout_s = config.timeout_s
        self._line = WorkLine()
        if self._gpu is not None:
            patience_s = None if timeout_s is None else timeout_s + _NCCL_MARGIN_S
            self._reduce_group = sibling_group(group, patience_s, self._gpu)
        self._launches: dict[tuple[object, ...], Sequence[Launch]] = {}
        """How reductions are summed, by what they must have in common."""
        self._replays: Watchdog | None = None
        """Watches replays of graphs; None before the first capture."""
        # Without a timeout of our own, NCCL's watchdog applies.
        if supervises and self._gpu is not None and timeout_s is not None:
            self.watchdog = self._new_watchdog(timeout_s)
        if supervises and device is not None and self._size > 1:
            self.order = CollectiveOrder(self._reduce_group, device, timeout_s, self.watchdog)

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        """See :class:`etp.collectives.base.Transport`."""
        order = self.order
        if order is not None and order.recording:
            order.names.append(label)
        on_gpu = outputs.device.type == "cuda"
        try:
            if len(outputs.tensors) == 1:
                (output,), (shard,) = outputs.tensors, shards.tensors
                gather = partial(
                    all_gather_single,
                    output.view(-1),
                    shard.view(-1),
                    group=self._group,
                    async_op=not on_gpu,
                )
            else:
                # All experts of a layer in one call, and in one NCCL launch. PyTorch's coalescing manager cannot be
                # used, because it would not let NCCL use the calling stream.
                options = AllgatherOptions()
                options.asyncOp = not on_gpu
                several = self._group.allgather_into_tensor_coalesced
                gather = partial(several, list(outputs.tensors), list(shards.tensors), options)
            work = gather() if on_gpu or self._timeout_s is None else start_on_cpu(gather, self._group, self._timeout_s)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise explained(error, label, self._group) from error
        return _Collective(self, None if on_gpu else work, label)

    def stage(self, outputs: Stack) -> Stack:
        """See :class:`etp.collectives.base.Transport`. Kept as long as ``outputs``."""
        shape = (outputs.shape[0] // self._size, *outputs.shape[1:])
        # Outside inference mode even when called inside, like the slot that it belongs to.
        with torch.inference_mode(False):
            return outputs.derived(
                self, "staged", lambda: Stack.allocate(len(outputs), shape, outputs.dtype, outputs.device)
            )

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        """See :class:`etp.collectives.base.Transport`."""
        order = self.order
        if order is not None and order.recording:
            order.names.append(label)
        on_gpu = wgrads.device.type == "cuda"
        # [ranks, gradients, shard]: what goes to one rank is one message, however many gradients there are.
        chunks = wgrads.block().view(len(wgrads.tensors), self._size, -1).transpose(0, 1).contiguous()
        if self._fp32_accumulation:
            received = torch.empty_like(chunks)
            of_group: Any = dist.all_to_all_single
        else:
            received = torch.empty_like(chunks[0])
            of_group = reduce_scatter_single
        reduce = partial(of_group, received.view(-1), chunks.view(-1), group=self._reduce_group, async_op=not on_gpu)
        try:
            work = (
                reduce()
                if on_gpu or self._timeout_s is None
                else start_on_cpu(reduce, self._reduce_group, self._timeout_s)
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise explained(error, label, self._group) from error
        sent = None if on_gpu else work
        return _Reduction(self, sent, label, (received, chunks, wgrads, sinks), divisor, accumulate)

    def add(self, received: torch.Tensor, sinks: Stack, divisor: int, *, accumulate: bool) -> None:
        """Sum what a reduction has received on a GPU, as earlier ones of the same kind if there were any."""
        address = received.data_ptr()
        kind = received.dtype, received.numel(), address % KERNEL_ALIGNMENT, sinks.placement, divisor, accumulate
        launches = self._launches.get(kind)
        if not launches:
            self._launches[kind] = accumulate_parts(received, sinks, divisor, accumulate=accumulate)
            return
        stream = torch._C._cuda_getCurrentRawStream(sinks.device.index)
        for launch in launches:
            launch(address, address, sinks.address, stream)

    def exchange(self, numbers: torch.Tensor, label: str) -> torch.Tensor:
        """See :class:`etp.collectives.base.Transport`."""
        if self.order is not None:
            self.order.record(label)
        everyone = gather_numbers(numbers, self._group, self._line, self._timeout_s, label)
        self.watch(label)
        return everyone

    def wait(self, work: dist.Work, label: str) -> None:
        """Block until started work on the CPU is done, turning a failure into one error that names it."""
        try:
            work.wait()
        except RuntimeError as error:
            raise explained(error, label, self._group) from error
        self._line.finished.append(work)

    # CUDA graphs ---------------------------------------------------------------------------------------------

    def change_mode(self, *, capturing: bool) -> None:
        """See :class:`etp.collectives.base.Transport`."""
        super().change_mode(capturing=capturing)
        if capturing and self._replays is None and self._gpu is not None:
            # NCCL watches only the collectives that it starts itself, not those of a replay.
            limit = self._group._get_backend(self._gpu).options._timeout.total_seconds()
            self._replays = self.watchdog or self._new_watchdog(limit)
        if self.order is not None:
            self.order.recording = not capturing

    def watch_replays(self) -> None:
        """See :class:`etp.collectives.base.Transport`."""
        if self._replays is not None:
            self._replays.expect_stream("the replay of a CUDA graph")

    def _new_watchdog(self, timeout_s: float) -> Watchdog:
        return Watchdog(timeout_s, who(self._group), CudaDriver().allow_calls_during_capture, self._gpu)


class _Collective(InFlight):
    """A collective in flight; ``work`` is None if the calling stream is already ordered after it."""

    among_peers = True

    def __init__(self, transport: C10dTransport, work: dist.Work | None, label: str) -> None:
        self._transport = transport
        self._work = work
        self._label = label

    def join(self) -> None:
        """See :class:`etp.streams.InFlight`."""
        work, self._work = self._work, None
        if work is not None:
            self._transport.wait(work, self._label)


class _Reduction(_Collective):
    def __init__(
        self,
        transport: C10dTransport,
        work: dist.Work | None,
        label: str,
        memory: tuple[torch.Tensor, torch.Tensor, Stack, Stack],
        divisor: int,
        accumulate: bool,
    ) -> None:
        super().__init__(transport, work, label)
        # What is received, the chunks to send, the gradients that they may be, and the sinks. Kept until the work is
        # done, because another thread may read them.
        self._memory: tuple[torch.Tensor, torch.Tensor, Stack, Stack] | None = memory
        self._divisor, self._accumulate = divisor, accumulate

    def join(self) -> None:
        super().join()
        memory, self._memory = self._memory, None
        if memory is None:
            return
        received, chunks, wgrads, sinks = memory
        add = self._transport.add if received.is_cuda else accumulate_parts
        add(received, sinks, self._divisor, accumulate=self._accumulate)
        free_bytes(received)
        if chunks.data_ptr() != wgrads.tensors[0].data_ptr():
            free_bytes(chunks)
