"""Bodies: ranks that do not use the same sharded layers in the same order."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import etp
from tests.support.launch import device, on_gpus

SIDE = 16


class Switched(nn.Module):
    """Layers of one shape, called in an order that the caller sets."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(layers))
        self.order: Sequence[int] = range(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through the layers in order."""
        for layer in self.order:
            x = torch.tanh(self.layers[layer](x))
        return x


def _model(layers: int = 4, **options: object) -> tuple[Switched, nn.Module]:
    """A sharded model, and the unsharded one."""
    torch.manual_seed(3)
    model, whole = Switched(layers).to(device()), Switched(layers).to(device())
    whole.load_state_dict(model.state_dict())
    config = etp.EtpConfig(transport="c10d", **options)  # type: ignore[arg-type]
    etp.shard_module(model, dist.group.WORLD, config=config)
    return model, whole


def _pass(model: Switched, order: Sequence[int], *, training: bool) -> torch.Tensor:
    model.order = order
    model.train(training)
    x = torch.randn(3, SIDE, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    with torch.set_grad_enabled(training):
        out = model(x)
    if training:
        out.square().sum().backward()
    return out.detach()


def orders_that_differ(
    rank: int, world_size: int, orders: Sequence[Sequence[int]], training: bool, options: dict[str, object]
) -> tuple[str, bool]:
    """Two passes alike, one in ``orders[rank]``, then alike again.

    Returns:
        what was raised, and whether the model is right afterwards.
    """
    model, whole = _model(**options)
    every = range(len(model.layers))
    for _ in range(2):
        _pass(model, every, training=training)
    try:
        _pass(model, orders[rank % len(orders)], training=training)
        if on_gpus():
            # The host reads the answer at the end of the next pass.
            _pass(model, every, training=training)
        raised = "no error"
    except etp.PeerMismatchError as error:
        raised = str(error)
    model.zero_grad()
    again = _pass(model, every, training=training)
    return raised, torch.equal(again, _pass(cast("Switched", whole), every, training=False))


def orders_that_differ_from_the_start(rank: int, world_size: int) -> tuple[str, list[bool]]:
    """The first pass of all uses two layers, another second one on each rank; then passes alike.

    Returns:
        what was raised, and whether each pass afterwards was right.
    """
    model, whole = _model()
    raised = "no error"
    try:
        _pass(model, (0, 1 + rank), training=True)
    except etp.PeerMismatchError as error:
        raised = str(error)
    model.zero_grad()
    expected = _pass(cast("Switched", whole), range(4), training=False)
    return raised, [torch.equal(_pass(model, range(4), training=True), expected) for _ in range(3)]


def uneven_numbers(rank: int, world_size: int, folder: str) -> None:
    """A rank leaves the order that both have learned, after the next layer was gathered ahead. Not for gloo.

    Writes what was raised or logged to a file, and ends the process: a gather that no peer will start keeps the device
    busy. If the host waits for the device first, as it does here when it moves inputs there, the watchdog ends it.
    """
    said = logging.FileHandler(Path(folder) / f"rank{rank}.txt")
    logging.getLogger("etp.collectives.watchdog").addHandler(said)
    model, _ = _model(timeout_s=5.0)
    raised = "no error"
    try:
        for order in (range(4), range(4), (0, 1, 2, 3) if rank == 0 else (0, 2, 1, 3), range(4), range(4)):
            _pass(model, order, training=True)
    except etp.PeerMismatchError as error:
        raised = str(error)
    said.emit(logging.makeLogRecord({"msg": raised}))
    time.sleep(10.0)  # the peer has until its timeout
    os._exit(1)


def orders_of_microbatches(rank: int, world_size: int) -> str:
    """Gradients that are only added up for a while: the difference is found when each backward pass ends."""
    model, _ = _model(reduce_once_per_iteration=True, prefetch_depth=0)
    _pass(model, range(4), training=True)
    try:
        _pass(model, (0, 1, 2, 3) if rank == 0 else (0, 2, 1, 3), training=True)
        if on_gpus():
            _pass(model, range(4), training=True)
    except etp.PeerMismatchError as error:
        return str(error)
    return "no error"


def exchanges_of_a_run(rank: int, world_size: int) -> list[int]:
    """How many exchanges each of these takes: a training pass, an evaluation, a forward pass without a backward one."""
    from etp.collectives.order import CollectiveOrder

    model, _ = _model()
    counts = []
    exchange = CollectiveOrder.exchange
    calls: list[None] = []

    def counted(self: CollectiveOrder, *arguments: Any) -> None:
        calls.append(None)
        exchange(self, *arguments)

    CollectiveOrder.exchange = counted  # type: ignore[method-assign]
    try:
        for training in (True, False):
            _pass(model, range(4), training=training)
            counts.append(len(calls))
            calls.clear()
        model.train()
        model(torch.randn(3, SIDE, device=device()))
        counts.append(len(calls))
    finally:
        CollectiveOrder.exchange = exchange  # type: ignore[method-assign]
    return counts


class Domains(nn.Module):
    """A sharded layer, and a replicated one for each kind of data."""

    def __init__(self, others: Sequence[nn.Module]) -> None:
        super().__init__()
        self.shared = nn.Linear(SIDE, SIDE)
        self.own = nn.ModuleList(others)

    def forward(self, x: torch.Tensor, kind: int) -> torch.Tensor:
        """Through the shared layer and that of the kind."""
        out: torch.Tensor = self.own[kind](self.shared(x))
        return out


def replicated_that_differ(rank: int, world_size: int, sizes: tuple[int, int]) -> tuple[str, bool]:
    """Ranks train other replicated parameters, then the same ones.

    Returns:
        what was raised, and whether the gradients afterwards are those of the whole model.
    """
    torch.manual_seed(3)
    model = Domains([nn.PReLU(size) for size in sizes]).to(device())
    whole = Domains([nn.PReLU(size) for size in sizes]).to(device())
    whole.load_state_dict(model.state_dict())
    etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(transport="c10d"))

    def train(side: nn.Module, peer: int, kind: int) -> None:
        x = torch.randn(3, SIDE, generator=torch.Generator().manual_seed(peer)).to(device())
        side(x, kind).square().sum().backward()

    raised = "no error"
    try:
        train(model, rank, rank % 2)
        if on_gpus():
            train(model, rank, 0)
    except etp.PeerMismatchError as error:
        raised = str(error)
    model.zero_grad()
    train(model, rank, 1)
    for peer in range(world_size):
        train(whole, peer, 1)
    theirs = dict(whole.named_parameters())
    right = all(
        (param.grad is None) == (theirs[name].grad is None)
        and (param.grad is None or torch.allclose(param.grad, theirs[name].grad / world_size, rtol=1e-5))
        for name, param in model.named_parameters()
        if not isinstance(param, etp.ETPShardedParam)
    )
    return raised, right


def other_replicated(rank: int, world_size: int, transport: str, alike: bool, folder: str) -> None:
    """Ranks train other replicated parameters, of one size or not, whose all-reduce may never end. Not for gloo.

    Writes what was raised or logged to a file, and ends the process, whose device may be busy for ever.
    """
    said = logging.FileHandler(Path(folder) / f"rank{rank}.txt")
    logging.getLogger("etp.collectives.watchdog").addHandler(said)
    torch.manual_seed(3)
    other = nn.PReLU(SIDE) if alike else nn.Linear(SIDE, 40_000)
    model = Domains([nn.PReLU(SIDE), other]).to(device())
    config = etp.EtpConfig(transport=transport, timeout_s=5.0)
    etp.shard_module(model, dist.group.WORLD, config=config, replicated_modules=[model.own])
    x = torch.randn(3, SIDE, device=device())
    raised = "no error"
    try:
        for kind in (0, 1, rank, 0, 0):
            model(x, kind).square().sum().backward()
        torch.cuda.synchronize()
    except etp.PeerMismatchError as error:
        raised = str(error)
    said.emit(logging.makeLogRecord({"msg": raised}))
    time.sleep(10.0)  # the peer has until its timeout
    os._exit(1)
