"""Bodies: layers that ``shard_module`` has not seen, or no longer finds where it saw them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import etp
from tests.support.launch import device

SIDE = 6
CONFIG = etp.EtpConfig(pad_for_alignment=1, timeout_s=20.0)


def _loose(seed: int, *, bias: bool = True) -> Any:
    torch.manual_seed(seed)
    return etp.Linear(SIDE, SIDE, bias, etp_group=dist.group.WORLD, device=device(), config=CONFIG)


def _whole(layer: nn.Module) -> nn.Linear:
    state = etp.full_state_dict(layer)
    whole = nn.Linear(SIDE, SIDE, "bias" in state).to(device())
    whole.load_state_dict(state)
    return whole


def _input(rank: int) -> torch.Tensor:
    return torch.randn(3, SIDE, generator=torch.Generator().manual_seed(rank)).to(device())


def _told(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, etp.EtpError) as error:
        return str(error)
    return "nothing was raised"


def _difference(
    layers: Sequence[nn.Module],
    wholes: Sequence[nn.Module],
    forward: Callable[..., torch.Tensor],
    rank: int,
    world_size: int,
) -> float:
    """The largest difference of a gradient from those of the unsharded layers, in two steps."""
    worst = 0.0
    for _ in range(2):
        for layer in (*layers, *wholes):
            layer.zero_grad()
        forward(*layers, _input(rank)).square().sum().backward()
        torch.stack([forward(*wholes, _input(peer)).square().sum() for peer in range(world_size)]).mean().backward()
        for layer, whole in zip(layers, wholes, strict=True):
            for name, param in layer.named_parameters():
                expected: Any = whole.get_parameter(name).grad
                if isinstance(param, etp.ETPShardedParam):
                    expected = expected.chunk(world_size)[rank]
                worst = max(worst, float((torch.Tensor(param.grad) - expected).abs().max()))
    return worst


def right_uses(rank: int, world_size: int) -> dict[str, float]:
    """Differences of gradients from those without sharding."""
    found: dict[str, float] = {}
    one, other = _loose(1), _loose(2)
    wholes = [_whole(one), _whole(other)]
    found["two layers"] = _difference(
        [one, other], wholes, lambda a, b, x: b(torch.tanh(a(x))) + a(x), rank, world_size
    )
    other.weight, wholes[1].weight = one.weight, wholes[0].weight
    found["tied"] = _difference([one, other], wholes, lambda a, b, x: b(torch.tanh(a(x))), rank, world_size)
    found["tied, the other first"] = _difference(
        [one, other], wholes, lambda a, b, x: a(torch.tanh(b(x))), rank, world_size
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)).to(device())
    etp.shard_module(model, dist.group.WORLD, config=CONFIG)
    beside, (first, second) = _loose(3), model
    found["beside a model"] = _difference(
        [first, beside, second],
        [_whole(first), _whole(beside), _whole(second)],
        lambda a, b, c, x: c(b(torch.tanh(a(x)))),
        rank,
        world_size,
    )
    found["in another module"] = _difference(
        [second], [_whole(second)], lambda a, x: nn.Sequential(a, nn.Tanh())(x), rank, world_size
    )
    model[1] = _loose(4, bias=False)
    found["in its place"] = _difference(
        [first, model[1]], [_whole(first), _whole(model[1])], lambda a, b, x: b(torch.tanh(a(x))), rank, world_size
    )
    del model
    gc.collect()
    found["its model is gone"] = _difference(
        [first], [_whole(first)], lambda a, x: a(torch.tanh(a(x))), rank, world_size
    )
    return found


def refused_uses(rank: int, world_size: int) -> dict[str, str]:
    """What is raised."""
    del world_size
    x, told = _input(rank), {}
    told["DistributedDataParallel"] = _told(lambda: DistributedDataParallel(nn.Sequential(_loose(1)))(x))
    layer = _loose(1, bias=False)
    layer(x).sum().backward()
    told["Muon"] = _told(torch.optim.Muon(layer.parameters()).step)
    told["LBFGS"] = _told(lambda: torch.optim.LBFGS(layer.parameters()).step(lambda: layer(x).sum()))
    layer.scale = nn.Parameter(torch.ones(SIDE, device=device()))
    told["added"] = _told(lambda: layer(x))
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)).to(device())
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    etp.shard_module(model, dist.group.WORLD, config=CONFIG)
    part = nn.Sequential(model[0], nn.Linear(SIDE, SIDE).to(device()))
    told["a part"] = _told(lambda: etp.shard_module(part, dist.group.WORLD))
    model[0] = _loose(4)
    told["in another's place"] = _told(lambda: model(x))
    return told


def other_orders(rank: int, world_size: int, trains: bool) -> str:
    """Two layers of the same names and shapes, used in an order that differs between the ranks."""
    del world_size
    layers = [_loose(1).train(trains), _loose(2).train(trains)]
    x = _input(rank)

    def use() -> None:
        with torch.set_grad_enabled(trains):
            found = [layer(x).sum() for layer in (layers if rank == 0 else reversed(layers))]
        if trains:
            torch.stack(found).sum().backward()

    return _told(use)
