"""The arguments of ``etp.Muon``; what it computes is compared in tests/threaded/test_muon.py."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

import etp


def matrix(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 3, dtype=dtype))


def test_arguments_and_their_defaults_are_those_of_pytorch() -> None:
    ours, theirs = (inspect.signature(kind.__init__).parameters for kind in (etp.Muon, torch.optim.Muon))
    assert {name: each.default for name, each in ours.items()} == {name: each.default for name, each in theirs.items()}
    assert etp.Muon([matrix()]).defaults == torch.optim.Muon([matrix()]).defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0; it must be at least 0"),
        ({"lr": torch.ones(2)}, "lr is a tensor of 2 elements"),
        ({"momentum": float("nan")}, "momentum is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"ns_steps": 100}, "ns_steps is 100; it must be at least 0 and below 100"),
        ({"ns_coefficients": (1.0, 2.0)}, "ns_coefficients is (1.0, 2.0); it must have 3 numbers"),
        ({"adjust_lr_fn": "rms"}, "adjust_lr_fn is 'rms'; it must be one of"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        etp.Muon([matrix()], **options)


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (nn.Parameter(torch.ones(4)), r"shape \(4,\), which is no matrix; give it to another optimizer, such as AdamW"),
        (nn.Parameter(torch.ones(2, 3, 4)), r"shape \(2, 3, 4\), which is no matrix"),
        (matrix(torch.complex64), "torch.complex64; it must be real"),
    ],
)
def test_what_is_no_matrix_is_refused_when_it_is_given(param: nn.Parameter, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        etp.Muon([matrix(), param])
    optimizer = etp.Muon([matrix()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [param]})


def test_a_sparse_gradient_is_refused() -> None:
    param = matrix()
    param.grad = torch.ones(4, 3).to_sparse()
    with pytest.raises(ValueError, match=r"a sparse gradient, of a parameter of shape \(4, 3\)"):
        etp.Muon([param]).step()
