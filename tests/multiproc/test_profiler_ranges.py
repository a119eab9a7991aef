"""Profiles name the gathers, reductions and publications of each weight; without a profiler, nothing is recorded."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import etp
from tests.support.launch import run_distributed

pytestmark = [pytest.mark.multiproc, pytest.mark.cpu_only("it counts the ranges of transport c10d over gloo")]

SIDE, EXPERTS = 8, 3
# The experts' group is named by its first weight.
NAMES = ("plain.weight", f"experts.weight0 (+{EXPERTS - 1})")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(SIDE, SIDE, bias=False)
        self.experts = etp.GroupedLinear(EXPERTS, SIDE, SIDE, bias=False, etp_group=dist.group.WORLD, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(self.plain(x), [2] * EXPERTS)
        return out


def step(model: nn.Module) -> None:
    model(torch.randn(2 * EXPERTS, SIDE, requires_grad=True)).sum().backward()


def ranges(rank: int, world_size: int) -> tuple[Counter[str], list[str], list[torch.Tensor]]:
    """The engine's ranges in a profile of one step, those entered without a profiler, and the gradients of both."""
    torch.manual_seed(0)
    model = Net()
    etp.shard_module(model, dist.group.WORLD)
    entered: list[str] = []
    enter = torch.autograd.profiler.record_function.__enter__

    def noted(self: torch.autograd.profiler.record_function) -> torch.autograd.profiler.record_function:
        entered.append(self.name)
        return enter(self)

    gradients = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler.record_function, "__enter__", noted)
        torch.manual_seed(rank)
        step(model)
        gradients += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as run:
        torch.manual_seed(rank)
        step(model)
    gradients += [param.grad.clone() for param in model.parameters() if param.grad is not None]
    found = Counter(event.name for event in run.events() if event.name.startswith("etp: "))
    return found, entered, [gradient.detach().as_subclass(torch.Tensor) for gradient in gradients]


def test_a_profile_names_what_happens_to_each_weight() -> None:
    for found, entered, gradients in run_distributed(ranges, world_size=2):
        for name in NAMES:
            # A gather in the forward pass; the backward pass may use what its slot still holds.
            assert found[f"etp: all-gather of {name}"] >= 1, found
            assert found[f"etp: reduce-scatter of {name}'s gradient"] == 1, found
            assert found[f"etp: publication of {name}'s gradient"] == 1, found
        assert [name for name in entered if name.startswith("etp: ")] == []
        half = len(gradients) // 2
        assert half == 1 + EXPERTS
        for plain, profiled in zip(gradients[:half], gradients[half:], strict=True):
            assert torch.equal(plain, profiled)
