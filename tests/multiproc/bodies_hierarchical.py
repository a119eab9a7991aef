"""Bodies of the tests of groups that span hosts: ranks of one machine that are told that they are on several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.collectives import select_transport
from etp.collectives.base import Transport
from etp.collectives.c10d import C10dTransport
from etp.collectives.hierarchical import HOST_VARIABLE, HierarchicalTransport
from etp.config import EtpConfig
from etp.stack import Stack
from etp.streams import Lane
from tests.multiproc import bodies_formats, bodies_stacked
from tests.multiproc.models import VOCAB, Tiny
from tests.multiproc.oracle import Twins, poisoned
from tests.support.launch import device


@contextlib.contextmanager
def on_host(number: int) -> Iterator[None]:
    """Ranks say that they are on a host of this number."""
    before = os.environ.get(HOST_VARIABLE)
    os.environ[HOST_VARIABLE] = f"host-{number}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[HOST_VARIABLE]
        else:
            os.environ[HOST_VARIABLE] = before


def steps_equal_one_step(
    rank: int, world_size: int, per_host: int, dtype: torch.dtype, sink_dtype: torch.dtype, fp32: bool
) -> tuple[str, int]:
    """Gathers equal ``c10d``'s, and reductions the sum over hosts of sums over their ranks, bit for bit.

    Returns:
        the transport within hosts, and how many tensors were compared.
    """
    group = dist.group.WORLD
    assert group is not None
    config = EtpConfig(transport="hierarchical", fp32_accumulation=fp32, timeout_s=60.0)  # type: ignore[arg-type]
    with on_host(rank // per_host):
        ours = select_transport(config, group, device())
        assert isinstance(ours, HierarchicalTransport)
        return type(ours._within).__name__, _compared(ours, group, per_host, dtype, sink_dtype, fp32=fp32)


def _compared(
    ours: Transport,
    group: dist.ProcessGroup,
    per_host: int,
    dtype: torch.dtype,
    sink_dtype: torch.dtype,
    *,
    fp32: bool,
) -> int:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    plain = C10dTransport(group, EtpConfig(fp32_accumulation=fp32, timeout_s=60.0), device=device())
    generator = torch.Generator().manual_seed(1)

    def everyone(*shape: int, of: torch.dtype) -> torch.Tensor:
        """What each rank has, known to all."""
        return torch.randn(world_size, *shape, generator=generator).to(of).to(device())

    lane, compared = Lane(device()), 0
    kept: dict[tuple[int, ...], tuple[Stack, ...]] = {}
    for step in range(3):
        for count, rows, columns in ((1, 6, 5), (1, 1, 7), (3, 2, 4), (5, 3, 1)):
            shards = everyone(count, rows, columns, of=dtype)
            whole = count, world_size * rows, columns
            # As slots and pooled gradients do, these stay from step to step.
            stacks = [Stack.allocate(count, whole[1:], dtype, device()) for _ in range(3)]
            gathered, expected, wgrads = kept.setdefault(whole, tuple(stacks))
            for output in (*gathered, *expected):
                output.fill_(float("nan"))
            mine = Stack(shards[rank].clone().unbind(0))
            lane.start(partial(ours.all_gather, gathered, mine, "gather")).wait()
            lane.start(partial(plain.all_gather, expected, mine, "gather")).wait()
            grads, start = everyone(*whole, of=dtype), everyone(count, rows, columns, of=sink_dtype)[rank]
            for wgrad, grad in zip(wgrads, grads[rank], strict=True):
                wgrad.copy_(grad)
            sinks, accumulate = Stack(start.clone().unbind(0)), step % 2 == 0
            reduce = partial(ours.reduce_scatter, wgrads, sinks, world_size, "reduce", accumulate=accumulate)
            lane.start(reduce).wait()
            found = _summed(grads, per_host, fp32=fp32)[:, rank * rows : (rank + 1) * rows] / world_size
            if accumulate:
                found = (start + found).to(sink_dtype)
            for one, other in zip((*gathered, *sinks), (*expected, *found.to(sink_dtype)), strict=True):
                assert torch.equal(one, other), (step, count, rows, columns, one, other)
                compared += 1
    return compared


def _summed(grads: torch.Tensor, per_host: int, *, fp32: bool) -> torch.Tensor:
    """The sum over ranks in the transport's order."""
    hosts = grads.to(torch.promote_types(grads.dtype, torch.float32) if fp32 else grads.dtype).split(per_host)
    return _in_order([_in_order(list(host)) for host in hosts])


