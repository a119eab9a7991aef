"""Bodies of the tests of a format that this file defines, in plain layers: what the engine does for any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast
from unittest import mock
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.collectives.c10d import C10dTransport
from etp.formats import Quantization, WeightFormat
from etp.layout import ShardLayout
from etp.stack import Stack
from tests.support.launch import device

ROWS, COLUMNS, LAYERS = 52, 24, 3


@dataclass(frozen=True)
class Bytes(WeightFormat):
    """A byte for each element, and one scale for each weight, on which the ranks agree."""

    name: ClassVar[str] = "bytes"
    row_alignment: ClassVar[int] = 4

    def quantization(
        self, shards: Sequence[Stack], layouts: Sequence[ShardLayout], memory: torch.Tensor | None = None
    ) -> Quantization:
        """See :class:`etp.formats.WeightFormat`."""
        assert memory is None, "c10d has none"
        return _Bytes(shards, layouts)


_LIVE: WeakSet[Quantization] = WeakSet()


class _Bytes(Quantization):
    def __init__(self, shards: Sequence[Stack], layouts: Sequence[ShardLayout]) -> None:
        _LIVE.add(self)
        self.copies = [Stack.allocate(len(stack), stack.shape, torch.uint8, stack.device) for stack in shards]
        self._shards, self._layouts = shards, layouts
        self._amax = torch.zeros(len(shards))

    def measure(self) -> torch.Tensor:
        return torch.stack([stack.block().abs().max() for stack in self._shards])

    def cast(self, everyone: torch.Tensor) -> None:
        self._amax = everyone.amax(dim=0)
        for stack, copies, amax in zip(self._shards, self.copies, self._amax, strict=True):
            for weight, copy in zip(stack, copies, strict=True):
                copy.copy_(_to_bytes(weight, amax))

    def assemble(self, index: int, gathered: Stack, trained: Sequence[bool], *, transposed: bool) -> list[torch.Tensor]:
        assert not transposed
        assert list(trained) == [True] * len(gathered)
        rows = self._layouts[index].rows
        return [_from_bytes(weight[:rows], self._amax[index]).to(self._shards[index].dtype) for weight in gathered]


def _to_bytes(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return (weight / amax * 127).round().to(torch.int8).view(torch.uint8)


def _from_bytes(weight: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return weight.view(torch.int8).float() * amax / 127


class Layer(nn.Linear):
    """A linear layer that asks for its weight in a format, as Transformer Engine's layers do."""

    format_: WeightFormat | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` times the weight as it was gathered."""
        weight = cast("etp.ETPShardedParam", self.weight)
        (full,) = weight.driver.gathers.visit(weight.weight_group, self.format_)
        return x @ full.t()[:, :COLUMNS]


def published_after_changes(rank: int, world_size: int) -> list[bool]:
    """For each layer, whether its copies are those of its shard after a change of this layer alone, without a pass."""
    del rank, world_size
    torch.manual_seed(5)
    model = nn.Sequential(*(Layer(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))
    config = etp.EtpConfig(pad_for_alignment=4, reuse_across_forwards=True)
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    for layer in model:
        layer.format_ = Bytes()
    with torch.no_grad():
        model(torch.ones(5, COLUMNS))
    right = []
    for layer, group in zip(model, runtime.groups, strict=True):
        shard = cast("etp.ETPShardedParam", layer.weight).local_shard()
        with torch.no_grad():
            shard.neg_()
        runtime.publish_weights()
        amax = shard.abs().max()
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        right.append(torch.equal(group.published()[0][0], _to_bytes(shard, amax)))
    return right


def copies_kept(rank: int, world_size: int, reuse: bool) -> tuple[list[int], list[bool]]:
    """Passes in which the last layer is in no format, which the first pass does not know, and then in and out of it.

    Returns:
        after each pass, how many copies of a shard exist; whether each output is that of weights in their formats.
    """
    del world_size
    torch.manual_seed(5)
    model = nn.Sequential(*(Layer(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))
    wholes = [cast("nn.Linear", layer).weight.detach().clone() for layer in model]
    config = etp.EtpConfig(pad_for_alignment=4, reuse_across_forwards=reuse)
    etp.shard_module(model, dist.group.WORLD, config=config)
    copies, right = [], []
    for last in (None, None, None, Bytes(), None, None, Bytes()):
        if not reuse or last is None:
            with torch.no_grad():
                for layer, whole in zip(model, wholes, strict=True):
                    whole.mul_(0.5)
                    cast("etp.ETPShardedParam", layer.weight).local_shard().mul_(0.5)
        x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(rank))
        found, wanted = x, x
        with torch.no_grad():
            for number, (layer, whole) in enumerate(zip(model, wholes, strict=True)):
                assert isinstance(layer, Layer)
                layer.format_ = last if number == LAYERS - 1 else Bytes()
                amax = whole.abs().max()
                weight = _from_bytes(_to_bytes(whole, amax), amax) if layer.format_ else whole
                wanted = wanted @ weight.t()[:, :COLUMNS]
            found = model(found)
        right.append(torch.equal(found, wanted))
        copies.append(sum(len(quantization.copies) for quantization in _LIVE))
    return copies, right


def gathered_in_a_format(
    rank: int, world_size: int, depth: int, reuse: bool, transport: str = "c10d"
) -> tuple[list[bool], int, int]:
    """Passes with new weights each time; the middle layer is gathered as it is stored in every other pass.

    Returns:
        whether each output is that of weights that were quantized as a whole; the bytes received, and those expected.
    """
    torch.manual_seed(5)
    model = nn.Sequential(*(Layer(COLUMNS, ROWS, bias=False) for _ in range(LAYERS))).to(device())
    options: dict[str, Any] = {"prefetch_depth": depth, "reuse_across_forwards": reuse, "transport": transport}
    config = etp.EtpConfig(pad_for_alignment=4, **options)
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    right, expected = [], 0
    for step in range(6):
        weights = []
        for index, layer in enumerate(model):
            assert isinstance(layer, Layer)
            layer.format_ = None if index == 1 and step % 2 else Bytes()
            shard = cast("etp.ETPShardedParam", layer.weight)
            whole = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(10 * step + index))
            start, stop = shard.layout.logical_range(rank)
            with torch.no_grad():
                shard.local_shard()[: stop - start].copy_(whole[start:stop])
            amax = whole.abs().max()
            weights.append(_from_bytes(_to_bytes(whole, amax), amax) if layer.format_ else whole)
            item = 1 if layer.format_ else 4
            expected += item * shard.layout.padded_rows * COLUMNS * (world_size - 1) // world_size
        for slot in runtime.modes.now.cache.slots():
            for buffer in slot.buffers:
                buffer.view(torch.uint8).fill_(77)
        x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(step))
        found, wanted = x, x
        with torch.no_grad():
            found = model(found)
            for weight in weights:
                wanted = wanted @ weight.t()[:, :COLUMNS]
        right.append(torch.equal(found, wanted))
    return right, sum(runtime.counters.gather_bytes.values()), expected


def exchanges_between_steps(rank: int, world_size: int, reuse: bool) -> list[tuple[int, int]]:
    """After each of two steps with three microbatches: how often weights were quantized, and ranks told scales."""
    del world_size
    model = nn.Sequential(*(Layer(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))
    config = etp.EtpConfig(pad_for_alignment=4, reuse_across_forwards=reuse, transport="c10d")
    etp.shard_module(model, dist.group.WORLD, config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with (
        mock.patch.object(_Bytes, "cast", autospec=True, side_effect=_Bytes.cast) as casts,
        mock.patch.object(C10dTransport, "exchange", autospec=True, side_effect=C10dTransport.exchange) as exchanges,
    ):
        for _ in range(2):
            for layer in model:
                layer.format_ = Bytes()
            for _ in range(3):
                with torch.no_grad():
                    model(torch.full((5, COLUMNS), float(rank)))
            counts.append((casts.call_count, exchanges.call_count))
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    return counts


def slots_within_a_budget(rank: int, world_size: int, budget: int) -> tuple[int, int]:
    """A pass in a format where ``budget`` weights may stay. Returns the bytes of slots, and of a weight."""
    model = nn.Sequential(*(Layer(COLUMNS, ROWS, bias=False) for _ in range(LAYERS)))
    nbytes = ShardLayout((ROWS, COLUMNS), world_size, 4).padded_rows * COLUMNS
    config = etp.EtpConfig(pad_for_alignment=4, prefetch_depth=0, resident_bytes=budget * nbytes)
    etp.shard_module(model, dist.group.WORLD, config=config)
    for layer in model:
        layer.format_ = Bytes()
    with torch.no_grad():
        model(torch.ones(5, COLUMNS))
    return etp.resident_nbytes(model)["gather_slots"], nbytes


def phases_of_an_example(rank: int, world_size: int, example: str) -> list[bool]:
    """Whether an example's ``quantize`` gives slices of the whole weights' bytes, and the whole weights' scales."""
    names: dict[str, Any] = {}
    exec(example, names)  # noqa: S102 - our own page
    generator = torch.Generator().manual_seed(7)
    wholes = [torch.randn(world_size * rows, 40, generator=generator).bfloat16() * rows for rows in (6, 17)]
    found, inverses = names["quantize"]([whole.chunk(world_size)[rank] for whole in wholes])
    right = []
    for whole, part, inverse in zip(wholes, found, inverses, strict=True):
        scale = 448.0 / whole.abs().max().float()
        quantized = (whole.float() * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        right += [torch.equal(part, quantized.chunk(world_size)[rank]), abs(inverse.item() * scale.item() - 1) < 1e-6]
    return right
