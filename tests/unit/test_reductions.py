"""Reductions in one process: steps after one that ran out of memory, and gradients that autograd brings beside them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.collectives.base import Transport
from etp.stack import Stack
from etp.streams import InFlight

SIDE, LAYERS = 16, 5


class RunsOut(Transport):
    """A transport for one process. Memory lacks once for a collective of the kind that ``lacking`` names."""

    def __init__(self) -> None:
        self.lacking = ""

    def _needs_memory(self, kind: str) -> None:
        if self.lacking == kind:
            self.lacking = ""
            raise torch.OutOfMemoryError

    def all_gather(self, outputs: Stack, shards: Stack, label: str) -> InFlight:
        del label
        self._needs_memory("gather")
        for output, shard in zip(outputs, shards, strict=True):
            output.copy_(shard)
        return InFlight()

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        del divisor, label
        self._needs_memory("reduction")
        for wgrad, sink in zip(wgrads, sinks, strict=True):
            (sink.add_ if accumulate else sink.copy_)(wgrad)
        return InFlight()


class Overlaps(RunsOut):
    """A transport whose reductions, as on a GPU, read and write their sink some time between start and end."""

    def reduce_scatter(self, wgrads: Stack, sinks: Stack, divisor: int, label: str, *, accumulate: bool) -> InFlight:
        del divisor, label
        sums = [w + sink if accumulate else w.clone() for w, sink in zip(wgrads, sinks, strict=True)]
        return _Written(sums, sinks)


class _Written(InFlight):
    def __init__(self, sums: Sequence[torch.Tensor], sinks: Stack) -> None:
        super().__init__()
        self._sums, self._sinks = sums, sinks

    def join(self) -> None:
        for total, sink in zip(self._sums, self._sinks, strict=True):
            sink.copy_(total)


def differentiate(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The loss and every gradient."""
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    etp.wait_async_comms(model)
    return [loss.detach(), *(p.grad.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("options", [{}, {"reuse_across_forwards": True}, {"reduce_once_per_iteration": True}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("lacking", ["gather in forward", "gather in backward", "reduction in backward"])
def test_a_step_after_one_that_ran_out_of_memory_is_right(
    world: dist.ProcessGroup, lacking: str, tied: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    if tied:
        cast("nn.Linear", whole[-1]).weight = cast("nn.Linear", whole[0]).weight
    model = copy.deepcopy(whole)
    runtime = etp.shard_module(model, world, config=etp.EtpConfig(pad_for_alignment=1, **options))
    transport = RunsOut()
    runtime.routes.transports[world] = transport
    x = torch.randn(3, SIDE)
    wanted = [loss_or_grad.detach() for loss_or_grad in _of_the_whole(whole, x)]
    for _ in range(3):
        for _ in range(2):
            for mine, other in zip(differentiate(model, x), wanted, strict=True):
                torch.testing.assert_close(mine, other)
        kind, _, where = lacking.split()
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):  # noqa: PT012  # the whole step is given up
            if where == "forward":
                transport.lacking = kind
            loss = model(x).square().sum()
            transport.lacking = kind
            loss.backward()
            etp.wait_async_comms(model)
        assert not transport.lacking


def _of_the_whole(whole: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    loss = whole(x).square().sum()
    return [loss, *torch.autograd.grad(loss, list(whole.parameters()))]


def test_the_gradient_of_a_penalty_is_added_behind_the_reduction_into_the_same_gradient(
    world: dist.ProcessGroup,
) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    model = copy.deepcopy(whole)
    runtime = etp.shard_module(model, world, config=etp.EtpConfig(pad_for_alignment=1))
    runtime.routes.transports[world] = Overlaps()
    x = torch.randn(3, SIDE)
    for side in (whole, model):
        for _ in range(2):  # the second adds to what the first has left
            penalty = sum(param.square().sum() for param in side.parameters())
            (side(x).square().sum() + penalty).backward()
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(torch.as_tensor(mine.grad), other.grad)


class Experts(etp.GroupedLinear):
    """Experts whose operation asks the first weight for all, as Transformer Engine's does."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        y: torch.Tensor = _SumOfExperts.apply(x, *self.parameters())
        return y


class _SumOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *shards: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.leader = shards[0]
        return x * len(shards)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        wgrads = [grad.t() @ x * (index + 1) for index in range(3)]
        return grad * 3, *ctx.leader.finalize_group_grads(wgrads)


def test_experts_with_main_grad_get_their_gradients_from_autograd_grad(world: dist.ProcessGroup) -> None:
    """Megatron captures a layer's backward pass so, all of the layer's parameters among what it asks for."""
    torch.manual_seed(0)
    model = Experts(3, SIDE, SIDE, bias=False, etp_group=world, config=etp.EtpConfig(pad_for_alignment=1))
    shards: list[Any] = list(model.parameters())
    shards[0].driver.routes.transports[world] = RunsOut()
    for shard in shards:
        shard.main_grad = torch.zeros(shard.shape)
    x = torch.randn(4, SIDE, requires_grad=True)
    for asked in (shards, shards[1:], []):
        for shard in shards:
            shard.main_grad.zero_()
        torch.autograd.grad([model(x)], [x, *asked], [x.detach()], allow_unused=True)
        etp.wait_async_comms(model)
        for index, shard in enumerate(shards):
            wanted = (x.t() @ x).detach() * (index + 1) * any(shard is one for one in asked)
            torch.testing.assert_close(shard.main_grad, wanted)
