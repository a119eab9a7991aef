"""A body of the tests of profiles: the engine's ranges in a profile of one step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import etp
from tests.multiproc.bodies_modules import PlainExperts
from tests.support.launch import device

SIDE, EXPERTS = 8, 3
# The experts' group is named by its first weight.
NAMES = ("plain.weight", f"experts.weight0 (+{EXPERTS - 1})")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(SIDE, SIDE, bias=False, device=device())
        self.experts = PlainExperts(EXPERTS, SIDE, SIDE, bias=False, etp_group=dist.group.WORLD, device=device())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(self.plain(x), [2] * EXPERTS)
        return out


@dataclass(frozen=True)
class Ranges:
    """What :func:`ranges` found.

    Attributes:
        found: how often each of the engine's ranges is in the host's part of a profile of one step.
        entered: names of all ranges entered in a step without a profiler.
        plain: the gradients of the step without a profiler.
        profiled: the gradients of the step with one.
        transports: which collectives moved the shards.
    """

    found: Counter[str]
    entered: list[str]
    plain: list[torch.Tensor]
    profiled: list[torch.Tensor]
    transports: set[str]


def _step(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(rank)
    model(torch.randn(2 * EXPERTS, SIDE).to(device()).requires_grad_()).sum().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [grad.detach().as_subclass(torch.Tensor).clone().cpu() for grad in grads]


def ranges(rank: int, world_size: int, transport: str) -> Ranges:
    """Run the same step without and with a profiler, which looks at the GPU too where there is one."""
    torch.manual_seed(0)
    model = Net()
    runtime = etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(transport=transport))  # type: ignore[arg-type]
    entered: list[str] = []
    enter = torch.autograd.profiler.record_function.__enter__

    def noted(self: torch.autograd.profiler.record_function) -> torch.autograd.profiler.record_function:
        entered.append(self.name)
        return enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.profiler.record_function, "__enter__", noted)
        plain = _step(model, rank)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device().type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as run:
        profiled = _step(model, rank)
    # With a GPU, its kernels have ranges of the same names.
    on_host = [event.name for event in run.events() if event.device_type == DeviceType.CPU]
    found = Counter(name for name in on_host if name.startswith("etp: "))
    transports = {type(t).__name__ for t in runtime.routes.transports.values()}
    return Ranges(found, entered, plain, profiled, transports)


def check(result: Ranges) -> None:
    """Assert that a rank's profile names what happens to each weight, and that nothing else differs."""
    for name in NAMES:
        # A gather in the forward pass; the backward pass may use what its slot still holds.
        assert result.found[f"etp: all-gather of {name}"] >= 1, result.found
        assert result.found[f"etp: reduce-scatter of {name}'s gradient"] == 1, result.found
        assert result.found[f"etp: publication of {name}'s gradient"] == 1, result.found
    assert [name for name in result.entered if name.startswith("etp: ")] == []
    assert len(result.plain) == len(result.profiled) == 1 + EXPERTS
    for plain, profiled in zip(result.plain, result.profiled, strict=True):
        assert torch.equal(plain, profiled)
