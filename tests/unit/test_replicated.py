"""Replicated parameters: what registering one of many costs, and what peers are told before an all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from etp.config import EtpConfig
from etp.mode import Modes
from etp.passes import Passes
from etp.replicated import ReplicatedGrads
from etp.routes import Routes
from etp.versions import WeightVersions


def parts(routes: Routes) -> tuple[EtpConfig, Routes, Modes, Passes]:
    """What a runtime connects it with."""
    config = EtpConfig()
    weights = WeightVersions([], reuse_across_forwards=False)
    return config, routes, Modes(config), Passes([], weights, at_end=lambda: None)


class Counting(ReplicatedGrads):
    """Counts how often a parameter's hooks are looked at."""

    looked = 0

    def _is_last(self, param: nn.Parameter) -> bool:
        self.looked += 1
        return super()._is_last(param)


def test_registering_looks_at_no_other_parameter(world: dist.ProcessGroup) -> None:
    """A model with thousands of experts has as many biases."""
    grads = Counting(*parts(Routes(EtpConfig())))
    params = [nn.Parameter(torch.randn(3)) for _ in range(50)]
    for index, param in enumerate(params):
        grads.register(param, world, f"bias{index}")
    assert grads.looked == len(params)
    assert all(len(param._backward_hooks or ()) == 1 for param in params)
    grads.begin_pass(backward=True)
    assert grads.looked == len(params)
    grads.begin_pass(backward=False)
    assert grads.looked == 2 * len(params)
    assert all(len(param._backward_hooks or ()) == 1 for param in params)
    grads.release()
    assert not any(param._backward_hooks for param in params)


class Pairing(Routes):
    """Keeps what peers are to agree on, and whether the all-reduce had started by then."""

    def __init__(self, watched: torch.Tensor) -> None:
        super().__init__(EtpConfig())
        self.paired: list[tuple[str, list[str], float]] = []
        self._watched = watched

    def pair(self, process_group: dist.ProcessGroup, device: torch.device, label: str, members: Sequence[str]) -> None:
        """See the class."""
        super().pair(process_group, device, label, members)
        self.paired.append((label, list(members), float(self._watched)))


def test_peers_are_told_every_name_before_an_all_reduce(world: dist.ProcessGroup) -> None:
    """The first and the last, which messages show, may be the same where those between are not."""
    params = [nn.Parameter(torch.randn(3)) for _ in range(4)]
    params[0].grad = torch.zeros(3)
    routes = Pairing(params[0].grad[0])
    grads = ReplicatedGrads(*parts(routes))
    for index, param in enumerate(params):
        grads.register(param, world, f"bias{index}")
    torch.stack([params[index].sum() for index in (3, 0, 1)]).sum().backward()
    grads.reduce()
    label = "all-reduce of replicated gradients (bias0 to bias3)"
    assert routes.paired == [(label, ["bias0", "bias1", "bias3"], 0.0)]
    assert torch.equal(params[0].grad, torch.ones(3))