def _in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _scenario(model: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
    tokens = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(100 * step + data_rank))
    yield model(tokens.to(device())).square().mean()


def trains_after_an_evaluation(rank: int, world_size: int) -> None:
    """The first passes are in inference mode, as before a training that goes on from a checkpoint."""
    torch.manual_seed(5)
    with on_host(rank // 2):
        twins = Twins(Tiny(2).to(device()), rank, world_size, per_host=2, transport="hierarchical", timeout_s=30.0)
        tokens = torch.randint(0, VOCAB, (2, 5)).to(device())
        for step in range(2):
            with torch.inference_mode():
                assert torch.equal(twins.model(tokens), twins.reference.model(tokens))
            twins.step(_scenario, step)


def trains(rank: int, world_size: int, per_host: int, of: str) -> list[str]:
    """Three steps beside the unsharded model: losses, gradients and weights bit by bit.

    Returns:
        the transports.
    """
    torch.manual_seed(5)
    model: nn.Module = Tiny(2, tied=True) if of == "dense" else bodies_stacked.Mixture("index", True)
    scenario = _scenario if of == "dense" else bodies_stacked.scenario
    options = {"transport": "hierarchical", "timeout_s": 30.0, "pad_for_alignment": 3 if of == "dense" else 1}
    with on_host(rank // per_host), poisoned():
        twins = Twins(model.to(device()), rank, world_size, per_host=per_host, **options)
        sides = (twins.model, twins.reference.model)
        optimizers = [torch.optim.AdamW(side.parameters(), lr=1e-2, foreach=False) for side in sides]
        for step in range(3):
            twins.step(scenario, step)
            for optimizer in optimizers:
                optimizer.step()
            twins.compare_weights(f"step {step}")
    return [type(transport).__name__ for transport in twins.runtime.routes.transports.values()]


def gathered_in_a_format(rank: int, world_size: int) -> list[bool]:
    """Whether weights in a format are those of the format, over two hosts."""
    with on_host(rank * 2 // world_size):
        return bodies_formats.gathered_in_a_format(rank, world_size, 1, True, "hierarchical")[0]


def orders_differ_within_hosts(rank: int, world_size: int) -> str:
    """The ranks of each host use the same layers in another order, alike on both hosts. Returns what was raised."""
    with on_host(rank // 2):
        torch.manual_seed(3)
        model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        config = etp.EtpConfig(transport="hierarchical", prefetch_depth=0, timeout_s=30.0)  # type: ignore[arg-type]
        etp.shard_module(model.to(device()), dist.group.WORLD, config=config)
        x = torch.randn(3, 8, device=device())
        for order in ((0, 1, 2), (0, 2, 1) if rank % 2 else (0, 1, 2), (0, 1, 2)):
            try:
                out = x
                for index in order:
                    out = model[index](out)
                out.square().sum().backward()
            except etp.PeerMismatchError as error:
                return str(error)
    return "no error"


def one_leaves(rank: int, world_size: int) -> str:
    """The last rank leaves after a pass. Returns what was raised on the others."""
    with on_host(rank // 2):
        model = nn.Linear(8, 8, bias=False)
        config = etp.EtpConfig(transport="hierarchical", timeout_s=20.0)  # type: ignore[arg-type]
        etp.shard_module(model, dist.group.WORLD, config=config)
        try:
            for _ in range(1 if rank == world_size - 1 else 2):
                model(torch.randn(3, 8)).sum().backward()
        except etp.EtpCommunicationError as error:
            return str(error)
    return "no error"


def selected(rank: int, world_size: int) -> dict[str, str]:
    """Names of the transports of groups over several hosts, or why there is none."""
    answers = {}
    world = dist.group.WORLD
    assert world is not None
    hosts = {
        "uneven": (0, 0, 0, 1),
        "interleaved": (0, 1, 0, 1),
        "one host": (0, 0, 0, 0),
        "one rank each": (0, 1, 2, 3),
        "two ranks each": (0, 0, 1, 1),
    }
    for name, numbers in hosts.items():
        for transport in ("hierarchical", "auto"):
            config = EtpConfig(transport=transport, timeout_s=30.0)  # type: ignore[arg-type]
            with on_host(numbers[rank]):
                try:
                    answer = type(select_transport(config, world, device())).__name__
                except ValueError as error:
                    answer = str(error)
            answers[f"{name}, {transport}"] = answer
    return answers
