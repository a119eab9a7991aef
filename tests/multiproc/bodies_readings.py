"""Body of the tests that read rows and columns of gathered weights in any order; on any device and transport."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import etp
from etp.formats import ApartFormat
from etp.formats.apart import ApartQuantization
from etp.layout import ShardLayout
from etp.stack import Stack
from tests.multiproc.bodies_fp8 import prepare
from tests.support.launch import device

# Shards of three ranks have padding.
SHAPES, EXPERTS = ((96, 160), (128, 64)), 3
ORDER = ((0, False), (2, False), (1, False), (1, True), (2, True), (0, True), (0, False), (1, True))
"""Of a pass: which layer is read, and whether by columns."""


class Model(nn.Module):
    """Two linear layers and some experts, whose weights are only read."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": str(device())}
        layers = [te.Linear(columns, rows, **options) for rows, columns in SHAPES]
        self.transposed: list[weakref.ref[torch.Tensor]] = []
        """New memory that visits have made."""
        self.layers = nn.ModuleList([*layers, te.GroupedLinear(EXPERTS, *SHAPES[0][::-1], **options)])

    def forward(self, format_: ApartFormat) -> list[list[dict[str, Any]]]:
        """What each visit of :data:`ORDER` returns: of each weight, the arrays that the layer would read."""
        found = []
        for place, columns in ORDER:
            weight = cast("etp.ETPShardedParam", next(self.layers[place].parameters()))
            tensors = weight.driver.gathers.visit(weight.weight_group, format_, transposed=columns)
            assert all(memory() is None for memory in self.transposed), "transposed columns were kept"
            if columns and format_.per_byte > 1:
                self.transposed += [weakref.ref(tensor._columnwise_data) for tensor in tensors]  # type: ignore[attr-defined]
            found.append([{name: _copy(part) for name, part in vars(tensor).items()} for tensor in tensors])
        return found


def _copy(part: Any) -> Any:
    return part.clone() if isinstance(part, torch.Tensor) else part


def rows_and_columns(rank: int, world_size: int, shim: str, format_: ApartFormat, transport: str) -> int:
    """Every reading has the bytes and scales of the quantized whole weight. Returns how many arrays were compared."""
    prepare(shim, "MXFP8BlockScaling")
    model = Model()
    config = etp.EtpConfig(transport=transport, pad_for_alignment=32)  # type: ignore[arg-type]
    runtime = etp.shard_module(model, dist.group.WORLD, config=config)
    compared = 0
    for step in range(3):
        wholes = [_draw(layer, rank, 100 * step + place) for place, layer in enumerate(model.layers)]
        for slot in runtime.modes.now.cache.slots():
            slot.buffers[0].fill_(255)
        with torch.no_grad():
            found = model(format_)
        for group in runtime.groups:
            group.release_derived()
        assert all(memory() is None for memory in model.transposed), "transposed columns were kept"
        for (place, columns), tensors in zip(ORDER, found, strict=True):
            for tensor, whole in zip(tensors, wholes[place], strict=True):
                compared += _compare(format_, tensor, whole, columns=columns)
    (gathered, gathers) = (sum(each.values()) for each in (runtime.counters.gather_bytes, runtime.counters.gathers))
    assert gathers >= 3 * len(ORDER) - 3, "one visit in a pass may find what it reads"
    assert 0 < gathered <= gathers * max(group.spec.nbytes for group in runtime.groups)
    return compared


def _draw(layer: nn.Module, rank: int, seed: int) -> list[torch.Tensor]:
    """New weights, whose shards the layer gets."""
    wholes = []
    for number, param in enumerate(layer.parameters()):
        assert isinstance(param, etp.ETPShardedParam)
        generator = torch.Generator().manual_seed(10 * seed + number)
        whole = torch.randn(param.layout.shape, generator=generator)
        whole *= torch.randn(len(whole), 1, generator=generator).exp2()
        whole[:32, :32] = 0
        whole = whole.to(device(), torch.bfloat16)
        start, stop = param.layout.logical_range(rank)
        with torch.no_grad():
            param.local_shard()[: stop - start].copy_(whole[start:stop])
        wholes.append(whole)
    return wholes


def _quantized(format_: ApartFormat, whole: torch.Tensor) -> Sequence[Stack]:
    quantization = format_.quantization([Stack([whole])], [ShardLayout(tuple(whole.shape), 1, 1)])
    assert isinstance(quantization, ApartQuantization)
    quantization.cast(quantization.measure().clone().view(1, -1))
    return quantization.published(0)


def _compare(format_: ApartFormat, tensor: dict[str, Any], whole: torch.Tensor, *, columns: bool) -> int:
    kind, other = ("columnwise", "rowwise") if columns else ("rowwise", "columnwise")
    data, scales = (stack[0] for stack in _quantized(format_, whole)[2 * columns :][:2])
    if columns and format_.per_byte > 1:
        data, scales = data.t(), scales.t()
    assert torch.equal(tensor[f"_{kind}_data"], data)
    held = tensor[f"_{kind}_scale_inv"]
    assert torch.equal(held[: scales.shape[0], : scales.shape[1]], scales)
    assert tensor[f"_{other}_data"] is None
    if f"_amax_{kind}" in tensor:
        assert torch.equal(tensor[f"_amax_{kind}"], whole.abs().max().float().view(1))
    return 2
