"""Counts the Python calls of small sharded models, of ETP and of PyTorch's FSDP2: on two ranks over gloo, on the CPU.

``python -m benchmarks.host_work --calls`` prints them. They do not depend on the machine, so a test limits them
(``tests/multiproc/test_host_calls.py``).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etp
from benchmarks.spawned import run_ranks

ETP, FSDP2 = f"{Path(etp.__file__).parent}/", "/torch/distributed/fsdp/"
_SIDE, _TOKENS = 64, 4
_RANKS = 2
_LIMIT_S = 120.0
EXPERTS = (4, 16, 128)
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Calls:
    """Calls of Python functions.

    Attributes:
        own: calls of the system's own functions.
        files: files in which these functions are.
        all: calls of all functions, PyTorch's included.
    """

    own: int
    files: int
    all: int

    def __str__(self) -> str:
        return f"{self.own} own calls in {self.files} files, {self.all} in all"


def counted[T](run: Callable[[], T], package: str) -> tuple[T, Calls]:
    """What ``run`` returns, and its calls; ``package`` is a part of the paths of the system's files."""
    paths: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            paths.append(frame.f_code.co_filename)

    gc.collect()
    gc.disable()  # it may run finalizers of whatever was there before
    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
        gc.enable()
    own = [path for path in paths if package in path]
    return result, Calls(len(own), len(set(own)), len(paths))


def linears(system: str, group: dist.ProcessGroup) -> nn.Sequential:
    """Three linear layers with biases, sharded over a group by :data:`ETP` or :data:`FSDP2`. Collective."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(_SIDE, _SIDE) for _ in range(3)))
    if system == ETP:
        etp.shard_module(model, group)
        return model
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return model


def experts(number: int, group: dist.ProcessGroup) -> nn.ModuleList:
    """Three grouped linear layers of ``number`` experts each, sharded by ETP. Collective."""
    torch.manual_seed(3)
    layers = nn.ModuleList(
        etp.GroupedLinear(number, _SIDE, _SIDE, bias=False, etp_group=group, device="cpu") for _ in range(3)
    )
    etp.shard_module(layers, group)  # so that each layer knows the others
    return layers


def forward_and_backward(layers: Any, package: str, *arguments: Sequence[int]) -> dict[str, Calls]:
    """Calls of a step of layers that follow each other: ``forward`` and ``backward`` of all, and of one ``visit``.

    The visit is the forward of the second layer: its weight was prefetched by the first, and it prefetches the third.
    Gradients add up over steps, and weights never change.

    Args:
        layers: three layers.
        package: as for :func:`counted`.
        arguments: further arguments of each layer's forward; for experts, the number of tokens of each.
    """
    x = torch.randn(sum(*arguments) if arguments else _TOKENS, _SIDE)
    for _ in range(_WARM_UP_STEPS):
        _forward(layers, x, arguments).sum().backward()
    y, forward = counted(lambda: _forward(layers, x, arguments), package)
    _, backward = counted(lambda: y.sum().backward(), package)
    y = layers[0](x, *arguments)
    y, visit = counted(lambda: layers[1](y, *arguments), package)
    layers[2](y, *arguments).sum().backward()
    return {"forward": forward, "backward": backward, "visit": visit}


def _forward(layers: Any, x: torch.Tensor, arguments: tuple[Sequence[int], ...]) -> torch.Tensor:
    if isinstance(layers, nn.Sequential):
        # FSDP2 wants to see the whole model begin.
        return layers(x)
    for layer in layers:
        x = layer(x, *arguments)
    return x


def all_calls(group: dist.ProcessGroup) -> dict[str, dict[str, Calls]]:
    """:func:`forward_and_backward` of every model that is looked at. Collective."""
    found = {
        "3 linears, ETP": forward_and_backward(linears(ETP, group), ETP),
        "3 linears, FSDP2": forward_and_backward(linears(FSDP2, group), FSDP2),
    }
    for number in EXPERTS:
        one_each = [1] * number
        found[f"3 x {number} experts, ETP"] = forward_and_backward(experts(number, group), ETP, one_each)
    return found


def print_all() -> None:
    """Start two ranks and print what they find."""

    def show(found: dict[str, dict[str, Calls]]) -> None:
        for model, parts in found.items():
            for part, calls in parts.items():
                print(f"{model}, {part}: {calls}")

    run_ranks(_rank, _RANKS, None, show, _LIMIT_S)


def _rank(rank: int, task: None, meeting: str, sending: Connection) -> None:
    del task
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=_RANKS)
    found = all_calls(dist.group.WORLD)
    if rank == 0:
        sending.send(found)
    dist.destroy_process_group()
