"""Replicated parameters: what registering one of many costs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from etp.config import GradReduction
from etp.replicated import ReplicatedGrads


class Counting(ReplicatedGrads):
    """Counts how often a parameter's hooks are looked at."""

    looked = 0

    def _is_last(self, param: nn.Parameter) -> bool:
        self.looked += 1
        return super()._is_last(param)


def test_registering_looks_at_no_other_parameter(world: dist.ProcessGroup) -> None:
    """A model with thousands of experts has as many biases."""
    grads = Counting(GradReduction.MEAN, lambda: None, lambda: False, lambda *_: None, lambda *_: None)
    params = [nn.Parameter(torch.randn(3)) for _ in range(50)]
    for index, param in enumerate(params):
        grads.register(param, world, f"bias{index}")
    assert grads.looked == len(params)
    assert all(len(param._backward_hooks or ()) == 1 for param in params)
    grads.watch()
    assert grads.looked == 2 * len(params)
    assert all(len(param._backward_hooks or ()) == 1 for param in params)
    grads.release()
    assert not any(param._backward_hooks for param in params)
