"""Puts the parts that ranks hold of weights and optimizer states together, by rules of its own."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import torch

Whole = dict[tuple[str, str], torch.Tensor]
"""Full tensors by (kind, name); kind is "weight", "master" or one of :data:`STATES`."""

STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of the states of Megatron's optimizers: Adam has the first two, Muon the last."""

_TP_AXIS = {
    "linear_qkv": 0,
    "linear_fc1": 0,
    "word_embeddings": 0,
    "output_layer": 0,
    "linear_proj": 1,
    "linear_fc2": 1,
}

# Megatron stores the norms of its local layers where those of Transformer Engine's fused layers lie.
_STORED_NAMES = (
    (r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_"),
    (r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_"),
)


@dataclass(frozen=True)
class Part:
    """Consecutive elements of one rank's shard of one tensor.

    Attributes:
        kind: see :data:`Whole`.
        name: of the weight, with the layer's and the expert's number in the whole model.
        tp_rank: tensor-parallel rank.
        shard: number of the shard of the tensor-parallel part.
        shard_shape: shape of the shard, padding included.
        logical_rows: rows of all shards of the tensor-parallel part, without padding.
        start: first element, counted in the shard.
        elements: flat.
    """

    kind: str
    name: str
    tp_rank: int
    shard: int
    shard_shape: tuple[int, ...]
    logical_rows: int
    start: int
    elements: torch.Tensor


def assemble(parts: list[Part]) -> tuple[Whole, bool]:
    """Put all ranks' parts together.

    Returns:
        The full tensors, and whether all padding was zero.

    Raises:
        AssertionError: if replicas differ, or an element is missing.
    """
    grouped: dict[tuple[str, str], dict[tuple[int, int], list[Part]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        grouped[part.kind, part.name][part.tp_rank, part.shard].append(part)
    whole: Whole = {}
    padding_is_zero = True
    for (kind, name), by_rank in grouped.items():
        columns = []
        for tp_rank in sorted({tp_rank for tp_rank, _ in by_rank}):
            shards = [found for (rank, _), found in sorted(by_rank.items()) if rank == tp_rank]
            padded = torch.cat([_shard(found) for found in shards])
            rows = shards[0][0].logical_rows
            padding_is_zero = padding_is_zero and not bool(padded[rows:].any())
            columns.append(padded[:rows])
        whole[kind, name] = _join(name, columns)
    return whole, padding_is_zero


def _shard(parts: list[Part]) -> torch.Tensor:
    shape = torch.Size(parts[0].shard_shape)
    flat = torch.full((shape.numel(),), torch.nan, dtype=parts[0].elements.dtype)
    for part in parts:
        there = flat[part.start : part.start + part.elements.numel()]
        assert bool(there.isnan().all()) or torch.equal(there, part.elements), f"replicas of {part.name} differ"
        there.copy_(part.elements)
    assert not bool(flat.isnan().any()), f"elements of {parts[0].name} are missing"
    return flat.view(shape)


def _join(name: str, columns: list[torch.Tensor]) -> torch.Tensor:
    layer, _, what = name.rpartition(".")
    axis = _TP_AXIS.get(layer.rpartition(".")[2])
    if axis is None or what.startswith("layer_norm") or (axis == 1 and what == "bias"):
        assert all(torch.equal(columns[0], other) for other in columns), f"replicas of {name} differ"
        return columns[0]
    if layer.endswith("linear_fc1"):  # gate over up, on each rank
        halves = [column.chunk(2) for column in columns]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(columns, dim=axis)


def as_stored(state: Whole, *, local_layers: bool) -> dict[str, torch.Tensor]:
    """Weights and moments under the names that Megatron gives them in a checkpoint, layers and experts stacked.

    Args:
        state: full tensors.
        local_layers: whether the model consists of Megatron's own layers; Transformer Engine's keep their names.
    """
    prefixes = {"weight": ""} | {kind: f"optimizer.state.{kind}." for kind in STATES}
    stacked: dict[str, dict[tuple[int, ...], torch.Tensor]] = defaultdict(dict)
    for (kind, name), tensor in state.items():
        if kind not in prefixes:
            continue
        key = name
        for ours, megatrons in _STORED_NAMES if local_layers else ():
            key = re.sub(ours, megatrons, key)
        numbers = tuple(int(number) for number in re.findall(r"(?:layers|experts)\.(\d+)", key))
        stacked[prefixes[kind] + re.sub(r"(layers|experts)\.\d+", r"\1", key)][numbers] = tensor
    return {key: _stack(by_number) for key, by_number in stacked.items()}


def _stack(by_number: dict[tuple[int, ...], torch.Tensor]) -> torch.Tensor:
    if list(by_number) == [()]:
        return by_number[()]
    heads = sorted({numbers[0] for numbers in by_number})
    return torch.stack([_stack({n[1:]: t for n, t in by_number.items() if n[0] == head}) for head in heads])
