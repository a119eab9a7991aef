"""Transport over ``torch.distributed``: NCCL on CUDA, gloo on CPU.

Gathers are ``all_gather_into_tensor``. A reduction with fp32 accumulation is an all-to-all of the chunks in their
own dtype followed by a local sum in fp32, in rank order. It moves the same (N-1)/N of the bytes as a ring
reduce-scatter, rounds once instead of at each hop, and is bitwise reproducible. Without fp32 accumulation it is the
backend's ``reduce_scatter_tensor``.

[Note: the lane's stream] On CUDA, collectives are ``async_op=False``, which lets NCCL use the calling stream, here the
lane's, and blocks nothing; with ``async_op=True`` it would use a stream of the process group, with four more event
calls per collective. In a capture it matters more: a stream that waits for events and launches nothing never forgets
one, so each gather would depend on all earlier ones, and a graph that has hundreds of them starts each more slowly than
the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from etp.collectives.base import GradSink
from etp.collectives.driver import CudaDriver
from etp.collectives.failures import reported
from etp.collectives.order import ORDER_LABEL, CollectiveOrder
from etp.collectives.sibling import sibling_group
from etp.collectives.sums import accumulate_parts
from etp.collectives.watchdog import Watchdog
from etp.collectives.works import WorkLine, free_bytes
from etp.streams import Enqueued, InFlight

# How much longer NCCL waits than our watchdog, which names the weight and ends the process at once. NCCL's own, if it
# comes first, takes another minute to end the process.
_NCCL_MARGIN_S = 30.0


class C10dTransport:
    """See the module's docstring.

    Args:
        group: the shard group.
        fp32_accumulation: sum in fp32 rather than in the gradients' dtype.
        timeout_s: seconds to wait for a collective; None uses the process group's timeout. With CUDA the host does not
            wait: a collective that takes longer ends the process, as NCCL's own timeout does.
        device: where the weights are; None for collectives whose order need not be compared. With a CUDA device,
            reductions get their own communicator, created here collectively, because NCCL serializes the collectives of
            one communicator across streams.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        fp32_accumulation: bool,
        timeout_s: float | None,
        device: torch.device | None = None,
    ) -> None:
        self._group = self._reduce_group = group
        self._gpu = device if device is not None and device.type == "cuda" else None
        self._size = dist.get_world_size(group)
        self._fp32_accumulation = fp32_accumulation
        self._timeout_s = timeout_s
        self._line = WorkLine()
        ranks = dist.get_process_group_ranks(group)
        self._who = f"on rank {dist.get_rank()} (shard group: ranks {ranks})"
        if self._gpu is not None:
            patience_s = None if timeout_s is None else timeout_s + _NCCL_MARGIN_S
            self._reduce_group = sibling_group(group, patience_s, self._gpu)
        self._order: CollectiveOrder | None = None
        if device is not None and self._size > 1:
            self._order = CollectiveOrder(self._reduce_group, device, timeout_s)
        self._watchdog: Watchdog | None = None
        self._replays: Watchdog | None = None
        """Watches replays of graphs; None before the first capture."""
        if self._gpu is not None and timeout_s is not None:
            self._watchdog = _new_watchdog(timeout_s)

    def all_gather(self, outputs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], label: str) -> InFlight:
        """See :class:`etp.collectives.base.Transport`."""
        self.record(label)
        with reported(label, self._group):
            works = self._start_all(
                self._group,
                [
                    (dist.all_gather_into_tensor, output.view(-1), shard.reshape(-1))
                    for output, shard in zip(outputs, shards, strict=True)
                ],
            )
        return _Collective(self, works, label, outputs[0].device)

    def reduce_scatter(
        self, wgrads: Sequence[torch.Tensor], sinks: Sequence[GradSink], divisor: int, label: str
    ) -> InFlight:
        """See :class:`etp.collectives.base.Transport`."""
        self.record(label)
        if self._fp32_accumulation:
            received = [torch.empty_like(wgrad) for wgrad in wgrads]
            collective: Any = dist.all_to_all_single
        else:
            received = [wgrad.new_empty(wgrad.numel() // self._size) for wgrad in wgrads]
            collective = dist.reduce_scatter_tensor
        with reported(label, self._group):
            works = self._start_all(
                self._reduce_group,
                [(collective, parts.view(-1), wgrad.view(-1)) for parts, wgrad in zip(received, wgrads, strict=True)],
            )
        return _Reduction(self, works, label, received, list(wgrads), list(sinks), divisor)

    @staticmethod
    def _start_all(
        group: dist.ProcessGroup, calls: Sequence[tuple[Any, torch.Tensor, torch.Tensor]]
    ) -> list[dist.Work]:
        """Start collectives, all of one kind, side by side.

        Returns:
            what to wait for; nothing where the calling stream is ordered after them already.
        """
        device = calls[0][1].device
        if device.type != "cuda":
            return [collective(output, source, group=group, async_op=True) for collective, output, source in calls]
        if len(calls) == 1 or not group._get_backend(device).supports_coalescing:
            for collective, output, source in calls:
                collective(output, source, group=group)
        elif calls[0][0] is dist.all_gather_into_tensor:
            # As PyTorch's coalescing manager does, which leaves out that the calling stream is to be used.
            options = AllgatherOptions()
            options.asyncOp = False
            group.allgather_into_tensor_coalesced([output for _, output, _ in calls], [x for _, _, x in calls], options)
        else:
            # One NCCL launch for all experts of a group.
            with dist._coalescing_manager(group=group, device=device):
                for collective, output, source in calls:
                    collective(output, source, group=group)
        return []

    def wait(self, works: Sequence[dist.Work], label: str, device: torch.device) -> None:
        """Wait for started work on ``device``, turning a failure into one error that names it."""
        with reported(label, self._group):
            for work in works:
                self._line.wait(work, self._timeout_s, keep=device.type == "cpu")

    def expect(self, end: Any, label: str) -> None:
        """End the process if ``end``, an event after the collective ``label``, does not happen within the timeout."""
        # Nothing runs while a graph is captured; watch_replays covers replays.
        if self._watchdog is not None and not torch.cuda.is_current_stream_capturing():
            self._watchdog.expect(end, f"{label} {self._who}")

    def watch(self, label: str) -> None:
        """See :class:`etp.collectives.base.WatchedTransport`. NCCL watches where there is no timeout of our own."""
        if self._watchdog is not None and self._gpu is not None:
            self._watchdog.expect_stream(self._gpu, f"{label} {self._who}")

    # The order of collectives: see [Note: order] in etp/collectives/order.py ----------------------------------

    def record(self, label: str) -> None:
        """See :class:`etp.collectives.base.OrderedTransport`."""
        if self._order is not None:
            self._order.record(label)

    @property
    def has_order_to_compare(self) -> bool:
        """See :class:`etp.collectives.base.OrderedTransport`."""
        return self._order is not None and self._order.has_news

    def exchange_order(self) -> InFlight:
        """See :class:`etp.collectives.base.OrderedTransport`."""
        if self._order is not None:
            self._order.exchange()
            if self._order.is_answered:
                self._order.verify()
        return _Exchange(self)

    def verify_order(self) -> None:
        """See :class:`etp.collectives.base.OrderedTransport`."""
        if self._order is not None:
            self._order.verify()

    # CUDA graphs ---------------------------------------------------------------------------------------------

    def change_mode(self, *, capturing: bool) -> None:
        """A CUDA graph capture begins or has ended; works need no reset."""
        if capturing and self._replays is None and self._gpu is not None:
            # NCCL watches only the collectives that it starts itself, and none of a replay.
            limit = self._group._get_backend(self._gpu).options._timeout.total_seconds()
            self._replays = self._watchdog or _new_watchdog(limit)
        if self._order is not None:
            self._order.recording = not capturing

    def watch_replays(self) -> None:
        """Watch that work enqueued so far on the calling stream, graph replays included, ends within the timeout."""
        if self._replays is not None and self._gpu is not None:
            self._replays.expect_stream(self._gpu, f"the replay of a CUDA graph {self._who}")


def _new_watchdog(timeout_s: float) -> Watchdog:
    return Watchdog(timeout_s, CudaDriver().allow_calls_during_capture)


class _Exchange(Enqueued):
    def __init__(self, transport: C10dTransport) -> None:
        super().__init__()
        self._transport = transport

    def expect(self, end: Any) -> None:
        self._transport.expect(end, ORDER_LABEL)


class _Collective:
    def __init__(self, transport: C10dTransport, works: Sequence[dist.Work], label: str, device: torch.device) -> None:
        self._transport = transport
        self.beside: Sequence[Any] = ()
        self._works = works
        self._label = label
        self._device = device

    def join(self) -> None:
        self._transport.wait(self._works, self._label, self._device)
        # A finished NCCL Work keeps its tensors alive; release them now rather than with this object.
        self._works = ()

    def expect(self, end: Any) -> None:
        """See :class:`etp.streams.InFlight`."""
        self._transport.expect(end, self._label)


class _Reduction(_Collective):
    def __init__(
        self,
        transport: C10dTransport,
        works: Sequence[dist.Work],
        label: str,
        received: list[torch.Tensor],
        sent: list[torch.Tensor],
        sinks: list[GradSink],
        divisor: int,
    ) -> None:
        super().__init__(transport, works, label, sent[0].device)
        self._received = received
        self._sent = sent
        self._sinks = sinks
        self._divisor = divisor

    def join(self) -> None:
        super().join()
        for parts, sink in zip(self._received, self._sinks, strict=True):
            accumulate_parts(parts, sink, self._divisor)
            free_bytes(parts)
        self._received, self._sent = [], []
